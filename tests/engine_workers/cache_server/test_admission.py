from __future__ import annotations

import random
from dataclasses import replace

import pytest

from engine_workers.cache_server.admission import Admission, Offer, Room, Verdict
from engine_workers.cache_server.admission_trial import AdmissionTrial
from engine_workers.cache_server.eviction import S3Fifo
from engine_workers.cache_server.sightings import Sightings, keys_of
from engine_workers.cache_server.write_budget import WriteBudget
from tests.engine_workers.cache_server.block_names import name_of

BLOCK_BYTES = 1_000
EMPTY = Room(free_bytes=10**9, waiting_bytes=0, max_waiting_bytes=10**9)
FULL = replace(EMPTY, free_bytes=0)


class Node:
    """A tier's admission, and the clock and sightings around it."""

    def __init__(self, bytes_per_s: float = 1e12, capacity_blocks: int = 800) -> None:
        self.now = 0.0
        self.sightings = Sightings(counters_bits=18)
        self.admission = Admission(
            self.sightings,
            AdmissionTrial(capacity_blocks * BLOCK_BYTES),
            WriteBudget(bytes_per_s, 1.0, lambda: self.now),
        )

    def look_up(self, *numbers: int) -> None:
        keys = keys_of([name_of(number) for number in numbers])
        self.admission.look_up(keys, self.sightings.see(keys), BLOCK_BYTES)

    def offer(
        self, number: int, room: Room, parent: int | None = None, saved_s: float = 1.0
    ) -> Verdict:
        above = None if parent is None else name_of(parent)
        return self.admission.decide(Offer(name_of(number), above, BLOCK_BYTES, saved_s), room)


def node_where_new_content_does_not_pay() -> Node:
    node, choice = Node(), random.Random(1)
    for step in range(2_000):
        node.look_up(*range(1_000_000 + 20 * step, 1_000_020 + 20 * step))
        hot = 20 * choice.randrange(45)
        node.look_up(*range(hot, hot + 20))
    return node


def test_everything_is_admitted_while_there_is_room() -> None:
    node = node_where_new_content_does_not_pay()
    assert node.offer(7_000_000, EMPTY) is Verdict.ADMITTED
    assert node.offer(7_000_001, replace(EMPTY, free_bytes=None)) is Verdict.ADMITTED


def test_a_full_tier_takes_what_repeats_and_what_continues_it() -> None:
    node = node_where_new_content_does_not_pay()
    assert node.offer(0, FULL) is Verdict.ADMITTED
    assert node.offer(7_000_000, FULL, parent=0) is Verdict.ADMITTED
    assert node.offer(7_000_000, FULL) is Verdict.NOT_REPEATED
    assert node.offer(7_000_001, FULL, parent=7_000_000) is Verdict.NOT_REPEATED


def test_a_full_tier_takes_new_content_while_that_pays() -> None:
    assert Node().offer(7, FULL) is Verdict.ADMITTED


@pytest.mark.parametrize("saved_s", [0.0, -1.0])
def test_what_is_computed_faster_than_loaded_is_not_stored(saved_s: float) -> None:
    assert Node().offer(1, EMPTY, saved_s=saved_s) is Verdict.NOT_WORTH_LOADING


def test_nothing_is_admitted_that_would_make_the_queue_too_long() -> None:
    room = Room(free_bytes=None, waiting_bytes=4_500, max_waiting_bytes=5_000)
    assert Node().offer(1, room) is Verdict.BACKPRESSURE
    # Waiting is scarce here too, but all blocks are worth the same.
    room = Room(free_bytes=None, waiting_bytes=4_000, max_waiting_bytes=5_000)
    assert Node().offer(1, room) is Verdict.ADMITTED


def test_the_budget_holds() -> None:
    node = Node(bytes_per_s=10 * BLOCK_BYTES)
    num_admitted = 0
    for step in range(5_000):
        node.now += 0.01
        num_admitted += node.offer(step, EMPTY) is Verdict.ADMITTED
    assert num_admitted <= 10 * node.now + 10
    assert num_admitted >= 0.95 * 10 * node.now


def test_when_writing_is_scarce_it_goes_to_what_saves_more() -> None:
    node = Node(bytes_per_s=10 * BLOCK_BYTES)
    admitted = {0.1: 0, 10.0: 0}
    for step in range(4_000):
        node.now += 0.01
        saved_s = (0.1, 10.0)[step % 8 == 0]
        admitted[saved_s] += node.offer(step, EMPTY, saved_s=saved_s) is Verdict.ADMITTED
    # 12.5 a second of them come, and 10 can be written.
    assert admitted[10.0] >= 0.7 * 500
    assert admitted[0.1] <= 0.15 * sum(admitted.values())


def hit_rate_of_hot_set(num_scanned: int) -> float:
    """Share of a hot set's blocks that a full tier holds when they are asked for."""
    node, choice = Node(), random.Random(3)
    policy = S3Fifo[int](800 * BLOCK_BYTES)
    num_hits = num_asked = 0
    for step in range(3_000):
        scans = [1_000_000 + 20 * (step * num_scanned + n) for n in range(num_scanned)]
        hot = 20 * choice.randrange(36)
        for first in (*scans, hot):
            prompt = range(first, first + 20)
            node.look_up(*prompt)
            if first == hot and step > 500:
                num_asked += len(prompt)
                num_hits += sum(number in policy for number in prompt)
            for number in prompt:
                if number in policy:
                    policy.touch(number)
                    continue
                room = replace(FULL, free_bytes=policy.capacity_bytes - policy.used_bytes)
                parent = None if number == first else number - 1
                if node.offer(number, room, parent) is Verdict.ADMITTED:
                    policy.insert(number, BLOCK_BYTES, parent)
    return num_hits / num_asked


def test_a_scan_of_never_repeating_prompts_costs_the_hot_set_less_than_three_points() -> None:
    alone = hit_rate_of_hot_set(num_scanned=0)
    assert hit_rate_of_hot_set(num_scanned=3) >= alone - 0.03
