"""What one routed request occupies on its worker, given back exactly once."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from types import TracebackType
from typing import Self

from cache_router.predictions import Prediction, Predictions
from cache_router.types import BlockHash, WorkerId
from cache_router.worker_registry import WorkerLoad


class _Phase(Enum):
    NEW = auto()
    PREFILL = auto()
    DECODE = auto()
    FAILED = auto()
    CLOSED = auto()


class Reservation:
    """A running request's share of a worker's load, and its prediction. Enter it once.

    While the prefill is awaited, the request's uncached tokens wait there and its prompt is
    predicted there. Leaving gives back whatever is still held, whichever calls came before:
    without an error the prefill was done, with one (cancellation included) nothing is left to
    expect. Calls outside of the `with` block change nothing.
    """

    def __init__(
        self,
        worker_id: WorkerId,
        load: WorkerLoad,
        waiting_tokens: int,
        predictions: Predictions,
        prompts: Sequence[Sequence[BlockHash]],
    ) -> None:
        """Hold nothing yet.

        Args:
            worker_id: Where the request goes.
            load: That worker's counters. They are kept, so that a worker which was removed and
                found again starts from zero while we give back to the old ones.
            waiting_tokens: Prompt tokens that the worker has to compute for this request.
            predictions: Where to enter the prompts.
            prompts: The block hashes of each prompt.
        """
        self.worker_id = worker_id
        self._load = load
        self._waiting_tokens = waiting_tokens
        self._predictions = predictions
        self._prompts = prompts
        self._entered: list[Prediction] = []
        self._phase = _Phase.NEW

    def __enter__(self) -> Self:
        """Count the request in."""
        assert self._phase is _Phase.NEW, "a reservation is entered once"
        self._load.num_running += 1
        self._load.waiting_tokens += self._waiting_tokens
        self._entered = [
            self._predictions.enter(self.worker_id, hashes) for hashes in self._prompts
        ]
        self._phase = _Phase.PREFILL
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Count the request out."""
        if exc_type is None:
            self.prefill_done()
        elif self._phase is _Phase.PREFILL:
            self.failed()
        self._load.num_running -= 1
        self._phase = _Phase.CLOSED

    @property
    def awaits_prefill(self) -> bool:
        """Whether its tokens still wait there, or will once it is entered."""
        return self._phase in (_Phase.NEW, _Phase.PREFILL)

    @property
    def last_blocks(self) -> Sequence[BlockHash]:
        """The last full block of each prompt: when all are there, the prefill is done."""
        return [hashes[-1] for hashes in self._prompts if hashes]

    def prefill_done(self) -> None:
        """The first token came, or the blocks did. Only the first call counts."""
        if self._phase is _Phase.PREFILL:
            self._load.waiting_tokens -= self._waiting_tokens
            for prediction in self._entered:
                prediction.prefill_done()
            self._phase = _Phase.DECODE

    def failed(self) -> None:
        """The worker did not do it: nothing waits there any more, nothing will be cached."""
        if self._phase is _Phase.PREFILL:
            self._load.waiting_tokens -= self._waiting_tokens
        if self._phase in (_Phase.PREFILL, _Phase.DECODE):
            for prediction in self._entered:
                prediction.drop()
            self._phase = _Phase.FAILED
