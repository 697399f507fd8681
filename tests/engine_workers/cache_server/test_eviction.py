from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_workers.cache_server.eviction import EvictionPolicy, S3Fifo


def filled(capacity_bytes: int, *names: str) -> S3Fifo[str]:
    policy = S3Fifo[str](capacity_bytes)
    for name in names:
        assert policy.insert(name, 1) == []
    return policy


def test_nothing_is_evicted_while_there_is_room() -> None:
    policy = filled(3, "a", "b", "c")
    assert (len(policy), policy.used_bytes) == (3, 3)


def test_what_was_not_used_goes_first_in_first_out() -> None:
    policy = filled(3, "a", "b", "c")
    assert policy.insert("d", 2) == ["a", "b"]
    assert "a" not in policy
    assert "c" in policy


def test_what_was_used_again_outlives_what_was_not() -> None:
    policy = filled(10, *"abcdefghij")
    policy.touch("a")
    assert [policy.insert(name, 1) for name in "klmn"] == [["b"], ["c"], ["d"], ["e"]]
    assert "a" in policy


def test_what_comes_back_after_it_was_evicted_is_no_scan() -> None:
    policy = filled(10, *"abcdefghij")
    assert policy.insert("k", 1) == ["a"]
    assert policy.insert("a", 1) == ["b"]
    for name in "lmnopqrst":
        policy.insert(name, 1)
    assert "a" in policy


def test_a_scan_does_not_push_out_what_is_used() -> None:
    policy = S3Fifo[int](100)
    choice = random.Random(1)
    num_hits = num_asked = 0
    for step in range(20_000):
        policy.insert(1_000 + step, 1)
        if step % 4 == 0:
            hot = choice.randrange(60)
            if step > 2_000:
                num_asked += 1
                num_hits += hot in policy
            policy.insert(hot, 1)
    assert num_hits >= 0.95 * num_asked


def test_what_returns_after_much_else_is_kept_too_if_all_of_it_returns_only_once() -> None:
    policy = S3Fifo[int](100)
    for step in range(5_000):
        policy.insert(step, 1)
        if step >= 80:
            # As a conversation's next turn: later than a tenth of the room lasts, and only once.
            assert step - 60 in policy
            policy.touch(step - 60)


def test_a_parent_stays_while_a_child_stays() -> None:
    policy = S3Fifo[str](3)
    policy.insert("root", 1)
    policy.insert("middle", 1, parent="root")
    policy.insert("leaf", 1, parent="middle")
    assert policy.insert("x", 1) == ["leaf"]
    assert policy.insert("y", 1) == ["middle"]
    assert policy.insert("z", 1) == ["root"]


def test_the_parent_of_what_comes_in_is_no_victim() -> None:
    policy = filled(2, "root", "other")
    assert policy.insert("leaf", 1, parent="root") == ["other"]


def test_what_is_pinned_is_evicted_only_after_as_many_unpins() -> None:
    policy = filled(2, "a", "b")
    policy.pin("a")
    policy.pin("a")
    assert policy.insert("c", 1) == ["b"]
    policy.unpin("a")
    assert policy.insert("d", 1) == ["c"]
    policy.unpin("a")
    assert policy.insert("e", 1) == ["a"]


def test_a_block_that_does_not_fit_is_its_own_victim() -> None:
    policy = filled(2, "a", "b")
    assert policy.insert("huge", 3) == ["huge"]
    assert len(policy) == 2
    policy.pin("a")
    policy.pin("b")
    assert policy.insert("c", 1) == ["c"]
    assert "c" not in policy


def test_only_what_is_here_can_be_pinned() -> None:
    with pytest.raises(KeyError):
        S3Fifo[str](1).pin("a")


def test_a_removed_block_leaves_room_and_loses_its_pins() -> None:
    policy = filled(2, "a", "b")
    policy.pin("a")
    policy.remove("a")
    policy.unpin("a")
    assert policy.insert("a", 1) == []
    assert policy.insert("c", 1) != []
    assert policy.used_bytes == 2


def test_room_can_be_made_without_inserting() -> None:
    policy = filled(3, "a", "b", "c")
    assert policy.evict(2) == ["a", "b"]
    assert policy.evict(2) == ["c"]
    assert policy.evict(2) == []


@st.composite
def actions(draw: st.DrawFn) -> list[tuple[str, int]]:
    kind = st.sampled_from(["insert", "insert", "insert", "touch", "remove", "pin", "unpin"])
    return draw(st.lists(st.tuples(kind, st.integers(1, 30)), max_size=200))


@given(actions(), st.integers(1, 40))
def test_victims_and_bytes_agree_with_a_plain_account_whatever_happens(
    steps: list[tuple[str, int]], capacity_bytes: int
) -> None:
    policy: EvictionPolicy[int] = S3Fifo(capacity_bytes)
    present: dict[int, int] = {}
    pins: dict[int, int] = {}
    for kind, name in steps:
        if kind == "insert":
            # Binary heap numbering: a tree in which every name has a fixed parent.
            victims = policy.insert(name, 1 + name % 5, name // 2 or None)
            if name in present:
                assert victims == []
            present[name] = 1 + name % 5
            for victim in victims:
                assert not pins.get(victim)
                del present[victim]
                children = {2 * victim, 2 * victim + 1} & set(present)
                assert victim == name or not children
        elif kind == "touch":
            policy.touch(name)
        elif kind == "remove":
            policy.remove(name)
            present.pop(name, None)
            pins.pop(name, None)
        elif kind == "pin" and name in present:
            policy.pin(name)
            pins[name] = pins.get(name, 0) + 1
        elif kind == "unpin":
            policy.unpin(name)
            pins[name] = max(0, pins.get(name, 0) - 1)
        assert len(policy) == len(present)
        assert policy.used_bytes == sum(present.values()) <= capacity_bytes
        assert all(name in policy for name in present)
    for name, num_pins in pins.items():
        for _ in range(num_pins):
            policy.unpin(name)
    assert sorted(policy.evict(capacity_bytes)) == sorted(present)
