from __future__ import annotations

import pytest

from engine_workers.cache_wire import FromEngine, Lookup, PrefillReport, Release, Staging
from engine_workers.connector.connector_settings import ConnectorSettings
from engine_workers.connector.engine_request import ScheduledRequest
from engine_workers.connector.plan import RankLoad, StepPlan
from engine_workers.connector.rank_agreement import CommittedBlocks
from engine_workers.connector.scheduler_side import SchedulerSide
from tests.engine_workers.connector.fakes import (
    BLOCK_SIZE,
    BOOT,
    Clock,
    FakeChannel,
    FakeView,
    Request,
    nothing_staged,
    request,
    staged,
)

SETTINGS = ConnectorSettings(socket="unused", lookup_deadline_s=0.06, stage_deadline_s=10.0)


class Rig:
    """A scheduler's side with its surroundings in hand."""

    def __init__(self, num_ranks: int = 1) -> None:
        self.channels = [FakeChannel() for _ in range(num_ranks)]
        self.channel = self.channels[0]
        self.clock = Clock()
        self.view = FakeView()
        self.side = SchedulerSide(self.channels, BLOCK_SIZE, SETTINGS, self.view, clock=self.clock)

    def sent(self, kind: type[FromEngine], rank: int = 0) -> list[FromEngine]:
        return [message for message in self.channels[rank].sent if isinstance(message, kind)]

    def released(self, rank: int = 0) -> list[int]:
        return [
            lease
            for message in self.channels[rank].sent
            if isinstance(message, Release)
            for lease in message.leases
        ]

    def step(self, *scheduled: tuple[Request, int], preempted: tuple[str, ...] = ()) -> StepPlan:
        items = [
            ScheduledRequest(item.request_id, num_tokens, list(range(1, 40)))
            for item, num_tokens in scheduled
        ]
        plan = self.side.plan_step(items, preempted)
        for item, num_tokens in scheduled:
            item.num_computed_tokens += num_tokens
        return plan

    def load(self, num_tokens: int = 17, num_blocks: int = 4) -> Request:
        """A request whose load has begun."""
        item = request("a", num_tokens)
        self.side.on_new_request(item)
        self.channel.receive(staged("a", num_blocks))
        assert self.side.num_new_tokens("a", 0) == num_blocks * BLOCK_SIZE
        self.side.on_allocated("a", list(range(10, 20)), num_blocks * BLOCK_SIZE)
        return item


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_the_lookup_is_sent_when_the_request_is_queued_and_never_asks_for_the_last_token(
    rig: Rig,
) -> None:
    item = request("a", 16)
    rig.side.on_new_request(item)
    assert rig.sent(Lookup) == [Lookup("a", item.block_hashes[:3], 0, 16)]


def test_what_the_engine_holds_itself_is_not_asked_for(rig: Rig) -> None:
    rig.view.num_local = 2
    rig.side.on_new_request(request("a", 17))
    (lookup,) = rig.sent(Lookup)
    assert isinstance(lookup, Lookup)
    assert lookup.num_local_blocks == 2
    rig.view.num_local = 4
    rig.side.on_new_request(request("b", 17))
    assert len(rig.sent(Lookup)) == 1


def test_a_pending_lookup_asks_the_engine_to_come_back_until_the_deadline(rig: Rig) -> None:
    rig.side.on_new_request(request("a", 17))
    assert rig.side.num_new_tokens("a", 0) is None
    rig.clock.now_s += 0.059
    assert rig.side.num_new_tokens("a", 0) is None
    rig.clock.now_s += 0.001
    assert rig.side.num_new_tokens("a", 0) == 0
    assert rig.side.num_new_tokens("a", 0) == 0


def test_a_server_that_fetches_from_a_tier_is_given_the_time_that_it_asks_for(rig: Rig) -> None:
    rig.side.on_new_request(request("a", 17))
    rig.channel.receive(Staging(BOOT, "a", 3.0))
    rig.clock.now_s += 0.05
    assert rig.side.num_new_tokens("a", 0) is None
    rig.clock.now_s += 2.9
    assert rig.side.num_new_tokens("a", 0) is None
    rig.channel.receive(staged("a", 4))
    assert rig.side.num_new_tokens("a", 0) == 16


