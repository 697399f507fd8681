from __future__ import annotations

import pytest

from engine_workers.cache_server.cache_metrics import CacheMetrics
from engine_workers.cache_server.load_planner import AskedPrefix, LoadPlanner
from engine_workers.cache_server.tier_use import TierUse
from engine_workers.cache_wire import PrefillReport, Put
from tests.engine_workers.cache_server.block_names import NAMESPACE, name_of
from tests.engine_workers.cache_server.conftest import Clock, Serve
from tests.engine_workers.cache_server.wire_client import hashes

ASKED = AskedPrefix(
    NAMESPACE, block_size=128, block_bytes=1_000_000, num_local_blocks=0, num_tokens=2000
)


class Engine:
    """Its prefill of 2,000 tokens takes a second."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.metrics = CacheMetrics()
        self.planner = LoadPlanner(self.metrics)
        self.use = TierUse(self.planner, self.metrics, clock)

    def report_prefill(self) -> None:
        for _ in range(20):
            self.planner.note_prefill(NAMESPACE, 0, 2000, 1.0)

    def look_up(self, num_blocks: int, seconds: float, num_lookups: int = 16) -> None:
        for _ in range(num_lookups):
            started = self.use.now()
            self.clock.now += seconds
            self.use.report(ASKED, num_blocks, started)

    def num_using(self) -> int:
        return sum(self.use.uses_cache([name_of(number)]) for number in range(1_000))


@pytest.fixture
def engine(clock: Clock) -> Engine:
    return Engine(clock)


def test_hits_and_quick_misses_change_nothing(engine: Engine) -> None:
    engine.report_prefill()
    engine.look_up(num_blocks=15, seconds=0.2)
    engine.look_up(num_blocks=0, seconds=0.005)
    assert engine.num_using() == 1_000


@pytest.mark.parametrize(
    ("num_blocks", "seconds", "reason"), [(15, 1.5, "loads"), (0, 0.1, "lookups")]
)
def test_loads_slower_than_computing_and_long_waits_for_nothing_make_prompts_go_by(
    engine: Engine, num_blocks: int, seconds: float, reason: str
) -> None:
    engine.report_prefill()
    engine.look_up(num_blocks, seconds)
    num_using = engine.num_using()
    assert 30 <= num_using <= 100
    registry = engine.metrics.registry
    assert registry.get_sample_value("radixgate_cache_bypassed_namespaces") == 1
    assert (
        registry.get_sample_value("radixgate_cache_bypassed_lookups_total", {"reason": reason})
        == 1_000 - num_using
    )


def test_saves_that_hold_up_the_engine_for_long_make_prompts_go_by(engine: Engine) -> None:
    engine.report_prefill()
    for _ in range(16):
        engine.use.note_save(NAMESPACE, 0.03)
        engine.use.note_save(NAMESPACE, 0.03)
        engine.look_up(num_blocks=0, seconds=0.001, num_lookups=1)
    assert engine.num_using() < 100
    reasons = {"reason": "saves"}
    registry = engine.metrics.registry
    assert registry.get_sample_value("radixgate_cache_bypassed_lookups_total", reasons)


def test_without_knowing_what_computing_takes_nothing_is_judged(engine: Engine) -> None:
    engine.look_up(num_blocks=0, seconds=10.0)
    assert engine.num_using() == 1_000


def test_prompts_that_go_by_are_not_saved_until_they_use_the_cache_again(engine: Engine) -> None:
    engine.report_prefill()
    engine.look_up(num_blocks=0, seconds=0.1)
    prompts = [[name_of(2 * number), name_of(2 * number + 1)] for number in range(200)]
    for prompt in prompts:
        is_used = engine.use.uses_cache(prompt)
        assert [engine.use.is_saved(name) for name in prompt] == [is_used, is_used]
    engine.clock.now += 900.0
    for prompt in prompts:
        assert engine.use.uses_cache(prompt)
        assert all(engine.use.is_saved(name) for name in prompt)


async def test_prompts_that_go_by_are_answered_with_nothing_and_their_ring_slots_are_freed(
    serve: Serve, clock: Clock
) -> None:
    async with serve() as running:
        client = await running.client()
        await client.save(range(1, 51))
        await client.send(PrefillReport(0, 512, 0.001))
        assert (await client.look_up(hashes(1))).num_blocks == 1
        asked = AskedPrefix(client.hello.namespace.fingerprint, 128, 10_000, 0, 512)
        for _ in range(16):
            started = running.parts.use.now()
            clock.now += 0.5
            running.parts.use.report(asked, 0, started)
        num_found = num_kept = 0
        for number in range(1, 51):
            num_found += (await client.look_up(hashes(1, number))).num_blocks
            await client.look_up(hashes(1, 100 + number))
            num_kept += (await client.save([100 + number])).num_kept
        assert num_found < 10
        assert num_kept < 10


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
async def test_an_engine_that_reports_impossible_seconds_is_disconnected(
    serve: Serve, seconds: float
) -> None:
    async with serve() as running:
        client = await running.client()
        await client.send(Put([0], hashes(1), seconds))
        assert await client.receive_any() is None
