"""Token ids for the gateway's requests: from a tokenizer here, from the engine's own, or none.

Work on prompts is done on a few threads of its own, so the event loop never waits for it. A
request that cannot be tokenized exactly is still served: having no token ids is an answer.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from cache_router.errors import RadixgateError, TokenizerError
from cache_router.settings import Settings
from cache_router.types import TokenIds
from gateway.tokenizing.bounded_threads import BoundedThreads
from gateway.tokenizing.engine_payload import chat_payload, completion_payload, single_payload
from gateway.tokenizing.incremental_cache import CacheStats, SegmentCache
from gateway.tokenizing.model_tokenizer import ModelTokenizer
from gateway.tokenizing.prompts import read_prompts, truncated
from gateway.tokenizing.request_fields import Body, read_completion_fields
from gateway.tokenizing.tokenizer_files import find_model_folder

logger = logging.getLogger(__name__)

Prompts = tuple[TokenIds, ...]
"""Token ids of a request's prompts, in order."""
TokenSource = Literal["gateway", "engine", "none"]
"""Who made token ids: a tokenizer in this process, the engine's endpoint, nobody."""

# Requests whose tokenizing waits or runs; more are routed without token ids.
_MAX_QUEUED = 1024
# Bodies of more bytes than nearly all contexts hold take seconds and hundreds of megabytes to
# encode: one after the other on a thread of their own, so that nobody else waits behind them.
_LONG_BODY_BYTES = 1024 * 1024
_MAX_QUEUED_LONG = 16
# Prompts of one request that the engine's endpoint is asked for, one after the other.
_MAX_ENGINE_PROMPTS = 64
_MAX_PARITY_CHECKS = 4


class EngineTokenizeClient(Protocol):
    """The gateway's way to the tokenizing endpoint of any ready worker."""

    async def tokenize(self, model: str, payload: dict[str, Any]) -> list[int]:
        """Send `payload` to `/tokenize` of a worker that serves `model`; return its `tokens`.

        Raises:
            RadixgateError: No worker is ready, it failed, or it refused the payload.
        """


@dataclass(frozen=True, slots=True)
class Tokenized:
    """A request's prompts as token ids."""

    prompts: Prompts
    """One array a prompt, in order; none at all if they are not known."""
    source: TokenSource


@dataclass(frozen=True, slots=True)
class TokenizerState:
    """How one model's requests are tokenized."""

    source: TokenSource
    reason: str
    """Why it is that source, in a few words."""
    folder: str | None
    """Where the gateway's own tokenizer was loaded from."""
    num_mismatches: int = 0
    """How often token ids differed from the engine's; the first time changes the source."""


@dataclass(frozen=True, slots=True)
class TokenizerStats:
    """What the service did so far, all models together."""

    mismatches_total: int
    checks_total: int
    """Parity checks that were answered."""
    unchecked_total: int
    """Parity checks without an answer: not asked, refused, failed or too late."""
    overflows_total: int
    """Requests that went without token ids because too many others waited for theirs."""
    cache: CacheStats


@dataclass(frozen=True, slots=True)
class _Model:
    state: TokenizerState
    root: str | None
    tokenizer: ModelTokenizer | None


_NO_TOKENS = Tokenized((), "none")
_UNKNOWN = _Model(TokenizerState("none", "the model is not known yet", None), None, None)


