from __future__ import annotations

from typing import Any

import pytest

from cache_router.errors import TokenizerError
from gateway.tokenizing.chat_messages import build_conversation
from gateway.tokenizing.content_format import ContentFormat

PART = {"type": "text", "text": "a"}


def build(
    *messages: dict[str, Any],
    content_format: ContentFormat = "string",
    knows_developer: bool = False,
) -> list[dict[str, Any]]:
    return build_conversation(list(messages), content_format, knows_developer=knows_developer)


def user(content: object, **more: object) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


def call(**changes: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": "{}", **changes.pop("function", {})}
    return {"type": "function", "function": function, "id": "c1", **changes}


def arguments_of(text: str) -> object:
    built = build({"role": "assistant", "tool_calls": [call(function={"arguments": text})]})
    return built[0]["tool_calls"][0]["function"]["arguments"]


def test_texts_of_parts_are_joined_by_lines_and_empty_ones_left_out() -> None:
    parts = [PART, {"type": "text", "text": ""}, "bare", {"type": "text", "text": None}]
    assert build(user(parts)) == [user("a\nbare")]


def test_parts_stay_parts_where_the_template_takes_them() -> None:
    parts = [{**PART, "cache_control": {"x": 1}}, {"type": "text", "text": ""}, "bare"]
    assert build(user(parts), content_format="openai")[0]["content"] == [
        {"type": "text", "text": "a", "cache_control": {"x": 1}},
        {"type": "text", "text": ""},
        {"type": "text", "text": "bare"},
    ]


def test_refusals_and_thoughts_are_texts() -> None:
    parts = [{"type": "refusal", "refusal": "no"}, {"type": "thinking", "thinking": "hm"}]
    assert build(user(parts))[0]["content"] == "no\nhm"


@pytest.mark.parametrize("content_format", ["string", "openai"])
def test_missing_and_null_content_is_empty(content_format: ContentFormat) -> None:
    empty = "" if content_format == "string" else []
    for message in ({"role": "assistant"}, {"role": "assistant", "content": None}):
        assert build(message, content_format=content_format)[0]["content"] == empty


def test_a_tool_result_is_one_text_even_for_templates_that_take_parts() -> None:
    message = {"role": "tool", "tool_call_id": "1", "content": [PART, PART], "name": "f"}
    built = build(message, content_format="openai")[0]
    assert built == {"role": "tool", "content": "a\na", "tool_call_id": "1", "name": "f"}
    assert list(built) == ["role", "content", "tool_call_id", "name"]


def test_only_the_keys_of_a_role_are_kept() -> None:
    message = user("x", tool_calls=[call()], reasoning="r", zzz=1, name="bob", task="t")
    assert build(message) == [{"role": "user", "content": "x", "name": "bob", "task": "t"}]


def test_known_keys_of_a_tool_call_come_first_in_the_engine_s_order() -> None:
    built = build({"role": "assistant", "tool_calls": [call(index=0, function={"x": 1})]})
    tool_call = built[0]["tool_calls"][0]
    assert list(tool_call) == ["id", "function", "type", "index"]
    assert list(tool_call["function"]) == ["arguments", "name", "x"]


def test_arguments_are_decoded_and_anything_but_an_object_is_an_empty_one() -> None:
    assert arguments_of('{"a": [1.0, null]}') == {"a": [1.0, None]}
    assert [arguments_of(text) for text in ("", "[1]", "{bad", "null", "3")] == [{}] * 5


def test_an_empty_list_of_tool_calls_is_dropped() -> None:
    assert build({"role": "assistant", "content": "x", "tool_calls": []}) == [
        {"role": "assistant", "content": "x"}
    ]


def test_reasoning_is_given_under_both_names() -> None:
    for given, expected in (
        ({"reasoning": "r"}, "r"),
        ({"reasoning_content": "r"}, "r"),
        ({"reasoning": "", "reasoning_content": "r"}, ""),
    ):
        built = build({"role": "assistant", "content": "x", **given})[0]
        assert (built["reasoning"], built["reasoning_content"]) == (expected, expected)


def test_developers_become_one_system_message_in_front() -> None:
    developer = {"role": "developer", "content": [PART, PART]}
    late = {"role": "system", "content": "sys"}
    assert build(user("x"), late, developer) == [
        {"role": "system", "content": "sys\n\na\na"},
        user("x"),
    ]
    assert build(developer, user("x"))[0] == {"role": "system", "content": "a\na"}


def test_without_developers_system_messages_stay_where_they_are() -> None:
    late = {"role": "system", "content": "late"}
    assert build(user("x"), late) == [user("x"), late]


def test_a_template_that_knows_developers_gets_them_with_a_tools_key() -> None:
    built = build({"role": "developer", "content": "x"}, user("y"), knows_developer=True)
    assert built == [{"role": "developer", "content": "x", "tools": None}, user("y")]


def test_the_billing_line_is_taken_out_of_system_messages_only() -> None:
    line = "x-anthropic-billing-header: a=1"
    assert build({"role": "system", "content": line + "\nrest"})[0]["content"] == "rest"
    assert build({"role": "system", "content": [line, PART]})[0]["content"] == "a"
    assert build(user(line)) == [user(line)]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "http://x/y.png"}},
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
        {"type": "video_url", "video_url": {"url": "x"}},
        {"type": "prompt_embeds", "data": "x"},
        {"type": "tool_reference", "name": "x"},
        {"type": "text", "text": "a", "uuid": "1"},
        {"type": "new_kind", "text": "a"},
        {"type": "text", "text": 5},
        {"text": "no type"},
        7,
    ],
)
def test_what_is_not_plain_text_is_refused(part: object) -> None:
    for content_format in ("string", "openai"):
        with pytest.raises(TokenizerError):
            build(user([part]), content_format=content_format)


@pytest.mark.parametrize(
    "messages",
    [
        None,
        [],
        "text",
        [{"content": "x"}],
        [{"role": 7, "content": "x"}],
        [{"role": "user", "content": {"a": 1}}],
        [{"role": "assistant", "tool_calls": {"a": 1}}],
        [{"role": "assistant", "tool_calls": [{"type": "custom", "id": "1", "custom": {}}]}],
        [{"role": "assistant", "tool_calls": [{"type": "function", "id": "1"}]}],
        [{"role": "assistant", "tool_calls": [{**call(), "id": None}]}],
        [{"role": "assistant", "reasoning": 5}],
        [{"role": "tool", "content": "x", "tool_call_id": 5}],
        [{"role": "assistant", "tool_calls": [call(function={"arguments": "[" * 100_000})]}],
        [{"role": "assistant", "tool_calls": [call(function={"arguments": "1" * 5000})]}],
    ],
)
def test_malformed_messages_are_refused(messages: object) -> None:
    with pytest.raises(TokenizerError):
        build_conversation(messages, "string", knows_developer=False)


def test_a_developer_who_brings_tools_is_refused_where_the_template_would_see_them() -> None:
    developer = {"role": "developer", "content": "x", "tools": [{"type": "function"}]}
    with pytest.raises(TokenizerError, match="tools"):
        build(developer, knows_developer=True)
    assert build(developer)[0]["role"] == "system"
