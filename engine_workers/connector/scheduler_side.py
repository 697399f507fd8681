"""The connector in the engine's scheduler: what to look up, what to promise, what to copy.

Everything runs in the scheduler's thread and returns at once. Only blocks that lie verified in the
arena under a lease are promised, so what the engine waits for is a memory copy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from engine_workers.connector.channel import Channel
from engine_workers.connector.connector_settings import ConnectorSettings
from engine_workers.connector.engine_request import (
    EngineRequest,
    EngineView,
    ScheduledRequest,
)
from engine_workers.connector.lookup_state import LookupState, Phase
from engine_workers.connector.lookups import Lookups
from engine_workers.connector.plan import LoadJob, StepPlan
from engine_workers.connector.prefill_timing import PrefillTiming
from engine_workers.connector.rank_agreement import CommittedBlocks, RankAgreement
from engine_workers.connector.save_planner import SavePlanner

_MAX_LOOKUPS_A_RUN = 2


@dataclass(slots=True)
class _Request:
    engine_request: EngineRequest
    num_lookups: int = 0
    """Since it was queued, or preempted and queued again."""
    has_failed: bool = False
    """A load failed: never promise anything again, or it could fail forever."""


class SchedulerSide:
    """State of all requests of one engine.

    Args:
        channels: Connections to the cache server, one for each tensor-parallel rank.
        block_size: Tokens in a block.
        settings: Deadlines.
        engine: What only the engine knows.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        channels: Sequence[Channel],
        block_size: int,
        settings: ConnectorSettings,
        engine: EngineView,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._block_size = block_size
        self._engine = engine
        self._lookups = Lookups(channels, settings, clock)
        self._requests: dict[str, _Request] = {}
        self._jobs: list[LoadJob] = []
        self._ended: list[str] = []
        self._saves = SavePlanner(block_size, engine)
        self._agreement = RankAgreement(len(channels))
        self._timing = PrefillTiming(clock)

    @property
    def is_connected(self) -> bool:
        """Whether every rank's server is there."""
        self._take_in()
        return self._lookups.is_connected

    def on_new_request(self, request: EngineRequest) -> None:
        """Ask for the request's prefix, as early as it is known."""
        self._take_in()
        state = self._requests[request.request_id] = _Request(request)
        self._look_up(state, self._engine.num_local_blocks(request))

    def num_new_tokens(self, request_id: str, num_computed_tokens: int) -> int | None:
        """Tokens that can be loaded behind `num_computed_tokens`; None: ask again next step."""
        self._take_in()
        state = self._requests.get(request_id)
        lookup = self._lookups.get(request_id)
        if state is None or lookup is None or num_computed_tokens % self._block_size:
            return 0
        if not self._lookups.settle(lookup):
            return None
        if lookup.phase is not Phase.STAGED:
            return 0
        num_local_blocks = num_computed_tokens // self._block_size
        if num_local_blocks < lookup.num_local_blocks:
            # The engine's own blocks were evicted while the request waited: ask for them too.
            self._lookups.give_back(lookup)
            return None if self._look_up(state, num_local_blocks) else 0
        return max(0, self._end_block(state, lookup) - num_local_blocks) * self._block_size

    def on_allocated(
        self, request_id: str, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        """Load what was promised, or give it back: the engine has decided.

        Args:
            request_id: Whose blocks were allocated.
            block_ids: All of the request's blocks, those of the engine's own cache first.
            num_external_tokens: Tokens to load; 0 if the engine wants none from here.
        """
        state = self._requests.get(request_id)
        lookup = self._lookups.get(request_id)
        if state is None or lookup is None or lookup.phase is Phase.LOADING:
            return
        if num_external_tokens == 0:
            self._lookups.give_back(lookup)
            return
        lookup.phase = Phase.LOADING
        lookup.end_block = self._end_block(state, lookup)
        lookup.first_block = lookup.end_block - num_external_tokens // self._block_size
        loaded = slice(lookup.first_block, lookup.end_block)
        self._jobs.append(
            LoadJob(
                request_id=request_id,
                ranks=lookup.rank_loads(),
                block_ids=tuple(block_ids[loaded]),
                block_hashes=tuple(state.engine_request.block_hashes[loaded]),
            )
        )

    def loaded_from(self, request_id: str) -> list[str]:
        """Tier of each block that is being loaded for the request, in order."""
        lookup = self._lookups.get(request_id)
        return lookup.sources if lookup is not None and lookup.phase is Phase.LOADING else []

    def plan_step(
        self, scheduled: Iterable[ScheduledRequest], preempted: Iterable[str]
    ) -> StepPlan:
        """Say what the workers have to copy in this step.

        Args:
            scheduled: Requests that compute in this step.
            preempted: Requests that lost their blocks since the last step.
        """
        self._take_in()
        for request_id in preempted:
            self._on_preempted(request_id)
        running = [
            (self._requests[item.request_id].engine_request, item)
            for item in scheduled
            if item.request_id in self._requests
        ]
        for request, _ in running:
            # It computes already: what was not taken by now never is.
            self._give_back_unless_loading(request.request_id)
        self._timing.on_step(running)
        plan = StepPlan(
            loads=tuple(self._jobs),
            saves=self._saves.plan(running) if self._lookups.is_connected else (),
            ended=tuple(self._ended),
        )
        self._jobs = []
        self._ended = []
        return plan

    def on_step_done(
        self, loaded: Iterable[str], failed: Iterable[str], committed: CommittedBlocks | None
    ) -> None:
        """Take in what the workers report.

        Args:
            loaded: Requests whose load is over at every rank, those that failed included.
            failed: Requests whose load failed at some rank.
            committed: Blocks that the server took over since the last report.
        """
        self._take_in()
        failed = set(failed)
        for request_id in loaded:
            self._on_load_over(request_id, has_failed=request_id in failed)
        if committed is not None:
            self._saves.on_stored(self._agreement.add(committed))
        report = self._timing.on_step_done()
        if report is not None:
            self._lookups.report(report)

    def on_finished(self, request_id: str) -> None:
        """Give back what a request that ended in any way still holds."""
        self._take_in()
        if self._requests.pop(request_id, None) is None:
            return
        self._ended.append(request_id)
        self._saves.on_ended(request_id)
        # While workers copy, the leases are needed; their report ends them.
        self._give_back_unless_loading(request_id)

    def awaits_answers(self) -> bool:
        """Whether the engine should come back soon although it has nothing to compute."""
        self._take_in()
        return self._lookups.awaits_answers()

    def _take_in(self) -> None:
        if self._lookups.take_in():
            self._saves.on_server_lost()
            self._agreement.forget()

    def _look_up(self, state: _Request, num_local_blocks: int) -> bool:
        if state.has_failed or state.num_lookups == _MAX_LOOKUPS_A_RUN:
            return False
        state.num_lookups += 1
        num_wanted = self._most_blocks(state.engine_request)
        return self._lookups.begin(state.engine_request, num_wanted, num_local_blocks)

    def _end_block(self, state: _Request, lookup: LookupState) -> int:
        return min(lookup.num_blocks, self._most_blocks(state.engine_request))

    def _most_blocks(self, request: EngineRequest) -> int:
        # Without its last token computed there are no logits to sample from, and computing it in
        # a loaded block would write to what other requests may share by then.
        return min((request.num_tokens - 1) // self._block_size, len(request.block_hashes))

    def _on_preempted(self, request_id: str) -> None:
        state = self._requests.get(request_id)
        if state is None:
            return
        self._ended.append(request_id)
        self._saves.on_ended(request_id)
        self._give_back_unless_loading(request_id)
        state.num_lookups = 0
        self._look_up(state, self._engine.num_local_blocks(state.engine_request))

    def _on_load_over(self, request_id: str, *, has_failed: bool) -> None:
        lookup = self._lookups.get(request_id)
        if lookup is None or lookup.phase is not Phase.LOADING:
            return
        self._lookups.give_back(lookup)
        state = self._requests.get(request_id)
        if state is None:
            return
        if has_failed:
            state.has_failed = True
            return
        loaded = slice(lookup.first_block, lookup.end_block)
        self._saves.on_stored(state.engine_request.block_hashes[loaded])

    def _give_back_unless_loading(self, request_id: str) -> None:
        lookup = self._lookups.get(request_id)
        if lookup is not None and lookup.phase is not Phase.LOADING:
            self._lookups.give_back(lookup)
