"""Any order of stores, removals, restarts and damage leaves the blocks that should be there."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given, settings
from hypothesis import strategies as st

from cache_router.errors import BlockLostError
from engine_workers.tiers.ssd import SsdTier
from tests.engine_workers.blocks.made_blocks import block_of, name_of
from tests.engine_workers.tiers.test_ssd import opened, place_of
from tests.engine_workers.tiers.tier_contract import header_list, load, store

NUMBERS = st.integers(0, 5)
STEPS = st.one_of(
    st.tuples(st.just("store"), NUMBERS),
    st.tuples(st.just("remove"), NUMBERS),
    st.tuples(st.just("spoil header"), NUMBERS),
    st.tuples(st.just("spoil payload"), NUMBERS),
    st.tuples(st.just("restart"), NUMBERS),
)
SMALL_CAPACITY = 16 * 4096 * 4  # a new file every fourth page, so that histories go over many
SIZES = [1, 100, 4096, 5000, 9000, 12_288]


def spoil(folder: Path, number: int, offset_in_record: int) -> None:
    path, extent = place_of(folder, name_of(number))
    file = os.open(path, os.O_RDWR)
    try:
        place = extent.offset + (offset_in_record or extent.head_bytes)
        byte = os.pread(file, 1, place)
        os.pwrite(file, bytes([byte[0] ^ 1]), place)
    finally:
        os.close(file)


class History:
    def __init__(self, folder: Path, tier: SsdTier) -> None:
        self.folder = folder
        self.tier = tier
        self.stored: set[int] = set()
        self.spoilt: set[int] = set()
        self.headless: set[int] = set()
        """Of the spoilt ones, those that a restart will not find."""

    async def take(self, step: str, number: int) -> None:
        if step == "store":
            await store(self.tier, number, SIZES[number])
            self.stored.add(number)
        elif step == "remove":
            await self.tier.remove([name_of(number)])
            self.stored.discard(number)
            self.spoilt.discard(number)
            self.headless.discard(number)
        elif step == "restart":
            self.stored -= self.headless
            self.spoilt -= self.headless
            self.headless.clear()
            await self.tier.close()
            self.tier = await opened(self.folder, SMALL_CAPACITY)
        elif number in self.stored - self.spoilt:
            self.spoilt.add(number)
            if step == "spoil header":
                self.headless.add(number)
                spoil(self.folder, number, 30)
            else:
                spoil(self.folder, number, 0)

    async def check(self) -> None:
        for number in range(len(SIZES)):
            try:
                loaded = await load(self.tier, name_of(number), SIZES[number])
            except BlockLostError:
                assert number not in self.stored - self.spoilt
            else:
                assert number in self.stored - self.spoilt
                assert loaded == block_of(number, SIZES[number])
        good = self.stored - self.spoilt
        # What was spoilt is gone: it was deleted when it was loaded.
        self.headless.clear()
        assert {header.name for header in await header_list(self.tier)} == {
            name_of(number) for number in good
        }
        await self.take("restart", 0)
        assert await self.tier.contains([name_of(number) for number in range(len(SIZES))]) == [
            number in good for number in range(len(SIZES))
        ]
        await self.tier.close()


async def live(steps: list[tuple[str, int]]) -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        history = History(folder, await opened(folder, SMALL_CAPACITY))
        for step, number in steps:
            await history.take(step, number)
        await history.check()


@settings(max_examples=60, deadline=None)
@given(st.lists(STEPS, max_size=25))
def test_any_history_leaves_the_blocks_that_should_be_there(steps: list[tuple[str, int]]) -> None:
    asyncio.run(live(steps))
