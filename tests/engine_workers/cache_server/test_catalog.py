from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest

from engine_workers.blocks.block_name import BlockName
from engine_workers.cache_server.arena import Arena
from engine_workers.cache_server.catalog import CachedBlock, Catalog
from engine_workers.cache_server.eviction import S3Fifo
from engine_workers.cache_server.leases import Leases
from engine_workers.cache_server.tenant_quota import TenantQuota
from tests.engine_workers.cache_server.conftest import SLOT_BYTES, Clock
from tests.engine_workers.cache_server.wire_client import BLOCK_BYTES, header, namespace

NUM_SLOTS = 64


class Watcher:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.listed: set[BlockName] = set()
        self.num_evicted = 0

    def published(self, block: CachedBlock) -> None:
        assert block.name not in self.listed
        self.listed.add(block.name)

    def unlisted(self, block: CachedBlock) -> None:
        self.listed.remove(block.name)

    def evicted(self, block: CachedBlock) -> None:
        self.num_evicted += 1


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(NUM_SLOTS * SLOT_BYTES)
    yield arena
    arena.close()


@pytest.fixture
def watcher() -> Watcher:
    return Watcher()


@pytest.fixture
def catalog(arena: Arena, watcher: Watcher) -> Catalog:
    policy = S3Fifo[BlockName](arena.num_bytes)
    return Catalog(arena, policy, TenantQuota(arena.num_bytes), watcher)


def name_of(number: int) -> BlockName:
    return header(number, namespace()).name


def put(catalog: Catalog, number: int) -> CachedBlock | None:
    """Publish a block and return it, still pinned."""
    block = catalog.reserve(name_of(number), BLOCK_BYTES)
    if block is None:
        return None
    block.payload[:] = number % 251
    if not catalog.publish(block, header(number, namespace()), "engine"):
        catalog.unpin(block)
        return None
    return block


def test_a_reserved_block_is_not_found_before_it_is_published(catalog: Catalog) -> None:
    block = catalog.reserve(name_of(1), BLOCK_BYTES)
    assert block is not None
    assert catalog.find(name_of(1)) is None
    assert catalog.publish(block, header(1, namespace()), "engine")
    assert catalog.find(name_of(1)) is block


def test_of_two_that_fill_the_same_block_the_first_one_is_kept(
    catalog: Catalog, arena: Arena
) -> None:
    first = catalog.reserve(name_of(1), BLOCK_BYTES)
    second = catalog.reserve(name_of(1), BLOCK_BYTES)
    assert first is not None
    assert second is not None
    assert first.slot.offset != second.slot.offset
    assert catalog.publish(second, header(1, namespace()), "engine")
    assert not catalog.publish(first, header(1, namespace()), "engine")
    catalog.unpin(first)
    assert catalog.find(name_of(1)) is second
    assert arena.slots.used_bytes == SLOT_BYTES


def test_with_everything_pinned_there_is_no_room(catalog: Catalog) -> None:
    blocks = [put(catalog, number) for number in range(1, NUM_SLOTS + 1)]
    assert None not in blocks
    assert catalog.reserve(name_of(1000), BLOCK_BYTES) is None


def test_memory_of_dropped_blocks_that_are_held_does_not_stop_the_rest_from_changing(
    catalog: Catalog, arena: Arena
) -> None:
    for number in range(1, 9):
        assert put(catalog, number) is not None
        catalog.drop(name_of(number))
    for number in range(100, 400):
        block = put(catalog, number)
        assert block is not None
        catalog.unpin(block)
    assert len(catalog) <= NUM_SLOTS - 8
    assert arena.slots.used_bytes <= arena.num_bytes


def test_a_block_that_does_not_fit_a_segment_has_no_room(catalog: Catalog) -> None:
    assert catalog.reserve(name_of(1), 10 * NUM_SLOTS * SLOT_BYTES) is None


@pytest.mark.parametrize("seed", range(20))
def test_no_order_of_events_spoils_a_pinned_block_or_loses_memory(
    catalog: Catalog, arena: Arena, watcher: Watcher, seed: int
) -> None:
    rng = random.Random(seed)
    clock = Clock()
    leases = Leases(catalog, 1e9, clock)
    held: dict[int, tuple[CachedBlock, np.uint8]] = {}
    for _ in range(2000):
        number = rng.randrange(1, 200)
        found = catalog.find(name_of(number))
        action = rng.random()
        if action < 0.5 and found is None:
            block = put(catalog, number)
            if block is not None:
                catalog.unpin(block)
        elif action < 0.7 and found is not None and len(held) < 30:
            catalog.pin(found)
            lease = leases.grant("engine", None, [found])
            held[lease] = (found, np.uint8(number % 251))
        elif action < 0.85 and held:
            lease = rng.choice(list(held))
            del held[lease]
            leases.release("engine", [lease])
        elif action < 0.9:
            catalog.drop(name_of(number))
        assert all((block.payload == value).all() for block, value in held.values())
    assert watcher.listed == {block.name for block in catalog.published()}
    leases.release("engine", list(held))
    for block in catalog.published():
        catalog.drop(block.name)
    assert arena.slots.used_bytes == 0