class TokenizerService:
    """The one place that the gateway asks for token ids. For one event loop."""

    def __init__(
        self,
        settings: Settings,
        engine: EngineTokenizeClient,
        hub_cache: Path | None,
        sample: Callable[[], float] = random.random,
    ) -> None:
        """Start the threads; models are told by `add_model`.

        Args:
            settings: The gateway's.
            engine: The way to the engines' own tokenizing endpoint.
            hub_cache: Where downloaded models lie, to find one by its hub id.
            sample: Draws from [0, 1) for the parity check's share.
        """
        self._settings = settings
        self._engine = engine
        self._hub_cache = hub_cache
        self._sample = sample
        self._threads = BoundedThreads(settings.tokenizer_threads, _MAX_QUEUED)
        self._long_threads = BoundedThreads(1, _MAX_QUEUED_LONG)
        self._cache = SegmentCache(settings.tokenizer_cache_bytes)
        self._models: dict[str, _Model] = {}
        self._loading = asyncio.Lock()
        self._loaded: dict[Path, ModelTokenizer] = {}
        self._num_parity_checks = 0
        self._mismatches = 0
        self._checks = 0
        self._unchecked = 0

    def close(self) -> None:
        """Stop the threads; what they have begun ends by itself."""
        self._threads.close()
        self._long_threads.close()

    async def add_model(self, model: str, root: str | None) -> TokenizerState:
        """Find out how to tokenize for `model`, whose engines say its files are at `root`.

        A model that is known under this root already is left as it is.
        """
        async with self._loading:
            known = self._models.get(model)
            if known is not None and known.root == root:
                return known.state
            tokenizer, reason = await self._find_tokenizer(root)
            self._models[model] = _Model(
                TokenizerState(
                    "engine" if tokenizer is None else "gateway",
                    reason,
                    None if tokenizer is None else str(tokenizer.folder),
                    0 if known is None else known.state.num_mismatches,
                ),
                root,
                tokenizer,
            )
        if tokenizer is None:
            logger.warning("%s is tokenized by its engine: %s", model, reason)
        return self._models[model].state

    def states(self) -> Mapping[str, TokenizerState]:
        """How each model is tokenized, by its name."""
        return {name: model.state for name, model in self._models.items()}

    def stats(self) -> TokenizerStats:
        """Counters of all models together."""
        return TokenizerStats(
            mismatches_total=self._mismatches,
            checks_total=self._checks,
            unchecked_total=self._unchecked,
            overflows_total=self._threads.num_refused + self._long_threads.num_refused,
            cache=self._cache.stats(),
        )

    async def tokenize_chat(self, model: str, body: Body, num_bytes: int = 0) -> Tokenized:
        """Get the token ids of a chat request's prompt, if they can be had.

        Args:
            model: The name that the request gives.
            body: What it asks.
            num_bytes: The body's size on the wire, by which it queues.
        """
        return await self._tokenize(model, body, num_bytes, _encode_chat, self._chat_by_engine)

    async def tokenize_completion(self, model: str, body: Body, num_bytes: int = 0) -> Tokenized:
        """Get the token ids of a completion request's prompts, if all of them can be had.

        Args:
            model: As for `tokenize_chat`, as are the others.
            body: What it asks.
            num_bytes: The body's size on the wire, by which it queues.
        """
        return await self._tokenize(
            model, body, num_bytes, _encode_completion, self._completion_by_engine
        )

    def should_sample(self) -> bool:
        """Draw whether a request's token ids are to be compared with the engine's own."""
        return self._sample() < self._settings.parity_sample_share

    async def check_parity(self, model: str, body: Body, token_ids: TokenIds) -> None:
        """Compare the gateway's `token_ids` of a request with what its engine makes of it.

        For requests with one prompt. Only a different answer counts against the tokenizer; no
        answer is no evidence.
        """
        tokenizer = self._models.get(model, _UNKNOWN).tokenizer
        if tokenizer is None or self._num_parity_checks >= _MAX_PARITY_CHECKS:
            self._unchecked += 1
            return
        self._num_parity_checks += 1
        try:
            payload = await self._threads.run(single_payload, model, body)
            async with asyncio.timeout(self._settings.engine_tokenize_timeout_s):
                expected = await self._ask_engine(model, payload)
        except (RadixgateError, TimeoutError) as error:
            self._unchecked += 1
            logger.debug("a parity check for %s went unanswered: %s", model, error)
            return
        finally:
            self._num_parity_checks -= 1
        self._checks += 1
        differs = not np.array_equal(expected, token_ids)
        if differs and tokenizer.reads_clock:
            # Midnight may lie between the two renderings.
            again = await self.tokenize_chat(model, body)
            differs = not any(np.array_equal(expected, ids) for ids in again.prompts)
        if differs:
            self.report_mismatch(model)

    def note_prompt_tokens(self, model: str, predicted: int, actual: int) -> None:
        """Compare counts: `predicted` from the gateway's tokenizer, `actual` from the usage.

        For requests with one prompt of plain text.
        """
        tokenizer = self._models.get(model, _UNKNOWN).tokenizer
        if predicted != actual and tokenizer is not None and not tokenizer.reads_clock:
            self.report_mismatch(model)

    def report_mismatch(self, model: str) -> None:
        """Count token ids that differed from the engine's, and let it tokenize from now on."""
        self._mismatches += 1
        entry = self._models.get(model)
        if entry is None:
            return
        state = replace(entry.state, num_mismatches=entry.state.num_mismatches + 1)
        if state.source == "gateway":
            state = replace(
                state, source="engine", reason="the gateway's token ids differed from the engine's"
            )
            logger.warning(
                "%s is tokenized by its engine from now on: token ids differed. Does it have a "
                "chat template or template arguments of its own?",
                model,
            )
        self._models[model] = _Model(state, entry.root, None)

    async def _find_tokenizer(self, root: str | None) -> tuple[ModelTokenizer | None, str]:
        """Load the tokenizer that the settings name, else the model's own; or say why not."""
        configured = self._settings.tokenizer
        name = root if configured is None else str(configured)
        if name is None:
            return None, "its engine does not say where the model's files are"
        folder = await asyncio.to_thread(find_model_folder, name, self._hub_cache)
        if folder is None:
            return None, f"{name} is neither a folder here nor in the local hub cache"
        if folder not in self._loaded:
            try:
                self._loaded[folder] = await self._threads.run(
                    ModelTokenizer.load, folder, self._settings.chat_template, self._cache
                )
            except RadixgateError as error:
                return None, str(error)
            except (OSError, ValueError) as error:
                return None, f"{folder} cannot be read: {error}"
        return self._loaded[folder], "tokenizer.json and a chat template are there"

    async def _tokenize(
        self,
        model: str,
        body: Body,
        num_bytes: int,
        encode: Callable[[ModelTokenizer, Body], Prompts],
        ask_engine: Callable[[str, Body], Awaitable[Prompts]],
    ) -> Tokenized:
        entry = self._models.get(model, _UNKNOWN)
        is_long = num_bytes > _LONG_BODY_BYTES
        try:
            if entry.tokenizer is not None:
                try:
                    threads = self._long_threads if is_long else self._threads
                    return Tokenized(await threads.run(encode, entry.tokenizer, body), "gateway")
                except TokenizerError as error:
                    logger.debug("a request for %s goes to the engine's endpoint: %s", model, error)
            if entry.state.source != "none":
                return Tokenized(await ask_engine(model, body), "engine")
        except (RadixgateError, TimeoutError) as error:
            logger.debug("a request for %s has no token ids: %s", model, error)
        return _NO_TOKENS

    async def _chat_by_engine(self, model: str, body: Body) -> Prompts:
        payload = await self._threads.run(chat_payload, model, body)
        async with asyncio.timeout(self._settings.engine_tokenize_timeout_s):
            return (await self._ask_engine(model, payload),)

    async def _completion_by_engine(self, model: str, body: Body) -> Prompts:
        fields = read_completion_fields(body)
        prompts = await self._threads.run(read_prompts, body.get("prompt"))
        if len(prompts) > _MAX_ENGINE_PROMPTS:
            raise TokenizerError("too many prompts to ask the engine for each")
        answers: list[TokenIds] = []
        async with asyncio.timeout(self._settings.engine_tokenize_timeout_s):
            for prompt in prompts:
                if isinstance(prompt, str):
                    payload = completion_payload(model, body, prompt)
                    answers.append(await self._ask_engine(model, payload))
                else:
                    answers.append(truncated(prompt, fields.truncation))
        return tuple(answers)

    async def _ask_engine(self, model: str, payload: dict[str, Any]) -> TokenIds:
        answer = await self._engine.tokenize(model, payload)
        try:
            return np.array(answer, dtype=np.uint32)
        except (OverflowError, TypeError, ValueError) as error:
            raise TokenizerError("the engine's endpoint answered with something else") from error


def _encode_chat(tokenizer: ModelTokenizer, body: Body) -> Prompts:
    return (tokenizer.encode_chat(body),)


def _encode_completion(tokenizer: ModelTokenizer, body: Body) -> Prompts:
    return tuple(tokenizer.encode_completion_body(body))
