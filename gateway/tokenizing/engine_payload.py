"""A request as the engine's own `/tokenize` takes it, where that gives the request's token ids.

That endpoint renders and encodes like the generation routes, but knows fewer fields: no
`documents`, no `reasoning_effort`, no truncation, and no `tool_choice`, by which an engine may
leave the tools out of the prompt.
"""

from __future__ import annotations

from typing import Any

from cache_router.errors import TokenizerError
from gateway.tokenizing.chat_messages import build_conversation
from gateway.tokenizing.prompts import read_prompts
from gateway.tokenizing.request_fields import (
    Body,
    Truncation,
    read_chat_fields,
    read_completion_fields,
)

_CHAT_FIELDS = (
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template_kwargs",
)


def chat_payload(model: str, body: Body) -> dict[str, Any]:
    """Make the `/tokenize` request for a chat body.

    Raises:
        TokenizerError: The endpoint cannot say what the body's token ids are.
    """
    fields = read_chat_fields(body)
    if body.get("documents") is not None or body.get("reasoning_effort") is not None:
        raise TokenizerError("the engine's endpoint knows neither documents nor reasoning effort")
    if fields.tools is not None and body.get("tool_choice") == "none":
        raise TokenizerError("the engine may leave the tools out, which its endpoint does not")
    _refuse_truncation(fields.truncation)
    # Only to find out whether it is all text: of anything else the ids alone say too little.
    build_conversation(body.get("messages"), "string", knows_developer=False)
    given = {name: body[name] for name in _CHAT_FIELDS if body.get(name) is not None}
    return {"model": model, **given}


def completion_payload(model: str, body: Body, prompt: str) -> dict[str, Any]:
    """Make the `/tokenize` request for one text among a completion body's prompts.

    Raises:
        TokenizerError: As `chat_payload`.
    """
    fields = read_completion_fields(body)
    _refuse_truncation(fields.truncation)
    return {"model": model, "prompt": prompt, "add_special_tokens": fields.add_special_tokens}


def single_payload(model: str, body: Body) -> dict[str, Any]:
    """Make the one `/tokenize` request that answers for the whole of a body.

    Raises:
        TokenizerError: As `chat_payload`, or it has several prompts, or token ids for one.
    """
    if "messages" in body:
        return chat_payload(model, body)
    prompts = read_prompts(body.get("prompt"))
    if len(prompts) != 1 or not isinstance(prompts[0], str):
        raise TokenizerError("only one prompt of text is compared")
    return completion_payload(model, body, prompts[0])


def _refuse_truncation(truncation: Truncation) -> None:
    if truncation.num_tokens is not None:
        raise TokenizerError("the engine's endpoint does not truncate")
