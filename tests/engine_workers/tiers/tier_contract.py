"""What every tier has to do: each sentence of `Tier`'s docstrings, and what may go wrong below it.

A test module for a tier inherits `TierContract` and adds two fixtures: `tier`, empty and open, and
`raw`, a way to what the store really holds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import pytest

from cache_router.errors import BlockCorruptError, BlockLostError, TierError
from engine_workers.blocks.block_header import BlockHeader
from engine_workers.blocks.block_name import BlockName
from engine_workers.tiers.tier import Tier
from tests.engine_workers.blocks.made_blocks import OTHER_NAMESPACE, block_of, name_of

USUAL_BYTES = 1_474_560
"""A block of 128 tokens of SmolLM2-135M in float32, and then some."""


class RawStore(Protocol):
    """What lies in the store below a tier."""

    async def read(self, name: BlockName) -> bytes:
        """Return a block's record as it is stored."""

    async def write(self, name: BlockName, record: bytes) -> None:
        """Put `record` in the place of a block's, whatever it is."""


async def store(tier: Tier, number: int, num_bytes: int = 4096) -> tuple[BlockHeader, bytes]:
    header, payload = block_of(number, num_bytes)
    await tier.store(header, memoryview(payload))
    return header, payload


async def load(tier: Tier, name: BlockName, num_bytes: int) -> tuple[BlockHeader, bytes]:
    buffer = bytearray(num_bytes)
    header = await tier.load_into(name, memoryview(buffer))
    return header, bytes(buffer)


async def header_list(tier: Tier) -> list[BlockHeader]:
    return [header async for header in tier.headers()]


def flipped(record: bytes) -> bytes:
    changed = bytearray(record)
    changed[len(record) - 2000] ^= 4
    return bytes(changed)


