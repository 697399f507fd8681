from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_router.hashing import hash_blocks
from cache_router.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from cache_router.radix_index import Applied, Outcome, RadixIndex
from cache_router.types import BlockHash, Medium, PromptRoot, TierId, WorkerId

A, B, C = WorkerId("a"), WorkerId("b"), WorkerId("c")
Place = tuple[Medium, str | None]
GPU: Place = (Medium.GPU, None)
RAM: Place = (Medium.CPU, None)
SSD: Place = (Medium.STORAGE, "ssd")
REDIS: Place = (Medium.STORAGE, "redis")
S3: Place = (Medium.STORAGE, "s3")
OTHER: Place = (Medium.STORAGE, None)
PLACES = (GPU, RAM, SSD, REDIS, S3, OTHER)
BLOCK_SIZE = 2


def chain(*blocks: int, block_size: int = BLOCK_SIZE, model: str = "m") -> list[BlockHash]:
    """Hashes of a sequence that is written as one number a block."""
    ids = np.repeat(np.array(blocks, dtype=np.uint32), block_size)
    return hash_blocks(ids, block_size, PromptRoot(model))


def name(*blocks: int) -> bytes:
    """The engine's hash of the last of these blocks."""
    return repr(blocks).encode()


def stored(
    *blocks: int, after: tuple[int, ...] = (), place: Place = GPU, block_size: int = 2
) -> BlockStored:
    return BlockStored(
        [name(*after, *blocks[: i + 1]) for i in range(len(blocks))],
        name(*after) if after else None,
        [block for block in blocks for _ in range(block_size)],
        block_size,
        place[0],
        ownership=place[1],
    )


def removed(*names: bytes, place: Place = GPU) -> BlockRemoved:
    return BlockRemoved(list(names), place[0], ownership=place[1])


@pytest.fixture
def index() -> RadixIndex:
    return RadixIndex(max_blocks=1000)


def test_match_is_the_longest_leading_run_of_each_worker(index: RadixIndex) -> None:
    index.apply(A, stored(1, 2, 3), "m")
    index.apply(B, stored(1), "m")
    index.apply(C, stored(9), "m")
    assert index.match(chain(1, 2, 3, 4)) == {A: 3, B: 1}
    assert index.match(chain(1, 2)) == {A: 2, B: 1}
    assert index.match([]) == {}


def test_a_run_ends_at_its_first_hole(index: RadixIndex) -> None:
    index.apply(A, stored(1, 2, 3), "m")
    index.apply(A, removed(name(1, 2)), "m")
    assert index.match(chain(1, 2, 3)) == {A: 1}


def test_a_block_continues_the_one_its_event_names(index: RadixIndex) -> None:
    index.apply(A, stored(1), "m")
    assert index.apply(A, stored(2, after=(1,)), "m") == Applied(Outcome.APPLIED)
    assert index.match(chain(1, 2)) == {A: 2}


def test_an_orphan_is_dropped_and_never_becomes_a_root(index: RadixIndex) -> None:
    index.apply(B, stored(1), "m")
    assert index.apply(A, stored(2, after=(1,)), "m").outcome is Outcome.ORPHAN
    assert index.match(chain(1, 2)) == {B: 1}
    assert index.match(chain(2)) == {}
    assert index.num_blocks(A) == 0


def test_stored_twice_is_gone_after_the_second_removal(index: RadixIndex) -> None:
    index.apply(A, stored(1), "m")
    index.apply(A, stored(1), "m")
    index.apply(A, removed(name(1)), "m")
    assert index.match(chain(1)) == {A: 1}
    index.apply(A, removed(name(1)), "m")
    assert index.match(chain(1)) == {}


def test_two_engine_hashes_of_one_content_are_two_copies(index: RadixIndex) -> None:
    index.apply(A, BlockStored([b"x"], None, [1, 1], 2), "m")
    index.apply(A, BlockStored([b"y"], None, [1, 1], 2), "m")
    index.apply(A, removed(b"x"), "m")
    assert index.match(chain(1)) == {A: 1}
    index.apply(A, removed(b"y"), "m")
    assert index.match(chain(1)) == {}


def test_removing_what_is_not_there_changes_nothing(index: RadixIndex) -> None:
    index.apply(A, stored(1), "m")
    index.apply(A, removed(b"never", name(1)), "m")
    index.apply(A, removed(name(1), place=RAM), "m")
    assert index.num_blocks(A) == 0


def test_a_worker_holds_what_lies_on_any_of_its_tiers(index: RadixIndex) -> None:
    index.apply(B, stored(1, 2, place=S3), "m")
    index.apply(A, stored(1), "m")
    index.apply(A, stored(1, 2, place=RAM), "m")
    index.apply(A, stored(3, after=(1, 2), place=S3), "m")
    assert index.match(chain(1, 2, 3)) == {A: 3, B: 2}
    index.apply(A, removed(name(1)), "m")
    assert index.match(chain(1, 2, 3)) == {A: 3, B: 2}