def test_no_server_is_given_more_than_the_stage_deadline(rig: Rig) -> None:
    rig.side.on_new_request(request("a", 17))
    rig.channel.receive(Staging(BOOT, "a", 3600.0))
    assert rig.side.num_new_tokens("a", 0) is None
    rig.clock.now_s += 10.0
    assert rig.side.num_new_tokens("a", 0) == 0


def test_what_is_staged_beyond_the_engines_own_blocks_is_promised_and_the_promise_repeats(
    rig: Rig,
) -> None:
    rig.side.on_new_request(request("a", 17))
    rig.channel.receive(staged("a", 4))
    assert rig.side.num_new_tokens("a", 0) == 16
    assert rig.side.num_new_tokens("a", 8) == 8
    assert rig.side.num_new_tokens("a", 16) == 0
    assert rig.side.num_new_tokens("a", 6) == 0
    assert rig.side.num_new_tokens("a", 0) == 16
    assert rig.released() == []


def test_nothing_staged_is_nothing_promised(rig: Rig) -> None:
    rig.side.on_new_request(request("a", 17))
    rig.channel.receive(nothing_staged("a"))
    assert rig.side.num_new_tokens("a", 0) == 0
    assert rig.released() == []


def test_an_answer_that_contradicts_itself_is_not_believed(rig: Rig) -> None:
    rig.side.on_new_request(request("a", 17))
    lie = staged("a", 4)
    lie.offsets.pop()
    rig.channel.receive(lie)
    assert rig.side.num_new_tokens("a", 0) == 0
    assert rig.released() == [7]


def test_allocated_blocks_are_loaded_where_the_promise_says(rig: Rig) -> None:
    item = request("a", 17)
    rig.side.on_new_request(item)
    rig.channel.receive(staged("a", 4))
    assert rig.side.num_new_tokens("a", 4) == 12
    rig.side.on_allocated("a", [90, 91, 92, 93, 94], 12)
    assert rig.side.loaded_from("a") == ["ram"] * 3
    (job,) = rig.step().loads
    assert job.block_ids == (91, 92, 93)
    assert job.ranks == (RankLoad(BOOT, (1000, 2000, 3000), (1, 2, 3)),)
    assert job.block_hashes == tuple(item.block_hashes[1:4])
    assert rig.step().loads == ()


def test_the_lease_is_held_while_workers_copy_and_given_back_after(rig: Rig) -> None:
    rig.load()
    rig.step()
    # The engine allocates once more when the load is over.
    rig.side.on_allocated("a", list(range(10, 20)), 0)
    assert rig.released() == []
    rig.side.on_step_done(loaded=["a"], failed=[], committed=None)
    assert rig.released() == [7]


def test_an_aborted_load_keeps_its_lease_until_the_workers_are_done(rig: Rig) -> None:
    rig.load()
    rig.step()
    rig.side.on_finished("a")
    assert rig.released() == []
    rig.side.on_step_done(loaded=["a"], failed=[], committed=None)
    assert rig.released() == [7]


def test_a_promise_that_the_engine_does_not_take_is_given_back(rig: Rig) -> None:
    rig.side.on_new_request(request("a", 17))
    rig.channel.receive(staged("a", 4))
    assert rig.side.num_new_tokens("a", 0) == 16
    rig.side.on_allocated("a", [1, 2, 3, 4, 5], 0)
    assert rig.released() == [7]
    assert rig.side.num_new_tokens("a", 0) == 0


def test_a_refused_allocation_keeps_the_lease_for_the_next_attempt(rig: Rig) -> None:
    rig.side.on_new_request(request("a", 17))
    rig.channel.receive(staged("a", 4))
    assert rig.side.num_new_tokens("a", 0) == 16
    rig.step()
    assert rig.released() == []
    assert rig.side.num_new_tokens("a", 0) == 16


