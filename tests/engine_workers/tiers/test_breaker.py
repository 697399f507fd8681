from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cache_router.errors import BlockLostError, TierError
from engine_workers.blocks.sealing import OpenSeal
from engine_workers.tiers.breaker import BreakerTier
from engine_workers.tiers.circuit import CircuitLimits, CircuitState
from engine_workers.tiers.redis import RedisTier
from engine_workers.tiers.redis_client import RedisOptions
from engine_workers.tiers.tier import Tier
from tests.engine_workers.blocks.made_blocks import name_of
from tests.engine_workers.tiers.test_ssd import SegmentRecords, opened
from tests.engine_workers.tiers.tier_contract import TierContract, header_list, load, store
from tests.engine_workers.tiers.valkey_server import ValkeyServer

LIMITS = CircuitLimits(max_failures=2, open_s=1.0)


class TestBreakerTier(TierContract):
    @pytest.fixture
    async def tier(self, tmp_path: Path) -> AsyncIterator[Tier]:
        tier = BreakerTier(await opened(tmp_path))
        yield tier
        await tier.close()

    @pytest.fixture
    def raw(self, tmp_path: Path) -> SegmentRecords:
        return SegmentRecords(tmp_path)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


async def test_a_tier_that_died_is_left_alone_and_asked_again_later() -> None:
    server = ValkeyServer()
    clock = Clock()
    tier = BreakerTier(RedisTier(RedisOptions(server.url), OpenSeal()), LIMITS, clock)
    await store(tier, 1)
    server.kill()
    for _ in range(2):
        with pytest.raises(TierError, match="ConnectionError"):
            await tier.contains([name_of(1)])
    with pytest.raises(TierError, match="not asked"):
        await load(tier, name_of(1), 4096)
    server.restart()
    with pytest.raises(TierError, match="not asked"):
        await tier.contains([name_of(1)])
    clock.now += 1.01
    assert await tier.contains([name_of(1)]) == [False]
    with pytest.raises(BlockLostError):
        await load(tier, name_of(1), 4096)
    block = await store(tier, 1)
    assert await load(tier, name_of(1), 4096) == block
    await tier.close()
    server.stop()


async def test_a_tier_that_is_full_can_still_be_read(tmp_path: Path) -> None:
    tier = BreakerTier(await opened(tmp_path, 100_000), LIMITS, Clock())
    block = await store(tier, 1)
    for _ in range(2):
        with pytest.raises(TierError, match="no room"):
            await store(tier, 3, 200_000)
    with pytest.raises(TierError, match="not asked"):
        await store(tier, 5)
    assert (tier.reading.state(), tier.writing.state()) == (CircuitState.CLOSED, CircuitState.OPEN)
    assert await load(tier, name_of(1), 4096) == block
    assert await header_list(tier) == [block[0]]
    await tier.remove([name_of(1)])
    assert await tier.contains([name_of(1)]) == [False]
    await tier.close()