def test_all_blocks_cleared_empties_that_worker_only(index: RadixIndex) -> None:
    index.apply(A, stored(1), "m")
    index.apply(B, stored(1), "m")
    index.apply(A, AllBlocksCleared(), "m")
    assert index.match(chain(1)) == {B: 1}
    assert index.apply(A, stored(2, after=(1,)), "m").outcome is Outcome.ORPHAN


def test_a_removed_worker_leaves_no_trace_for_the_next_one(index: RadixIndex) -> None:
    index.apply(A, stored(1), "m")
    index.apply(B, stored(1), "m")
    index.remove_worker(A)
    index.remove_worker(A)
    assert index.block_size_of(A) is None
    index.apply(C, stored(2), "m")
    assert index.match(chain(1)) == {B: 1}
    assert index.match(chain(2)) == {C: 1}


def test_models_do_not_share_blocks(index: RadixIndex) -> None:
    index.apply(A, stored(1), "m")
    index.apply(B, stored(1), "other")
    assert index.match(chain(1, model="other")) == {B: 1}


def test_workers_may_have_different_block_sizes(index: RadixIndex) -> None:
    index.apply(A, stored(1, 1, block_size=2), "m")
    index.apply(B, stored(1, block_size=4), "m")
    assert (index.block_size_of(A), index.block_size_of(B)) == (2, 4)
    assert index.match(chain(1, 1, block_size=2)) == {A: 2}
    assert index.match(chain(1, block_size=4)) == {B: 1}


def test_a_second_block_size_is_refused_unless_the_cache_is_empty(index: RadixIndex) -> None:
    assert index.block_size_of(A) is None
    index.apply(A, stored(1, block_size=2), "m")
    assert index.apply(A, stored(2, block_size=4), "m").outcome is Outcome.REFUSED
    assert index.block_size_of(A) == 2
    index.clear(A)
    assert index.apply(A, stored(2, block_size=4), "m").outcome is Outcome.APPLIED
    assert index.block_size_of(A) == 4


def test_an_event_that_does_not_add_up_is_refused(index: RadixIndex) -> None:
    event = BlockStored([b"x", b"y"], None, [1, 1, 1], 2)
    assert index.apply(A, event, "m").outcome is Outcome.REFUSED
    assert index.num_blocks(A) == 0


def test_groups_that_keep_only_a_window_are_left_out(index: RadixIndex) -> None:
    window = BlockStored(
        [name(1)], None, [1, 1], 2, group_idx=1, kv_cache_spec_kind="sliding_window"
    )
    full = BlockStored([name(1)], None, [1, 1], 2, group_idx=0, kv_cache_spec_kind="full_attention")
    index.apply(A, full, "m")
    assert index.apply(A, window, "m").outcome is Outcome.IGNORED
    left_window = BlockRemoved([name(1)], group_idx=1)
    assert index.apply(A, left_window, "m").outcome is Outcome.IGNORED
    assert index.match(chain(1)) == {A: 1}
    index.apply(A, BlockRemoved([name(1)], group_idx=0), "m")
    assert index.match(chain(1)) == {}


def test_a_full_index_clears_whoever_has_the_most_and_says_so() -> None:
    index = RadixIndex(max_blocks=4)
    index.apply(A, stored(1, 2, 3), "m")
    index.apply(B, stored(1), "m")
    assert index.apply(B, stored(2, after=(1,)), "m") == Applied(Outcome.APPLIED, cleared=(A,))
    assert index.match(chain(1, 2, 3)) == {B: 2}
    assert (index.is_truncated(A), index.is_truncated(B)) == (True, False)
    index.remove_worker(A)
    assert not index.is_truncated(A)


def test_an_event_whose_own_parent_gave_way_is_an_orphan() -> None:
    index = RadixIndex(max_blocks=2)
    index.apply(A, stored(1, 2), "m")
    assert index.apply(A, stored(3, after=(1, 2)), "m") == Applied(Outcome.ORPHAN, cleared=(A,))
    assert index.num_blocks(A) == 0


def test_an_event_larger_than_the_index_is_refused_and_costs_nobody_else() -> None:
    index = RadixIndex(max_blocks=2)
    index.apply(A, stored(1), "m")
    assert index.apply(B, stored(1, 2, 3), "m") == Applied(Outcome.REFUSED)
    assert index.match(chain(1)) == {A: 1}


@dataclass
class Definition:
    """What the index must answer, computed from its definition by brute force."""

    copies: dict[tuple[WorkerId, Place], Counter[tuple[int, ...]]] = field(default_factory=dict)

    def of(self, worker_id: WorkerId, place: Place) -> Counter[tuple[int, ...]]:
        return self.copies.setdefault((worker_id, place), Counter())

    def holds(self, worker_id: WorkerId, prefix: tuple[int, ...]) -> bool:
        return any(self.of(worker_id, place)[prefix] > 0 for place in PLACES)

    def match(self, blocks: tuple[int, ...], workers: list[WorkerId]) -> dict[WorkerId, int]:
        runs = {}
        for worker_id in workers:
            run = 0
            while run < len(blocks) and self.holds(worker_id, blocks[: run + 1]):
                run += 1
            if run:
                runs[worker_id] = run
        return runs


