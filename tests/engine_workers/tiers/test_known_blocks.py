from __future__ import annotations

from collections.abc import Sequence

from engine_workers.blocks.block_name import BlockName
from engine_workers.tiers.known_blocks import KnownBlocks
from tests.engine_workers.blocks.made_blocks import block_of, name_of


async def test_what_the_store_no_longer_has_is_forgotten() -> None:
    known = KnownBlocks()
    headers = [block_of(number, 100)[0] for number in range(4)]
    for header in headers:
        known.add(header)
    known.add(headers[0])

    async def contains(names: Sequence[BlockName]) -> list[bool]:
        return [name != name_of(2) for name in names]

    there = [header async for header in known.headers(contains)]
    assert there == [headers[0], headers[1], headers[3]]
    assert (known.usage().num_blocks, known.usage().used_bytes) == (3, 300)


async def test_the_oldest_are_forgotten_when_there_are_too_many() -> None:
    known = KnownBlocks(max_blocks=3)
    for number in range(5):
        known.add(block_of(number, 100)[0])

    async def contains(names: Sequence[BlockName]) -> list[bool]:
        return [True] * len(names)

    names = [header.name async for header in known.headers(contains)]
    assert names == [name_of(2), name_of(3), name_of(4)]
    assert (known.usage().num_blocks, known.usage().used_bytes) == (3, 300)
