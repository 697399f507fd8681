"""Measures what a prefill costs, for the cache server's choice between loading and computing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine_workers.cache_wire import PrefillReport
from engine_workers.connector.engine_request import EngineRequest, ScheduledRequest


class PrefillTiming:
    """Times prefills that have the engine to themselves; in company a step's cost has no owner.

    Args:
        clock: Seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._request_id = ""
        self._num_cached_tokens = 0
        self._num_computed_tokens = 0
        self._seconds = 0.0
        self._step_began_s: float | None = None
        self._is_last_step = False

    def on_step(self, running: Sequence[tuple[EngineRequest, ScheduledRequest]]) -> None:
        """A step is planned with these requests."""
        if len(running) != 1:
            if running:
                self._request_id = ""
            self._step_began_s = None
            return
        request, scheduled = running[0]
        begins = request.num_computed_tokens
        is_continued = (
            request.request_id == self._request_id
            and begins == self._num_cached_tokens + self._num_computed_tokens
        )
        if begins >= request.num_prompt_tokens:
            self._request_id = ""
            self._step_began_s = None
            return
        if not is_continued:
            self._request_id = request.request_id
            self._num_cached_tokens = begins
            self._num_computed_tokens = 0
            self._seconds = 0.0
        self._num_computed_tokens += scheduled.num_tokens
        self._is_last_step = begins + scheduled.num_tokens >= request.num_prompt_tokens
        self._step_began_s = self._clock()

    def on_step_done(self) -> PrefillReport | None:
        """The step is over; the report, if that was a prefill's last one."""
        if self._step_began_s is None or not self._request_id:
            return None
        self._seconds += self._clock() - self._step_began_s
        self._step_began_s = None
        if not self._is_last_step:
            return None
        self._request_id = ""
        return PrefillReport(
            num_cached_tokens=self._num_cached_tokens,
            num_computed_tokens=self._num_computed_tokens,
            seconds=self._seconds,
        )
