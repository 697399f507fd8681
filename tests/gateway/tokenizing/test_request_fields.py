from __future__ import annotations

from typing import Any

import pytest

from cache_router.errors import TokenizerError
from gateway.tokenizing.request_fields import (
    Truncation,
    read_chat_fields,
    read_completion_fields,
)

FUNCTION = {"strict": True, "parameters": {"z": 1, "a": 2}, "name": "f", "unknown": 1}


def variables(**body: Any) -> dict[str, Any]:
    return dict(read_chat_fields(body).template_variables)


def test_defaults_are_the_engine_s() -> None:
    chat = read_chat_fields({})
    assert (chat.add_generation_prompt, chat.continue_final_message) == (True, False)
    assert chat.add_special_tokens is False
    assert chat.tools is None
    assert chat.documents is None
    assert read_completion_fields({}).add_special_tokens is True


def test_tools_get_the_engine_s_keys_in_the_engine_s_order() -> None:
    tools = read_chat_fields(
        {"tools": [{"function": FUNCTION, "bar": 1, "type": "function"}]}
    ).tools
    assert tools is not None
    assert list(tools[0]) == ["type", "function"]
    assert list(tools[0]["function"].items()) == [
        ("name", "f"),
        ("description", None),
        ("parameters", {"z": 1, "a": 2}),
        ("strict", True),
    ]


def test_deferred_loading_of_a_tool_holds_for_its_function() -> None:
    tools = read_chat_fields({"tools": [{"function": {"name": "f"}, "defer_loading": True}]}).tools
    assert tools == [
        {
            "type": "function",
            "function": {
                "name": "f",
                "description": None,
                "parameters": None,
                "defer_loading": True,
            },
            "defer_loading": True,
        }
    ]


def test_template_arguments_that_are_null_or_auto_count_as_not_given() -> None:
    arguments = {"a": None, "b": "auto", "c": 0, "d": False}
    assert variables(chat_template_kwargs=arguments) == {"c": 0, "d": False}


def test_fields_of_the_request_win_over_template_arguments() -> None:
    arguments = {"add_generation_prompt": False, "documents": [{"a": 1}], "return_dict": True}
    fields = read_chat_fields({"chat_template_kwargs": arguments})
    assert fields.add_generation_prompt is True
    assert fields.documents == [{"a": 1}]
    assert fields.template_variables == {}
    documents: list[dict[str, str]] = []
    both = read_chat_fields({"chat_template_kwargs": arguments, "documents": documents})
    assert both.documents == []


def test_reasoning_effort_switches_thinking_unless_told_otherwise() -> None:
    assert variables(reasoning_effort="none") == {
        "reasoning_effort": "none",
        "enable_thinking": False,
    }
    assert variables(reasoning_effort="high")["enable_thinking"] is True
    told = {"enable_thinking": False}
    assert variables(reasoning_effort="high", chat_template_kwargs=told)["enable_thinking"] is False
    untold = {"enable_thinking": None}
    assert "enable_thinking" not in variables(reasoning_effort="high", chat_template_kwargs=untold)


def test_truncation_is_read() -> None:
    body = {"truncate_prompt_tokens": 5, "truncation_side": "right"}
    assert read_chat_fields(body).truncation == Truncation(5, "right")
    assert read_completion_fields({"truncation_side": "right"}).truncation == Truncation()


@pytest.mark.parametrize(
    "body",
    [
        {"chat_template": "{{ messages }}"},
        {"chat_template": ""},
        {"chat_template_kwargs": {"chat_template": "x"}},
        {"chat_template_kwargs": {"tokenize": True}},
        {"chat_template_kwargs": {"tools": []}},
        {"chat_template_kwargs": {"messages": []}},
        {"chat_template_kwargs": []},
        {"mm_processor_kwargs": {"x": 1}},
        {"kv_transfer_params": {"prompt_token_ids": [1]}},
        {"add_generation_prompt": None},
        {"add_generation_prompt": "false"},
        {"add_special_tokens": 1},
        {"continue_final_message": True},
        {"documents": "x"},
        {"documents": ["x"]},
        {"reasoning_effort": "wild"},
        {"reasoning_effort": []},
        {"tools": []},
        {"tools": {}},
        {"tools": [{"type": "function"}]},
        {"tools": [{"type": "custom", "function": {"name": "f"}}]},
        {"tools": [{"function": {"name": 5}}]},
        {"tools": [{"function": {}}]},
        {"tools": [{"function": {"name": "f", "parameters": []}}]},
        {"truncate_prompt_tokens": -1},
        {"truncate_prompt_tokens": 0},
        {"truncate_prompt_tokens": True},
        {"truncate_prompt_tokens": "5"},
        {"truncate_prompt_tokens": 5, "truncation_side": "middle"},
    ],
)
def test_what_is_not_rebuilt_or_not_valid_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(TokenizerError):
        read_chat_fields(body)


@pytest.mark.parametrize("field", ["prompt_embeds", "suffix", "mm_processor_kwargs"])
def test_fields_that_change_a_completion_s_prompt_are_refused(field: str) -> None:
    with pytest.raises(TokenizerError, match=field):
        read_completion_fields({"prompt": "x", field: "y"})
    assert read_completion_fields({"prompt": "x", field: None}).add_special_tokens
