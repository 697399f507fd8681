"""Answering a lookup: the longest prefix over the arena and all tiers, staged and under a lease."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from engine_workers.blocks.block_name import BlockName
from engine_workers.cache_server.cache_metrics import CacheMetrics
from engine_workers.cache_server.catalog import CachedBlock, Catalog
from engine_workers.cache_server.held_prefix import HeldPrefix
from engine_workers.cache_server.load_planner import AskedPrefix, LoadPlanner
from engine_workers.cache_server.saving import ARENA
from engine_workers.cache_server.staging import Staging, Wanted
from engine_workers.cache_server.tier_questions import TierQuestions


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long a lookup may take."""

    lookup_s: float
    """For the tiers to say what they hold."""
    stage_s: float
    """For blocks to come from the tiers."""


class Lookups:
    """Finds and stages prefixes.

    Args:
        catalog: The arena's blocks.
        staging: Brings those of the tiers.
        questions: Ask the tiers.
        deadlines: How long each step may take.
        planner: Says what is worth loading.
        metrics: Counts hits and misses.
        used: Called with each block of an answer, while it is pinned.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        catalog: Catalog,
        staging: Staging,
        questions: TierQuestions,
        deadlines: Deadlines,
        planner: LoadPlanner,
        metrics: CacheMetrics,
        used: Callable[[CachedBlock], None],
        clock: Callable[[], float],
    ) -> None:
        self._catalog = catalog
        self._planner = planner
        self._staging = staging
        self._questions = questions
        self._deadlines = deadlines
        self._metrics = metrics
        self._used = used
        self._clock = clock

    async def find(
        self, asked: AskedPrefix, names: Sequence[BlockName], waiting: Callable[[float], None]
    ) -> list[CachedBlock]:
        """Return the longest prefix of `names` that is verified in the arena at the deadline.

        Args:
            asked: The prompt.
            names: Its blocks beyond the engine's own, parent first.
            waiting: Called if blocks are on their way, with the seconds that they may take.

        Returns:
            Pinned blocks; whoever gets them unpins them.
        """
        started = self._clock()
        held = HeldPrefix(self._catalog, names, self._clock)
        try:
            missing = [index for index in range(len(names)) if not held.hold(index)]
            if missing and self._questions.tiers:
                wanted = await self._locate(names, missing, asked.block_bytes)
                wanted = self._worth_loading(asked, held, wanted, len(names))
                if wanted:
                    waiting(self._deadlines.stage_s)
                    await self._stage(held, wanted)
            blocks = held.take()
        finally:
            held.close()
        self._count(names, blocks, frozenset(missing), self._clock() - started)
        return blocks

    async def _locate(
        self, names: Sequence[BlockName], missing: Sequence[int], payload_bytes: int
    ) -> dict[int, Wanted]:
        """Ask all tiers at once; return what to fetch so that the prefix has no gap, by index."""
        answers = await self._questions.ask(
            [names[index] for index in missing], self._deadlines.lookup_s
        )
        wanted: dict[int, Wanted] = {}
        for position, index in enumerate(missing):
            tiers = [answer.tier for answer in answers if answer.has[position]]
            if not tiers:
                break
            wanted[index] = Wanted(names[index], payload_bytes, tiers)
        return wanted

    def _worth_loading(
        self, asked: AskedPrefix, held: HeldPrefix, wanted: dict[int, Wanted], num_names: int
    ) -> dict[int, Wanted]:
        """Leave out what the engine computes as fast."""
        if not wanted:
            return wanted
        sources: list[str] = []
        for index in range(num_names):
            if index in wanted:
                sources.append(wanted[index].tiers[0].name)
            elif held.hold(index):
                sources.append(ARENA)
            else:
                break
        cut = self._planner.num_worth_loading(asked, sources)
        return {index: block for index, block in wanted.items() if index < cut}

    async def _stage(self, held: HeldPrefix, wanted: dict[int, Wanted]) -> None:
        started = self._clock()
        tasks: list[asyncio.Task[None]] = []
        for index, block in wanted.items():
            task = self._staging.start(block)
            if task is None:
                break
            # At once, or a later block of the same prefix could push it out again.
            task.add_done_callback(partial(_hold, held, index))
            tasks.append(task)
        if tasks:
            await asyncio.wait(tasks, timeout=self._deadlines.stage_s)
            self._learn(held, wanted, started)

    def _learn(self, held: HeldPrefix, wanted: dict[int, Wanted], started: float) -> None:
        """Take in how long each tier took for its blocks, or took at least for those not there."""
        num_bytes: dict[str, int] = {}
        seconds: dict[str, float] = {}
        now = self._clock()
        for index, block in wanted.items():
            arrived = held.arrival(index)
            tier = block.tiers[0].name if arrived is None else arrived.source
            if arrived is None and self._staging.is_running(block.name):
                took = now - started
            elif arrived is not None and arrived.time >= started:
                took = arrived.time - started
            else:
                continue
            num_bytes[tier] = num_bytes.get(tier, 0) + block.payload_bytes
            seconds[tier] = max(seconds.get(tier, 0.0), took)
        for tier, total in num_bytes.items():
            if any(tier == known.name for known in self._questions.tiers) and seconds[tier] > 0:
                self._planner.note_load(tier, total, seconds[tier])

    def _count(
        self,
        names: Sequence[BlockName],
        blocks: Sequence[CachedBlock],
        missing: frozenset[int],
        seconds: float,
    ) -> None:
        for block in blocks:
            self._catalog.touch(block.name)
            self._used(block)
        tiers = Counter(
            block.source if index in missing else ARENA for index, block in enumerate(blocks)
        )
        for tier, num_blocks in tiers.items():
            self._metrics.lookup_blocks.labels(tier).inc(num_blocks)
        self._metrics.lookup_blocks.labels("none").inc(len(names) - len(blocks))
        result = "full" if len(blocks) == len(names) else "partial" if blocks else "miss"
        self._metrics.lookup_seconds.labels(result).observe(seconds)


def _hold(held: HeldPrefix, index: int, _: asyncio.Task[None]) -> None:
    held.hold(index)
