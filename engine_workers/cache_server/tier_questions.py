"""Asking all tiers at once what they hold, and making use of answers that come too late."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cache_router.errors import TierError
from engine_workers.blocks.block_name import BlockName
from engine_workers.cache_server.cache_metrics import CacheMetrics
from engine_workers.tiers.tier import Tier

_REMEMBERED_S = 60.0
_MAX_REMEMBERED = 65_536
_MAX_QUESTIONS_PER_TIER = 32
"""Beyond that a tier is not asked: it is slower than what comes in."""


@dataclass(frozen=True, slots=True)
class TierAnswer:
    """What one tier holds of some blocks, as far as is known."""

    tier: Tier
    has: Sequence[bool]
    """One a block, in order."""


class TierQuestions:
    """Asks, with a deadline.

    A tier that is late is not interrupted: what it says in the end is remembered for a minute, so
    that the next prompt with the same beginning finds it. A store that takes longer than any
    deadline to say what it holds would otherwise never be loaded from.

    Args:
        tiers: All below the arena, the fastest first.
        metrics: Counts questions.
        clock: Seconds, monotonic.
    """

    def __init__(
        self, tiers: Sequence[Tier], metrics: CacheMetrics, clock: Callable[[], float]
    ) -> None:
        self.tiers = tiers
        self._metrics = metrics
        self._clock = clock
        self._running: dict[str, set[asyncio.Task[list[bool] | None]]] = {}
        self._remembered: dict[tuple[str, BlockName], float] = {}

    async def ask(self, names: Sequence[BlockName], deadline_s: float) -> list[TierAnswer]:
        """Return what each tier says in time, or is remembered to have said; the fastest first."""
        questions = {tier.name: self._question(tier, names) for tier in self.tiers}
        asked = {question for question in questions.values() if question is not None}
        if asked:
            await asyncio.wait(asked, timeout=deadline_s)
        answers: list[TierAnswer] = []
        for tier in self.tiers:
            question = questions[tier.name]
            if question is not None and question.done():
                has = question.result()
                if has is not None:
                    answers.append(TierAnswer(tier, has))
                continue
            self._metrics.operations.labels(tier.name, "contains", "late").inc()
            answers.append(TierAnswer(tier, [self._remembers(tier, name) for name in names]))
        return answers

    def forget(self, tier: Tier, name: BlockName) -> None:
        """A block turned out not to be there."""
        self._remembered.pop((tier.name, name), None)

    def _question(
        self, tier: Tier, names: Sequence[BlockName]
    ) -> asyncio.Task[list[bool] | None] | None:
        running = self._running.setdefault(tier.name, set())
        if len(running) >= _MAX_QUESTIONS_PER_TIER:
            return None
        task = asyncio.create_task(self._contained(tier, names), name=f"contains:{tier.name}")
        running.add(task)
        task.add_done_callback(running.discard)
        return task

    async def _contained(self, tier: Tier, names: Sequence[BlockName]) -> list[bool] | None:
        """Ask one tier; None if it cannot be asked."""
        started = self._clock()
        try:
            has = await tier.contains(names)
        except TierError:
            self._metrics.operations.labels(tier.name, "contains", "error").inc()
            return None
        self._metrics.operation_seconds.labels(tier.name, "contains").observe(
            self._clock() - started
        )
        if tier.is_shared:
            self._remember(tier, names, has)
        return has

    def _remember(self, tier: Tier, names: Sequence[BlockName], has: Sequence[bool]) -> None:
        until = self._clock() + _REMEMBERED_S
        for name, is_there in zip(names, has, strict=True):
            self._remembered.pop((tier.name, name), None)
            if is_there:
                self._remembered[tier.name, name] = until
        while len(self._remembered) > _MAX_REMEMBERED:
            del self._remembered[next(iter(self._remembered))]

    def _remembers(self, tier: Tier, name: BlockName) -> bool:
        return self._remembered.get((tier.name, name), 0.0) > self._clock()
