"""What the gateway reads of a generation request, and what it changes in it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec

from cache_router.errors import InvalidRequestError
from gateway.json_body import JsonBody

# Keys that the gateway owns. From a client they would name another request's KV, jump the
# engine's queue, collide with a live request's id, or upset the index's count of blocks.
_OWNED = ("kv_transfer_params", "priority", "request_id")
_OWNED_XARG = "kv_cache_report_mode"


class Endpoint(StrEnum):
    """The generation routes, by their path."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A chat or completions request: the body as it came, and the fields that steer its way."""

    endpoint: Endpoint
    body: JsonBody
    model: str

    @classmethod
    def parse(cls, endpoint: Endpoint, raw: bytes) -> GenerationRequest:
        """Read a body; only what the gateway itself needs is checked, the rest is the engine's.

        Raises:
            InvalidRequestError: Not a JSON object, a key twice, or no usable `model`.
        """
        return cls.of(endpoint, JsonBody(raw))

    @classmethod
    def of(cls, endpoint: Endpoint, body: JsonBody) -> GenerationRequest:
        """Take a body that was read already.

        Raises:
            InvalidRequestError: It has no usable `model`.
        """
        return cls(endpoint, body, model_of(body))

    @property
    def fields(self) -> dict[str, Any]:
        """The body's top-level values."""
        return self.body.fields

    @property
    def is_stream(self) -> bool:
        """Whether a stream was asked for in so many words."""
        return self.fields.get("stream") is True

    @property
    def wants_usage(self) -> bool:
        """Whether the client asked for a stream's usage itself."""
        options = self.fields.get("stream_options")
        # Engines take 1 and "true" for true; what they do not take is theirs to refuse.
        return isinstance(options, dict) and options.get("include_usage") not in (None, False)

    @property
    def hides_usage(self) -> bool:
        """Whether usage is asked for by the gateway alone, and taken out of the stream again."""
        options = self.fields.get("stream_options")
        # Options of a wrong type are left for the engine to refuse.
        return self.is_stream and not self.wants_usage and isinstance(options, dict | None)

    @property
    def cache_salt(self) -> str | None:
        """What separates this request's KV blocks from those of other salts."""
        salt = self.fields.get("cache_salt")
        return salt if isinstance(salt, str) and salt else None

    @property
    def session_key(self) -> str | None:
        """The client's affinity hint, bounded."""
        key = self.fields.get("prompt_cache_key")
        return key[:256] if isinstance(key, str) and key else None

    @property
    def max_output_tokens(self) -> int:
        """What it may generate at most, 0 if it does not say."""
        names = ("max_completion_tokens", "max_tokens")
        for name in names if self.endpoint is Endpoint.CHAT else names[1:]:
            value = self.fields.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
        return 0

    def upstream_body(self) -> bytes:
        """Return the body for the engine: as it came but for what the gateway owns."""
        changes: dict[str, bytes | None] = dict.fromkeys(
            name for name in _OWNED if name in self.fields
        )
        xargs = self.fields.get("vllm_xargs")
        if isinstance(xargs, dict) and _OWNED_XARG in xargs:
            kept = {name: value for name, value in xargs.items() if name != _OWNED_XARG}
            changes["vllm_xargs"] = msgspec.json.encode(kept)
        if self.hides_usage:
            forced = {**(self.fields.get("stream_options") or {}), "include_usage": True}
            # Without usage asked for it had no effect; with it, it would show in every chunk.
            forced.pop("continuous_usage_stats", None)
            changes["stream_options"] = msgspec.json.encode(forced)
        return self.body.splice(changes) if changes else self.body.raw


def model_of(body: JsonBody) -> str:
    """Return the model that a body names.

    Raises:
        InvalidRequestError: It names none, or not by a string.
    """
    model = body.fields.get("model")
    if model is None:
        raise InvalidRequestError("The field 'model' is required.", param="model")
    if not isinstance(model, str):
        raise InvalidRequestError("The field 'model' must be a string.", param="model")
    return model
