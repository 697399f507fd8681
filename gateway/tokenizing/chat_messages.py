"""From the messages of a request to those that the engine hands to the chat template.

The engine validates messages against OpenAI's types, reduces each to the few keys that its role
may have, and reshapes the content as the template takes it. What it would refuse may be accepted
here (the request then fails there), but what it accepts must come out the same or be refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from cache_router.errors import TokenizerError
from gateway.tokenizing.chat_template import Message
from gateway.tokenizing.content_format import ContentFormat

# Which key holds the text, for each type of part that is text.
_TEXT_KEYS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "thinking": "thinking",
    "refusal": "refusal",
}
# Keys of a part that the engine knows and drops; it keeps unknown ones for the template.
_DROPPED_PART_KEYS = frozenset(
    {"type", "text", "thinking", "refusal", "closed", "prompt_cache_breakpoint"}
)
# Keys that make the engine look for something other than text in a part, whatever its type.
_FOREIGN_PART_KEYS = frozenset(
    {
        "audio_embeds",
        "audio_url",
        "data",
        "file",
        "image_embeds",
        "image_pil",
        "image_url",
        "input_audio",
        "name",
        "prompt_embeds",
        "tool_reference",
        "uuid",
        "video_embeds",
        "video_url",
    }
)
_TOOL_CALL_KEYS = ("id", "function", "type")
_FUNCTION_KEYS = ("arguments", "name")
# One client puts a line of its own, new with every request, before its system prompt; the engine
# takes it out, since no prefix could be cached with it.
_BILLING_LINE = "x-anthropic-billing-header"


def build_conversation(
    messages: object, content_format: ContentFormat, *, knows_developer: bool
) -> list[Message]:
    """Reduce and reshape `messages` as the engine does.

    Raises:
        TokenizerError: No list of messages, or one holds what is not plain text.
    """
    if not isinstance(messages, list) or not messages:
        raise TokenizerError("`messages` is not a list of messages")
    conversation = [_build_message(message, content_format) for message in messages]
    if any(message["role"] == "developer" for message in conversation):
        if knows_developer:
            _give_developers_tools(messages, conversation)
        else:
            conversation = _merge_system([_as_system(message) for message in conversation])
    return conversation


def _build_message(message: object, content_format: ContentFormat) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise TokenizerError("a message is not an object with a role")
    role: str = message["role"]
    parts = _parts(message)
    if role == "system":
        parts = list(_without_billing_line(parts))
    if content_format == "openai":
        wrapped = [wrapped for part in parts if (wrapped := _wrap(part)) is not None]
        content: str | list[Message] = wrapped
        if role == "tool":
            content = "\n".join(part["text"] for part in wrapped)
    else:
        content = "\n".join(text for part in parts if (text := _text_of(part)))
    built: Message = {"role": role, "content": content}
    if role == "assistant":
        _add_assistant_fields(built, message)
    elif role == "tool" and "tool_call_id" in message:
        built["tool_call_id"] = _optional_text(message, "tool_call_id")
    for key in ("name", "task"):
        if isinstance(message.get(key), str):
            built[key] = message[key]
    return built


def _parts(message: Mapping[str, Any]) -> list[object]:
    content = message.get("content")
    if content is None:
        return []
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if isinstance(content, list):
        return content
    raise TokenizerError("a message's content is neither a text nor a list of parts")


def _without_billing_line(parts: Iterable[object]) -> Iterable[object]:
    for part in parts:
        is_text_part = isinstance(part, dict) and part.get("type") == "text"
        text = cast("dict[str, object]", part).get("text") if is_text_part else part
        if not (isinstance(text, str) and text.startswith(_BILLING_LINE)):
            yield part
        elif rest := text.partition("\n")[2]:
            yield {**cast("dict[str, object]", part), "text": rest} if is_text_part else rest


def _wrap(part: object) -> Message | None:
    """Make `part` a text part, None if the engine skips it."""
    text = _text_of(part)
    if text is None:
        return None
    wrapped: Message = {"type": "text", "text": text}
    if isinstance(part, dict):
        wrapped.update({k: v for k, v in part.items() if k not in _DROPPED_PART_KEYS})
    return wrapped


def _text_of(part: object) -> str | None:
    """Read the text of `part`, None where the engine skips it.

    Raises:
        TokenizerError: `part` is an image, a sound, something unknown.
    """
    if isinstance(part, str):
        return part
    if not isinstance(part, dict) or not _FOREIGN_PART_KEYS.isdisjoint(part):
        raise TokenizerError("a content part is not plain text")
    part_type = part.get("type")
    if not isinstance(part_type, str) or part_type not in _TEXT_KEYS:
        raise TokenizerError("a content part is not plain text")
    text = part.get(_TEXT_KEYS[part_type])
    if isinstance(text, str):
        return text
    if text is None and part_type in ("text", "refusal"):
        return None
    raise TokenizerError("a content part's text is not a text")


def _add_assistant_fields(built: Message, message: Mapping[str, Any]) -> None:
    tool_calls = message.get("tool_calls")
    if tool_calls is not None:
        if not isinstance(tool_calls, list):
            raise TokenizerError("`tool_calls` is not a list")
        if tool_calls:
            built["tool_calls"] = [_tool_call(call) for call in tool_calls]
    reasoning = _optional_text(message, "reasoning")
    if reasoning is None:
        reasoning = _optional_text(message, "reasoning_content")
    if reasoning is not None:
        # Templates know it under either name.
        built["reasoning"] = reasoning
        built["reasoning_content"] = reasoning


def _optional_text(message: Mapping[str, Any], key: str) -> str | None:
    value = message.get(key)
    if value is not None and not isinstance(value, str):
        raise TokenizerError(f"a message's `{key}` is not a text")
    return value


def _tool_call(call: object) -> Message:
    """Order a call's keys as the engine's types do, known ones first, and decode its arguments."""
    if not isinstance(call, dict) or call.get("type") != "function":
        raise TokenizerError("a tool call is not a function call")
    function = call.get("function")
    if not isinstance(function, dict) or not all(
        isinstance(function.get(key), str) for key in _FUNCTION_KEYS
    ):
        raise TokenizerError("a tool call has no function name or arguments")
    if not isinstance(call.get("id"), str):
        raise TokenizerError("a tool call has no id")
    ordered = _known_first(call, _TOOL_CALL_KEYS)
    ordered["function"] = _known_first(function, _FUNCTION_KEYS)
    ordered["function"]["arguments"] = _arguments(function["arguments"])
    return ordered


def _known_first(value: Mapping[str, Any], known: Sequence[str]) -> Message:
    return {key: value[key] for key in known} | {
        key: item for key, item in value.items() if key not in known
    }


def _arguments(text: str) -> Message:
    """Decode a call's arguments; the engine makes anything but an object an empty one."""
    try:
        arguments = json.loads(text)
    except json.JSONDecodeError:
        return {}
    except (ValueError, RecursionError) as error:
        # A number with too many digits, or too deep a nesting: the engine fails on these as well.
        raise TokenizerError("a tool call's arguments cannot be decoded") from error
    return arguments if isinstance(arguments, dict) else {}


def _give_developers_tools(messages: Sequence[Any], conversation: Sequence[Message]) -> None:
    for message, built in zip(messages, conversation, strict=True):
        if built["role"] == "developer":
            if message.get("tools") is not None:
                # The engine's types rebuild these, in an order that depends on what else is set.
                raise TokenizerError("a developer message brings tools")
            built["tools"] = None


def _as_system(message: Message) -> Message:
    return {**message, "role": "system"} if message["role"] == "developer" else message


def _merge_system(conversation: list[Message]) -> list[Message]:
    """Make all system messages one, the first; a single one in front stays as it is."""
    positions = [i for i, message in enumerate(conversation) if message["role"] == "system"]
    if positions == [0]:
        return conversation
    merged = "\n\n".join(text for i in positions if (text := _joined(conversation[i])))
    others = [message for message in conversation if message["role"] != "system"]
    return [{"role": "system", "content": merged}, *others]


def _joined(message: Message) -> str:
    content = message["content"]
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content)