class TierContract:
    async def test_contains_answers_for_each_name_in_order(self, tier: Tier) -> None:
        await store(tier, 1)
        await store(tier, 3)
        names = [name_of(3), name_of(2), name_of(1), name_of(3)]
        assert await tier.contains(names) == [True, False, True, True]
        assert await tier.contains([]) == []

    @pytest.mark.parametrize("num_bytes", [0, 1, 4095, USUAL_BYTES, 9_000_001])
    async def test_a_block_comes_back_as_it_was_stored(self, tier: Tier, num_bytes: int) -> None:
        header, payload = await store(tier, 7, num_bytes)
        assert await load(tier, header.name, num_bytes) == (header, payload)

    async def test_a_first_block_has_no_parent(self, tier: Tier) -> None:
        header, payload = await store(tier, 0)
        assert header.parent_hash is None
        assert await load(tier, header.name, len(payload)) == (header, payload)

    async def test_what_was_never_stored_is_lost_and_nothing_else_is_wrong(
        self, tier: Tier
    ) -> None:
        with pytest.raises(BlockLostError) as caught:
            await load(tier, name_of(1), 4096)
        assert not isinstance(caught.value, BlockCorruptError)

    async def test_a_block_is_not_there_in_another_namespace(self, tier: Tier) -> None:
        await store(tier, 1)
        assert await tier.contains([name_of(1, OTHER_NAMESPACE)]) == [False]
        with pytest.raises(BlockLostError):
            await load(tier, name_of(1, OTHER_NAMESPACE), 4096)

    async def test_a_block_that_is_there_is_left_as_it_is(self, tier: Tier) -> None:
        header, payload = await store(tier, 1)
        await tier.store(header, memoryview(payload))
        assert await load(tier, header.name, len(payload)) == (header, payload)
        assert tier.usage().num_blocks == 1

    async def test_many_may_store_the_same_block_at_once(self, tier: Tier) -> None:
        header, payload = block_of(1)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(8):
                tasks.create_task(tier.store(header, memoryview(payload)))
        assert await load(tier, header.name, len(payload)) == (header, payload)
        assert tier.usage().num_blocks == 1

    async def test_many_blocks_are_stored_and_loaded_at_once(self, tier: Tier) -> None:
        blocks = [block_of(number, 100_000) for number in range(24)]
        async with asyncio.TaskGroup() as tasks:
            for header, payload in blocks:
                tasks.create_task(tier.store(header, memoryview(payload)))
        assert all(await tier.contains([header.name for header, _ in blocks]))
        loaded = await asyncio.gather(*(load(tier, header.name, 100_000) for header, _ in blocks))
        assert loaded == blocks

    async def test_removed_blocks_are_gone_and_others_stay(self, tier: Tier) -> None:
        for number in (1, 2, 3):
            await store(tier, number)
        await tier.remove([name_of(1), name_of(9), name_of(3)])
        assert await tier.contains([name_of(n) for n in (1, 2, 3)]) == [False, True, False]
        with pytest.raises(BlockLostError):
            await load(tier, name_of(1), 4096)
        await tier.remove([])

    async def test_a_removed_block_can_be_stored_again(self, tier: Tier) -> None:
        header, payload = await store(tier, 1)
        await tier.remove([header.name])
        await tier.store(header, memoryview(payload))
        assert await load(tier, header.name, len(payload)) == (header, payload)

    async def test_headers_tells_of_what_was_stored_here_parents_first(self, tier: Tier) -> None:
        stored = [(await store(tier, number))[0] for number in range(5)]
        await tier.remove([name_of(2)])
        assert await header_list(tier) == [stored[0], stored[1], stored[3], stored[4]]

    async def test_usage_follows_what_is_stored_and_removed(self, tier: Tier) -> None:
        assert tier.usage().num_blocks == tier.usage().used_bytes == 0
        await store(tier, 1, 10_000)
        assert tier.usage().num_blocks == 1
        assert tier.usage().used_bytes >= 10_000
        await tier.remove([name_of(1)])
        assert tier.usage().num_blocks == tier.usage().used_bytes == 0

    async def test_a_cancelled_store_leaves_nothing_or_a_whole_block(self, tier: Tier) -> None:
        for number, num_turns in enumerate((0, 1, 2, 3, 5, 8, 13, 40)):
            header, payload = block_of(number, USUAL_BYTES)
            memory = bytearray(payload)
            storing = asyncio.create_task(tier.store(header, memoryview(memory)))
            for _ in range(num_turns):
                await asyncio.sleep(0)
            storing.cancel()
            await asyncio.wait([storing])
            memory[:] = bytes(len(memory))  # the caller uses its memory for something else
            if (await tier.contains([header.name]))[0]:
                assert await load(tier, header.name, USUAL_BYTES) == (header, payload)
            await tier.store(header, memoryview(payload))
            assert await load(tier, header.name, USUAL_BYTES) == (header, payload)

    async def test_memory_of_a_cancelled_load_can_be_used_at_once(self, tier: Tier) -> None:
        header, payload = await store(tier, 1, USUAL_BYTES)
        for num_turns in (0, 1, 2, 3, 5, 8, 13, 40):
            memory = bytearray(USUAL_BYTES)
            loading = asyncio.create_task(tier.load_into(header.name, memoryview(memory)))
            for _ in range(num_turns):
                await asyncio.sleep(0)
            loading.cancel()
            await asyncio.wait([loading])
            memory[:] = b"\xaa" * USUAL_BYTES
            assert await load(tier, header.name, USUAL_BYTES) == (header, payload)
            assert memory == b"\xaa" * USUAL_BYTES

    async def test_a_closed_tier_cannot_be_asked(self, tier: Tier) -> None:
        header, payload = await store(tier, 1)
        await tier.close()
        await tier.close()
        for call in (
            tier.contains([header.name]),
            load(tier, header.name, len(payload)),
            tier.store(header, memoryview(payload)),
            tier.remove([header.name]),
            header_list(tier),
        ):
            with pytest.raises(TierError):
                await call

    async def test_a_block_of_another_size_than_asked_for_is_lost(self, tier: Tier) -> None:
        for num_bytes in (4000, 5000):
            header, _ = await store(tier, 1)
            with pytest.raises(BlockLostError):
                await load(tier, header.name, num_bytes)
            assert await tier.contains([header.name]) == [False]

    @pytest.mark.parametrize(
        "damage",
        [
            flipped,
            lambda record: record[:-3000],
            lambda record: record[:10],
            lambda record: b"",
            lambda record: bytes(len(record)),
            lambda record: b"{" * len(record),
        ],
        ids=["one bit flipped", "cut short", "cut to a stump", "empty", "zeros", "garbage"],
    )
    async def test_a_damaged_block_is_lost_and_deleted(
        self, tier: Tier, raw: RawStore, damage: Callable[[bytes], bytes]
    ) -> None:
        header, payload = await store(tier, 1, 20_000)
        await store(tier, 2)
        await raw.write(header.name, damage(await raw.read(header.name)))
        with pytest.raises(BlockLostError):
            await load(tier, header.name, len(payload))
        assert await tier.contains([header.name, name_of(2)]) == [False, True]
        with pytest.raises(BlockLostError):
            await load(tier, header.name, len(payload))
        await tier.store(header, memoryview(payload))
        assert await load(tier, header.name, len(payload)) == (header, payload)

    async def test_blocks_that_changed_places_are_both_lost(
        self, tier: Tier, raw: RawStore
    ) -> None:
        one, _ = await store(tier, 1)
        two, _ = await store(tier, 2)
        records = await raw.read(one.name), await raw.read(two.name)
        await raw.write(two.name, records[0])
        await raw.write(one.name, records[1])
        for header in (one, two):
            with pytest.raises(BlockCorruptError):
                await load(tier, header.name, 4096)
        assert await tier.contains([one.name, two.name]) == [False, False]