@pytest.mark.parametrize("is_answered", [True, False])
def test_a_request_that_ends_while_it_waits_leaves_no_lease(rig: Rig, is_answered: bool) -> None:
    rig.side.on_new_request(request("a", 17))
    if is_answered:
        rig.channel.receive(staged("a", 4))
        assert rig.side.num_new_tokens("a", 0) == 16
        rig.side.on_finished("a")
    else:
        rig.side.on_finished("a")
        assert rig.side.awaits_answers()
        rig.channel.receive(staged("a", 4))
        assert not rig.side.awaits_answers()
    assert rig.released() == [7]


def test_an_answer_after_the_deadline_is_given_back_and_ends_the_silence(rig: Rig) -> None:
    rig.side.on_new_request(request("a", 17))
    rig.clock.now_s += 0.06
    assert rig.side.num_new_tokens("a", 0) == 0
    # Nobody waits for a server that was silent ...
    rig.side.on_new_request(request("b", 17))
    assert rig.side.num_new_tokens("b", 0) == 0
    assert len(rig.sent(Lookup)) == 2
    # ... until it says anything.
    rig.channel.receive(staged("a", 4, lease=1))
    rig.channel.receive(staged("b", 4, lease=2))
    rig.side.on_new_request(request("c", 17))
    assert rig.side.num_new_tokens("c", 0) is None
    assert rig.released() == [1, 2]


def test_late_answers_are_awaited_for_a_second_only(rig: Rig) -> None:
    rig.side.on_new_request(request("a", 17))
    assert rig.side.awaits_answers()
    rig.clock.now_s += 1.0
    assert not rig.side.awaits_answers()


def test_a_request_that_computes_already_gives_back_what_comes_for_it(rig: Rig) -> None:
    item = request("a", 17)
    rig.side.on_new_request(item)
    rig.step((item, 17))
    rig.channel.receive(staged("a", 4))
    rig.step()
    assert rig.released() == [7]


def test_without_a_server_nothing_is_sent_promised_or_saved(rig: Rig) -> None:
    rig.channel.lose()
    item = request("a", 17)
    rig.side.on_new_request(item)
    assert rig.side.num_new_tokens("a", 0) == 0
    assert rig.step((item, 17)).saves == ()
    assert rig.channel.sent == []


def test_a_lost_connection_voids_what_was_staged_without_a_release(rig: Rig) -> None:
    rig.side.on_new_request(request("a", 17))
    rig.side.on_new_request(request("b", 17))
    rig.channel.receive(staged("a", 4))
    assert rig.side.num_new_tokens("a", 0) == 16
    rig.channel.lose()
    rig.channel.connect()
    assert rig.side.num_new_tokens("a", 0) == 0
    assert rig.side.num_new_tokens("b", 0) == 0
    assert rig.released() == []


def test_a_load_that_runs_when_the_connection_is_lost_ends_without_a_release(rig: Rig) -> None:
    rig.load()
    rig.step()
    rig.channel.lose()
    rig.channel.connect()
    rig.side.on_step_done(loaded=["a"], failed=[], committed=None)
    assert rig.released() == []


def test_a_failed_load_is_a_miss_for_the_rest_of_the_request(rig: Rig) -> None:
    item = rig.load()
    rig.step()
    rig.side.on_step_done(loaded=["a"], failed=["a"], committed=None)
    assert rig.released() == [7]
    assert rig.side.num_new_tokens("a", 0) == 0
    rig.step(preempted=("a",))
    assert rig.side.num_new_tokens("a", 0) == 0
    assert len(rig.sent(Lookup)) == 1
    assert len(rig.step((item, 17)).saves[0].blocks) == 4


def test_a_preempted_request_is_looked_up_again(rig: Rig) -> None:
    item = request("a", 17)
    rig.side.on_new_request(item)
    rig.channel.receive(nothing_staged("a"))
    assert rig.side.num_new_tokens("a", 0) == 0
    rig.step((item, 17))
    item.num_computed_tokens = 0
    rig.step(preempted=("a",))
    rig.channel.receive(staged("a", 4))
    assert rig.side.num_new_tokens("a", 0) == 16


