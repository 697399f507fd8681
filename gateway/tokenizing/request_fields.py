"""Which fields of a request change its token ids, read as strictly as exactness needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from cache_router.errors import TokenizerError

Body = Mapping[str, Any]
"""A request's decoded JSON object."""

# Fields that change the prompt in a way that is not rebuilt here: a template from the client (the
# engine's operator decides whether it is honoured), options of media processing.
_REFUSED_IN_CHAT = ("chat_template", "mm_processor_kwargs")
# A vector instead of text, the end of a text to fill in, options of media processing.
_REFUSED_IN_COMPLETIONS = ("prompt_embeds", "suffix", "mm_processor_kwargs")
# Arguments of the engine's rendering functions: what a template variable of that name would
# become, if it did not fail the request, depends on the engine's settings.
_REFUSED_TEMPLATE_ARGUMENTS = frozenset(
    {
        "chat_template",
        "conversation",
        "conversations",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_tensors",
        "self",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
# Arguments that have a field of their own in the request, which wins over the template argument.
_OVERRIDDEN_TEMPLATE_ARGUMENTS = frozenset(
    {"add_generation_prompt", "continue_final_message", "documents", "return_dict"}
)
_REASONING_EFFORTS = frozenset({"none", "minimal", "low", "medium", "high", "xhigh", "max"})


@dataclass(frozen=True, slots=True)
class Truncation:
    """How the engine shortens a prompt."""

    num_tokens: int | None = None
    """Tokens to keep, at least 1; None keeps all."""
    side: Literal["left", "right"] | None = None
    """The end that gives way; None leaves it to the engine's tokenizer, which is the left."""


@dataclass(frozen=True, slots=True)
class ChatFields:
    """What decides a chat request's token ids, apart from the messages."""

    tools: Sequence[Mapping[str, Any]] | None
    documents: Sequence[Mapping[str, Any]] | None
    add_generation_prompt: bool
    continue_final_message: bool
    add_special_tokens: bool
    template_variables: Mapping[str, Any]
    """What the template may read besides; not yet reduced to what it does read."""
    truncation: Truncation


@dataclass(frozen=True, slots=True)
class CompletionFields:
    """What decides a completion request's token ids, apart from the prompt."""

    add_special_tokens: bool
    truncation: Truncation


def read_chat_fields(body: Body) -> ChatFields:
    """Read a chat body's fields.

    Raises:
        TokenizerError: A field's effect on the token ids is not rebuilt here, or the engine would
            refuse its value.
    """
    _refuse(body, _REFUSED_IN_CHAT)
    arguments = body.get("chat_template_kwargs")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict) or not _REFUSED_TEMPLATE_ARGUMENTS.isdisjoint(arguments):
        raise TokenizerError("`chat_template_kwargs` holds what is not only for the template")
    documents = body.get("documents")
    if documents is None:
        documents = arguments.get("documents")
        # The engine takes "auto" and null for not given.
        documents = None if documents == "auto" else documents
    if documents is not None and not (
        isinstance(documents, list) and all(isinstance(item, dict) for item in documents)
    ):
        raise TokenizerError("`documents` is not a list of objects")
    add_generation_prompt = _flag(body, "add_generation_prompt", default=True)
    continue_final_message = _flag(body, "continue_final_message", default=False)
    if add_generation_prompt and continue_final_message:
        raise TokenizerError("`continue_final_message` excludes `add_generation_prompt`")
    return ChatFields(
        tools=_tools(body.get("tools")),
        documents=documents,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        add_special_tokens=_flag(body, "add_special_tokens", default=False),
        template_variables=_template_variables(arguments, body.get("reasoning_effort")),
        truncation=_truncation(body),
    )


def read_completion_fields(body: Body) -> CompletionFields:
    """Read a completion body's fields.

    Raises:
        TokenizerError: As `read_chat_fields`.
    """
    _refuse(body, _REFUSED_IN_COMPLETIONS)
    return CompletionFields(
        add_special_tokens=_flag(body, "add_special_tokens", default=True),
        truncation=_truncation(body),
    )


def _refuse(body: Body, fields: Sequence[str]) -> None:
    for field in fields:
        if body.get(field) is not None:
            raise TokenizerError(f"`{field}` is set")
    transfer = body.get("kv_transfer_params")
    if isinstance(transfer, dict) and transfer.get("prompt_token_ids") is not None:
        # Token ids of an earlier stage, which the engine takes instead of the text.
        raise TokenizerError("`kv_transfer_params` brings token ids of its own")


def _flag(body: Body, field: str, *, default: bool) -> bool:
    value = body.get(field, default)
    if not isinstance(value, bool):
        raise TokenizerError(f"`{field}` is not a boolean")
    return value


def _truncation(body: Body) -> Truncation:
    num_tokens = body.get("truncate_prompt_tokens")
    if num_tokens is None:
        return Truncation()
    # -1 is the engine's context length, which only the engine knows; 0 leaves no prompt.
    if isinstance(num_tokens, bool) or not isinstance(num_tokens, int) or num_tokens < 1:
        raise TokenizerError("`truncate_prompt_tokens` is not a number of tokens above 0")
    side = body.get("truncation_side")
    if side not in (None, "left", "right"):
        raise TokenizerError("`truncation_side` is neither left nor right")
    return Truncation(num_tokens, side)


def _template_variables(arguments: Mapping[str, Any], effort: object) -> Mapping[str, Any]:
    variables = dict(arguments)
    if effort is not None:
        if not isinstance(effort, str) or effort not in _REASONING_EFFORTS:
            raise TokenizerError("`reasoning_effort` has no value that the engine knows")
        variables["reasoning_effort"] = effort
        variables.setdefault("enable_thinking", effort != "none")
    return {
        name: value
        for name, value in variables.items()
        if name not in _OVERRIDDEN_TEMPLATE_ARGUMENTS and value is not None and value != "auto"
    }


def _tools(tools: object) -> list[dict[str, Any]] | None:
    """Bring tools into the form, and the order of keys, that the engine gives the template."""
    if tools is None:
        return None
    if not isinstance(tools, list) or not tools:
        raise TokenizerError("`tools` is not a list of tools")
    return [_tool(tool) for tool in tools]


def _tool(tool: object) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(tool, dict) or not isinstance(function, dict):
        raise TokenizerError("a tool has no function")
    if tool.get("type", "function") != "function":
        raise TokenizerError("a tool is not a function")
    deferred = _typed(tool, "defer_loading", bool)
    ordered: dict[str, Any] = {
        "name": _typed(function, "name", str),
        "description": _typed(function, "description", str),
        "parameters": _typed(function, "parameters", dict),
    }
    if ordered["name"] is None:
        raise TokenizerError("a tool's function has no name")
    if (strict := _typed(function, "strict", bool)) is not None:
        ordered["strict"] = strict
    function_deferred = _typed(function, "defer_loading", bool)
    if function_deferred is None:
        function_deferred = deferred
    if function_deferred is not None:
        ordered["defer_loading"] = function_deferred
    whole: dict[str, Any] = {"type": "function", "function": ordered}
    if deferred is not None:
        whole["defer_loading"] = deferred
    return whole


def _typed(value: Mapping[str, Any], key: str, kind: type) -> Any:
    item = value.get(key)
    if item is not None and not isinstance(item, kind):
        raise TokenizerError(f"a tool's `{key}` has a wrong type")
    return item
