"""Answering a lookup: the longest prefix over the arena and all tiers, staged and under a lease."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from cache_router.errors import TierError
from engine_workers.blocks.block_name import BlockName
from engine_workers.cache_server.cache_metrics import CacheMetrics
from engine_workers.cache_server.catalog import CachedBlock, Catalog
from engine_workers.cache_server.saving import ARENA
from engine_workers.cache_server.staging import Staging, Wanted
from engine_workers.tiers.tier import Tier


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long a lookup may take."""

    lookup_s: float
    """For the tiers to say what they hold."""
    stage_s: float
    """For blocks to come from the tiers."""


class HeldPrefix:
    """Blocks of one lookup that are in the arena, pinned as they come.

    Args:
        catalog: Where they are.
        names: The prefix that was asked for, beyond what the engine holds itself.
    """

    def __init__(self, catalog: Catalog, names: Sequence[BlockName]) -> None:
        self._catalog = catalog
        self._names = names
        self._blocks: dict[int, CachedBlock] = {}
        self._is_open = True

    def hold(self, index: int) -> bool:
        """Pin a block if it is there; say whether it is."""
        if index in self._blocks:
            return True
        block = self._catalog.find(self._names[index])
        if block is None or not self._is_open:
            return False
        self._catalog.pin(block)
        self._blocks[index] = block
        return True

    def take(self) -> list[CachedBlock]:
        """Give the longest prefix away, with its pins, and let go of the rest."""
        taken: list[CachedBlock] = []
        while (block := self._blocks.pop(len(taken), None)) is not None:
            taken.append(block)
        self.close()
        return taken

    def close(self) -> None:
        """Let go of all that was not taken; nothing is held from now on."""
        self._is_open = False
        for block in self._blocks.values():
            self._catalog.unpin(block)
        self._blocks.clear()


class Lookups:
    """Finds and stages prefixes.

    Args:
        catalog: The arena's blocks.
        staging: Brings those of the tiers.
        tiers: All tiers, the fastest first.
        deadlines: How long each step may take.
        metrics: Counts hits and misses.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        catalog: Catalog,
        staging: Staging,
        tiers: Sequence[Tier],
        deadlines: Deadlines,
        metrics: CacheMetrics,
        clock: Callable[[], float],
    ) -> None:
        self._catalog = catalog
        self._staging = staging
        self._tiers = tiers
        self._deadlines = deadlines
        self._metrics = metrics
        self._clock = clock

    async def find(
        self, names: Sequence[BlockName], payload_bytes: int, waiting: Callable[[float], None]
    ) -> list[CachedBlock]:
        """Return the longest prefix of `names` that is verified in the arena at the deadline.

        Args:
            names: Parent first.
            payload_bytes: Of each block.
            waiting: Called if blocks are on their way, with the seconds that they may take.

        Returns:
            Pinned blocks; whoever gets them unpins them.
        """
        started = self._clock()
        held = HeldPrefix(self._catalog, names)
        try:
            missing = [index for index in range(len(names)) if not held.hold(index)]
            if missing and self._tiers:
                wanted = await self._locate(names, missing, payload_bytes)
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
        asked = [names[index] for index in missing]
        answers = [
            asyncio.create_task(self._contained(tier, asked), name=f"contains:{tier.name}")
            for tier in self._tiers
        ]
        try:
            await asyncio.wait(answers, timeout=self._deadlines.lookup_s)
        finally:
            for answer in answers:
                answer.cancel()
        in_time = [
            (tier, answer.result())
            for tier, answer in zip(self._tiers, answers, strict=True)
            if answer.done() and not answer.cancelled()
        ]
        wanted: dict[int, Wanted] = {}
        for position, index in enumerate(missing):
            tiers = [tier for tier, has in in_time if has[position]]
            if not tiers:
                break
            wanted[index] = Wanted(names[index], payload_bytes, tiers)
        return wanted

    async def _contained(self, tier: Tier, names: Sequence[BlockName]) -> list[bool]:
        started = self._clock()
        try:
            answer = await tier.contains(names)
        except TierError:
            self._metrics.operations.labels(tier.name, "contains", "error").inc()
            return [False] * len(names)
        except asyncio.CancelledError:
            self._metrics.operations.labels(tier.name, "contains", "late").inc()
            raise
        self._metrics.operation_seconds.labels(tier.name, "contains").observe(
            self._clock() - started
        )
        return answer

    async def _stage(self, held: HeldPrefix, wanted: dict[int, Wanted]) -> None:
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

    def _count(
        self,
        names: Sequence[BlockName],
        blocks: Sequence[CachedBlock],
        missing: frozenset[int],
        seconds: float,
    ) -> None:
        for index, block in enumerate(blocks):
            self._catalog.touch(block.name)
            tier = block.source if index in missing else ARENA
            self._metrics.lookup_blocks.labels(tier).inc()
        self._metrics.lookup_blocks.labels("none").inc(len(names) - len(blocks))
        result = "full" if len(blocks) == len(names) else "partial" if blocks else "miss"
        self._metrics.lookup_seconds.labels(result).observe(seconds)


def _hold(held: HeldPrefix, index: int, _: asyncio.Task[None]) -> None:
    held.hold(index)