def test_own_blocks_that_were_evicted_meanwhile_are_asked_for_once(rig: Rig) -> None:
    rig.view.num_local = 2
    rig.side.on_new_request(request("a", 17))
    rig.channel.receive(staged("a", 4, num_local=2, lease=1))
    assert rig.side.num_new_tokens("a", 4) is None
    assert rig.released() == [1]
    rig.channel.receive(staged("a", 4, num_local=1, lease=2))
    assert rig.side.num_new_tokens("a", 0) == 0
    assert rig.released() == [1, 2]
    assert len(rig.sent(Lookup)) == 2


def test_a_server_that_never_answers_some_lookups_is_asked_again_some_day(rig: Rig) -> None:
    for number in range(1024):
        rig.side.on_new_request(request(f"{number}", 17))
        rig.side.on_finished(f"{number}")
    rig.side.on_new_request(request("one too many", 17))
    assert len(rig.sent(Lookup)) == 1024
    rig.clock.now_s += 11.1
    rig.side.on_new_request(request("later", 17))
    assert len(rig.sent(Lookup)) == 1025


def test_every_rank_has_to_have_a_block() -> None:
    rig = Rig(num_ranks=2)
    rig.side.on_new_request(request("a", 17))
    rig.channels[0].receive(staged("a", 4, lease=1))
    assert rig.side.num_new_tokens("a", 0) is None
    rig.channels[1].receive(staged("a", 3, lease=2))
    assert rig.side.num_new_tokens("a", 0) == 12
    rig.side.on_allocated("a", [1, 2, 3, 4, 5], 12)
    (job,) = rig.step().loads
    assert [len(rank.offsets) for rank in job.ranks] == [3, 3]
    rig.side.on_step_done(loaded=["a"], failed=[], committed=None)
    assert (rig.released(0), rig.released(1)) == ([1], [2])


def test_a_rank_that_has_nothing_makes_the_others_give_back() -> None:
    rig = Rig(num_ranks=2)
    rig.side.on_new_request(request("a", 17))
    rig.channels[0].receive(staged("a", 4, lease=1))
    rig.channels[1].receive(nothing_staged("a"))
    assert rig.side.num_new_tokens("a", 0) == 0
    assert (rig.released(0), rig.released(1)) == ([1], [])


def test_loaded_blocks_are_not_saved_and_computed_ones_are(rig: Rig) -> None:
    item = rig.load(num_tokens=21, num_blocks=4)
    rig.step()
    rig.side.on_step_done(loaded=["a"], failed=[], committed=None)
    item.num_computed_tokens = 16
    ((chain),) = rig.step((item, 5)).saves
    assert [block.block_hash for block in chain.blocks] == [item.block_hashes[4]]


def test_blocks_that_all_ranks_stored_are_not_offered_to_the_server_again() -> None:
    rig = Rig(num_ranks=2)
    first = request("a", 17)
    rig.side.on_new_request(first)
    (chain,) = rig.step((first, 17)).saves
    stored = tuple(block.block_hash for block in chain.blocks)
    rig.side.on_step_done((), (), CommittedBlocks({0: stored}))
    second, third = request("b", 17), request("c", 17)
    for item in (second, third):
        rig.side.on_new_request(item)
        item.num_computed_tokens = 16  # the engine's own cache had them
    assert len(rig.step((second, 1)).saves) == 1
    rig.side.on_step_done((), (), CommittedBlocks({1: stored}))
    assert rig.step((third, 1)).saves == ()


def test_the_end_of_a_request_is_told_to_the_workers_once(rig: Rig) -> None:
    rig.side.on_new_request(request("a", 17))
    rig.side.on_finished("a")
    rig.side.on_finished("a")
    assert rig.step().ended == ("a",)
    assert rig.step().ended == ()


def test_what_a_prefill_cost_is_reported(rig: Rig) -> None:
    item = request("a", 17)
    rig.side.on_new_request(item)
    rig.step((item, 17))
    rig.clock.now_s += 1.5
    rig.side.on_step_done((), (), None)
    assert rig.sent(PrefillReport) == [PrefillReport(0, 17, 1.5)]
