"""Every error that radixgate raises on purpose.

RadixgateError
├── ConfigurationError            exit 2: a setting, named, and what to do about it
├── RequestError                  the caller's mistake; gateway/error_responses.py has statuses
│   ├── InvalidRequestError
│   ├── PromptTooLongError
│   ├── HeadTooLargeError
│   ├── BodyTooLargeError
│   ├── BodyTooSlowError
│   ├── UnsupportedMediaTypeError
│   └── UnknownModelError
├── NoWorkerError                 nobody ready serves the model
├── OverloadedError               too much is in flight already
├── UpstreamError                 a worker failed us
│   ├── UpstreamUnreachableError
│   │   ├── UpstreamConnectError
│   │   └── UpstreamStaleError
│   ├── UpstreamTimeoutError
│   ├── UpstreamProtocolError
│   └── UpstreamIncompleteError
├── TokenizerError                no exact token ids can be had at the gateway
├── EventDecodeError              a KV event batch that nobody can read
├── CacheWireError                what came over the cache server's socket cannot be meant
├── TierError                     a tier cannot be asked: down, full, refusing credentials
├── BlockLostError                a stored block is not there or cannot be used: a miss
│   └── BlockCorruptError         it was there, and is not what it says it is
└── EngineError                   an engine could not be started or died
"""

from __future__ import annotations


class RadixgateError(Exception):
    """Base of all errors here."""


class ConfigurationError(RadixgateError):
    """A setting that cannot work: one line that names it and says what to do."""

    def __init__(self, setting: str, problem: str) -> None:
        super().__init__(f"{setting}: {problem}")
        self.setting = setting


class RequestError(RadixgateError):
    """The caller's mistake: never retried, never held against a worker."""

    def __init__(self, message: str, *, param: str | None = None, code: str) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class InvalidRequestError(RequestError):
    """A body that is not JSON, a wrong type, a missing field, a bad combination."""

    def __init__(
        self, message: str, *, param: str | None = None, code: str = "invalid_request"
    ) -> None:
        super().__init__(message, param=param, code=code)


class PromptTooLongError(RequestError):
    """No worker's context holds the prompt."""

    def __init__(self, num_prompt_tokens: int, max_model_len: int) -> None:
        super().__init__(
            f"This model's maximum context length is {max_model_len} tokens, but the prompt has "
            f"{num_prompt_tokens}, which leaves no room for an answer. Shorten the prompt.",
            code="context_length_exceeded",
        )
        self.num_prompt_tokens = num_prompt_tokens
        self.max_model_len = max_model_len


class HeadTooLargeError(RequestError):
    """The request line and its headers are over the limit."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(
            f"The request's headers are larger than the {limit_bytes} bytes that are accepted "
            "here.",
            code="head_too_large",
        )


class BodyTooLargeError(RequestError):
    """The request body is over the limit."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(
            f"The request body is larger than the {limit_bytes} bytes that are accepted here.",
            code="body_too_large",
        )


class BodyTooSlowError(RequestError):
    """The request body stopped before its end."""

    def __init__(self, silence_s: float) -> None:
        super().__init__(
            f"The request body is not whole, and nothing of it came in {silence_s:g} s.",
            code="request_timeout",
        )


class UnsupportedMediaTypeError(RequestError):
    """The body is declared to be something other than JSON."""

    def __init__(self, media_type: str) -> None:
        super().__init__(
            f"Content-Type {media_type!r} is not supported; send application/json.",
            code="unsupported_media_type",
        )


class UnknownModelError(RequestError):
    """No worker, ready or not, serves the model."""

    def __init__(self, model: str) -> None:
        super().__init__(
            f"The model {model[:256]!r} does not exist.", param="model", code="model_not_found"
        )


class NoWorkerError(RadixgateError):
    """No ready worker serves the model."""

    def __init__(self, model: str, num_known: int) -> None:
        super().__init__(f"none of {num_known} workers serving {model!r} is ready")
        self.model = model
        self.num_known = num_known


class OverloadedError(RadixgateError):
    """More requests are in flight than may be; the caller should come back."""

    def __init__(self, num_in_flight: int, retry_after_s: int) -> None:
        super().__init__(f"{num_in_flight} requests are in flight, which is the limit")
        self.retry_after_s = retry_after_s


class UpstreamError(RadixgateError):
    """A worker failed us. `worker_id` is for the log; callers are not told addresses."""

    def __init__(self, worker_id: str, problem: str) -> None:
        super().__init__(f"worker {worker_id}: {problem}")
        self.worker_id = worker_id
        self.problem = problem


class UpstreamUnreachableError(UpstreamError):
    """Refused, reset or closed before a response's head had come."""


class UpstreamConnectError(UpstreamUnreachableError):
    """No connection could be opened, so nothing was sent."""


class UpstreamStaleError(UpstreamUnreachableError):
    """A kept-alive connection closed when it was used again: that says little of the worker."""


class UpstreamTimeoutError(UpstreamError):
    """Nothing came for longer than a time limit allows."""


class UpstreamProtocolError(UpstreamError):
    """What came is not HTTP, or not what the route can answer with."""


class UpstreamIncompleteError(UpstreamError):
    """The answer began and ended early: cut off, or without a finish reason."""


class TokenizerError(RadixgateError):
    """A tokenizer cannot be loaded, or cannot give this request's exact token ids."""


class EventDecodeError(RadixgateError):
    """A KV event batch does not have a form that any known vLLM sends."""


class EngineError(RadixgateError):
    """An engine could not be started, or died."""


class TierError(RadixgateError):
    """A tier cannot be asked; what it holds is unknown, which is not the same as nothing."""

    def __init__(self, tier: str, problem: str) -> None:
        super().__init__(f"tier {tier}: {problem}")
        self.tier = tier
        self.problem = problem


class BlockLostError(RadixgateError):
    """A stored block is not there, or not usable: a miss, to be computed."""

    def __init__(self, problem: str = "not there") -> None:
        super().__init__(f"block {problem}")
        self.problem = problem


class BlockCorruptError(BlockLostError):
    """A stored block is not what it says it is. `check` names what failed, for a counter."""

    def __init__(self, check: str) -> None:
        super().__init__(f"corrupt: {check}")
        self.check = check


class CacheWireError(RadixgateError):
    """What came over the cache server's socket is no message, or cannot be meant."""
