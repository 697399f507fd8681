"""The four shapes that a completion request's prompt may have, as one list."""

from __future__ import annotations

import numpy as np

from cache_router.errors import TokenizerError
from cache_router.types import TokenIds
from gateway.tokenizing.request_fields import Truncation

_MAX_TOKEN_ID = 2**32 - 1
# Each prompt is hashed and looked up while the event loop waits: 20 us each, a long wait for more.
_MAX_PROMPTS = 1024


def read_prompts(prompt: object) -> list[str] | list[TokenIds]:
    """Read a text, a list of texts, a list of token ids, or a list of such lists.

    Raises:
        TokenizerError: `prompt` is none of these, or empty, or longer than is worth routing by.
    """
    if isinstance(prompt, str) and prompt:
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise TokenizerError("`prompt` is neither a text nor a list, or it is empty")
    if isinstance(prompt[0], str | list) and len(prompt) > _MAX_PROMPTS:
        raise TokenizerError(f"`prompt` is a list of more than {_MAX_PROMPTS} prompts")
    if isinstance(prompt[0], str):
        if not all(isinstance(text, str) for text in prompt):
            raise TokenizerError("`prompt` mixes texts with other things")
        return prompt
    if isinstance(prompt[0], list):
        return [_token_ids(ids) for ids in prompt]
    return [_token_ids(prompt)]


def truncated(ids: TokenIds, truncation: Truncation) -> TokenIds:
    """Shorten a prompt of token ids as the engine does; by default its start gives way."""
    if truncation.num_tokens is None:
        return ids
    if truncation.side == "right":
        return ids[: truncation.num_tokens]
    return ids[-truncation.num_tokens :]


def _token_ids(ids: object) -> TokenIds:
    if not isinstance(ids, list) or not ids:
        raise TokenizerError("`prompt` has an empty list, or mixes lists with other things")
    if not all(type(token_id) is int and 0 <= token_id <= _MAX_TOKEN_ID for token_id in ids):
        raise TokenizerError("`prompt` has something among its token ids that is none")
    return np.array(ids, dtype=np.uint32)