_workers = [A, B, C]
_prefixes = st.lists(st.integers(0, 2), max_size=3).map(tuple)
_blocks = st.lists(st.integers(0, 2), min_size=1, max_size=3).map(tuple)
_steps = st.lists(
    st.tuples(
        st.sampled_from(["store", "store", "store", "remove", "clear", "lose"]),
        st.sampled_from(_workers),
        st.sampled_from([GPU, GPU, *PLACES]),
        _prefixes,
        _blocks,
    ),
    max_size=40,
)


@settings(max_examples=300, deadline=None)
@given(_steps, st.lists(st.lists(st.integers(0, 2), max_size=6).map(tuple), max_size=5))
def test_the_index_answers_as_its_definition_does(
    steps: list[tuple[str, WorkerId, Place, tuple[int, ...], tuple[int, ...]]],
    queries: list[tuple[int, ...]],
) -> None:
    index = RadixIndex(max_blocks=10_000)
    definition = Definition()
    for action, worker_id, place, after, blocks in steps:
        if action == "store":
            applied = index.apply(worker_id, stored(*blocks, after=after, place=place), "m")
            if after and not definition.holds(worker_id, after):
                assert applied.outcome is Outcome.ORPHAN
            else:
                assert applied.outcome is Outcome.APPLIED
                definition.of(worker_id, place).update(
                    (*after, *blocks[: i + 1]) for i in range(len(blocks))
                )
        elif action == "remove":
            index.apply(worker_id, removed(name(*blocks), place=place), "m")
            if definition.of(worker_id, place)[blocks] > 0:
                definition.of(worker_id, place)[blocks] -= 1
        else:
            if action == "clear":
                index.apply(worker_id, AllBlocksCleared(), "m")
            else:
                index.remove_worker(worker_id)
            for each in PLACES:
                definition.of(worker_id, each).clear()
    for query in [*queries, *(after + blocks for *_, after, blocks in steps)]:
        assert index.match(chain(*query)) == definition.match(query, _workers)
    for worker_id in _workers:
        assert index.num_blocks(worker_id) == sum(
            len(+definition.of(worker_id, place)) for place in PLACES
        )
        index.remove_worker(worker_id)
    assert index.match(chain(0)) == index.match(chain(1)) == index.match(chain(2)) == {}


def test_256_blocks_on_16_workers_are_matched_one_by_one() -> None:
    index = RadixIndex(max_blocks=100_000)
    blocks = tuple(range(256))
    workers = [WorkerId(f"w{i}") for i in range(16)]
    for i, worker_id in enumerate(workers):
        index.apply(worker_id, stored(*blocks[: (i + 1) * 16]), "m")
    assert index.match(chain(*blocks)) == {w: (i + 1) * 16 for i, w in enumerate(workers)}


def test_spans_end_where_holders_change_and_before_what_nobody_holds(index: RadixIndex) -> None:
    index.apply(A, stored(1, 2, 3, 4), "m")
    index.apply(B, stored(1, 2, place=SSD), "m")
    index.apply(B, stored(3, after=(1, 2), place=S3), "m")
    index.apply(A, stored(9, 9), "m")
    spans = index.spans(chain(1, 2, 3, 4, 5, 6))
    assert [span.num_blocks for span in spans] == [2, 1, 1]
    lanes = [index.lane(A), index.lane(B), index.shared_lanes(), index.lane(C)]
    tiers = [[index.fastest_tier(span.holders, lane) for lane in lanes] for span in spans]
    assert tiers == [
        [TierId.GPU, TierId.SSD, None, None],
        [TierId.GPU, TierId.S3, TierId.S3, None],
        [TierId.GPU, None, None, None],
    ]
    assert index.spans([]) == index.spans(chain(7)) == []


@settings(max_examples=100, deadline=None)
@given(_steps, st.lists(st.integers(0, 2), max_size=6).map(tuple))
def test_spans_say_the_same_as_match(
    steps: list[tuple[str, WorkerId, Place, tuple[int, ...], tuple[int, ...]]],
    query: tuple[int, ...],
) -> None:
    index = RadixIndex(max_blocks=10_000)
    for action, worker_id, place, after, blocks in steps:
        if action == "store":
            index.apply(worker_id, stored(*blocks, after=after, place=place), "m")
        elif action == "remove":
            index.apply(worker_id, removed(name(*blocks), place=place), "m")
    runs: dict[WorkerId, int] = {}
    for worker_id in _workers:
        for span in index.spans(chain(*query)):
            if not span.holders & index.lane(worker_id):
                break
            runs[worker_id] = runs.get(worker_id, 0) + span.num_blocks
    assert runs == index.match(chain(*query))
