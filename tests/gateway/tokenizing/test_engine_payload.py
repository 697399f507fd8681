from __future__ import annotations

from typing import Any

import pytest

from cache_router.errors import TokenizerError
from gateway.tokenizing.engine_payload import chat_payload, completion_payload, single_payload

MESSAGES = [{"role": "user", "content": "x"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def test_only_what_decides_token_ids_is_sent() -> None:
    body = {
        "messages": MESSAGES,
        "tools": TOOLS,
        "tool_choice": "auto",
        "temperature": 0,
        "user": "u",
        "stream": True,
        "add_generation_prompt": False,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    assert chat_payload("m", body) == {
        "model": "m",
        "messages": MESSAGES,
        "tools": TOOLS,
        "add_generation_prompt": False,
        "chat_template_kwargs": {"enable_thinking": False},
    }


def test_a_completion_is_asked_for_prompt_by_prompt() -> None:
    body = {"prompt": ["a", "b"], "add_special_tokens": False, "max_tokens": 5}
    assert completion_payload("m", body, "b") == {
        "model": "m",
        "prompt": "b",
        "add_special_tokens": False,
    }
    assert completion_payload("m", {}, "b")["add_special_tokens"] is True


@pytest.mark.parametrize(
    "more",
    [
        {"documents": []},
        {"reasoning_effort": "low"},
        {"tools": TOOLS, "tool_choice": "none"},
        {"truncate_prompt_tokens": 5},
        {"chat_template": "x"},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
    ],
)
def test_what_the_endpoint_cannot_answer_exactly_is_not_asked(more: dict[str, Any]) -> None:
    with pytest.raises(TokenizerError):
        chat_payload("m", {"messages": MESSAGES, **more})


def test_a_truncated_completion_is_not_asked_for() -> None:
    with pytest.raises(TokenizerError):
        completion_payload("m", {"truncate_prompt_tokens": 5}, "x")


def test_one_payload_answers_for_a_whole_body_with_one_text() -> None:
    assert single_payload("m", {"messages": MESSAGES})["messages"] == MESSAGES
    assert single_payload("m", {"prompt": ["x"]})["prompt"] == "x"
    for prompt in (["a", "b"], [1, 2], None):
        with pytest.raises(TokenizerError):
            single_payload("m", {"prompt": prompt})
