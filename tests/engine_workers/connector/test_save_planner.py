from __future__ import annotations

import pytest

from engine_workers.connector.engine_request import ScheduledRequest
from engine_workers.connector.plan import SaveBlock
from engine_workers.connector.save_planner import SavePlanner
from tests.engine_workers.connector.fakes import BLOCK_SIZE, FakeView, Request, request


@pytest.fixture
def planner() -> SavePlanner:
    return SavePlanner(BLOCK_SIZE, FakeView())


def step(planner: SavePlanner, item: Request, num_tokens: int, first_id: int = 1) -> list[bytes]:
    block_ids = list(range(first_id, first_id + 400))
    chains = planner.plan([(item, ScheduledRequest(item.request_id, num_tokens, block_ids))])
    item.num_computed_tokens += num_tokens
    return [block.block_hash for chain in chains for block in chain.blocks]


def test_a_block_is_saved_in_the_step_that_fills_it_and_only_then(planner: SavePlanner) -> None:
    item = request("a", 14)
    assert step(planner, item, 6) == item.block_hashes[:1]
    assert step(planner, item, 8) == item.block_hashes[1:3]
    item.append(99)
    assert step(planner, item, 1) == []
    item.append(98)
    assert step(planner, item, 1) == item.block_hashes[3:4]


def test_a_block_says_all_that_its_hash_is_made_of(planner: SavePlanner) -> None:
    item = request("a", 8)
    (chain,) = planner.plan([(item, ScheduledRequest("a", 8, [5, 6]))])
    assert chain.blocks == (
        SaveBlock(5, item.block_hashes[0], None, (0, 1, 2, 3), ("salt",)),
        SaveBlock(6, item.block_hashes[1], item.block_hashes[0], (4, 5, 6, 7), ()),
    )


def test_tokens_that_are_not_known_yet_fill_no_block(planner: SavePlanner) -> None:
    item = request("a", 15)
    assert step(planner, item, 17) == item.block_hashes[:3]


def test_blocks_that_the_request_does_not_hold_are_left_out(planner: SavePlanner) -> None:
    item = request("a", 8)
    (chain,) = planner.plan([(item, ScheduledRequest("a", 8, [0, 6]))])
    assert [block.block_id for block in chain.blocks] == [6]


def test_computed_blocks_are_saved_even_if_the_server_had_them_once(planner: SavePlanner) -> None:
    item = request("a", 8)
    planner.on_stored(item.block_hashes)
    assert step(planner, item, 8) == item.block_hashes


def test_blocks_from_the_engines_own_cache_are_saved_unless_the_server_has_them(
    planner: SavePlanner,
) -> None:
    known = request("a", 9)
    known.num_computed_tokens = 8
    planner.on_stored(known.block_hashes)
    assert step(planner, known, 1) == []
    planner.on_server_lost()
    again = request("b", 9)
    again.num_computed_tokens = 8
    assert step(planner, again, 1) == again.block_hashes


def test_a_step_saves_a_bounded_number_of_blocks_and_the_next_goes_on(
    planner: SavePlanner,
) -> None:
    item = request("a", 100 * BLOCK_SIZE)
    assert step(planner, item, 100 * BLOCK_SIZE) == item.block_hashes[:64]
    item.append(1)
    assert step(planner, item, 1) == item.block_hashes[64:100]


def test_a_preempted_request_begins_again(planner: SavePlanner) -> None:
    item = request("a", 8)
    step(planner, item, 8)
    planner.on_ended("a")
    item.num_computed_tokens = 0
    assert step(planner, item, 8) == item.block_hashes
