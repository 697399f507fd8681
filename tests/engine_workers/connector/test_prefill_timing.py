from __future__ import annotations

import pytest

from engine_workers.cache_wire import PrefillReport
from engine_workers.connector.engine_request import ScheduledRequest
from engine_workers.connector.prefill_timing import PrefillTiming
from tests.engine_workers.connector.fakes import Clock, Request, request


class Rig:
    def __init__(self) -> None:
        self.clock = Clock()
        self.timing = PrefillTiming(self.clock)

    def step(self, seconds: float, *running: tuple[Request, int]) -> PrefillReport | None:
        self.timing.on_step(
            [(item, ScheduledRequest(item.request_id, count, ())) for item, count in running]
        )
        self.clock.now_s += seconds
        for item, count in running:
            item.num_computed_tokens += count
        return self.timing.on_step_done()


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_a_prefill_in_pieces_is_one_report_at_its_end(rig: Rig) -> None:
    item = request("a", 20)
    item.num_computed_tokens = 8
    assert rig.step(1.0, (item, 8)) is None
    assert rig.step(5.0) is None
    assert rig.step(0.5, (item, 4)) == PrefillReport(8, 12, 1.5)


def test_decoding_is_no_prefill(rig: Rig) -> None:
    item = request("a", 20)
    assert rig.step(1.0, (item, 20)) == PrefillReport(0, 20, 1.0)
    item.append(1)
    assert rig.step(1.0, (item, 1)) is None


def test_steps_that_are_shared_are_not_reported(rig: Rig) -> None:
    first, second = request("a", 20), request("b", 20)
    assert rig.step(1.0, (first, 10)) is None
    assert rig.step(1.0, (first, 5), (second, 5)) is None
    assert rig.step(2.0, (first, 5)) == PrefillReport(15, 5, 2.0)


def test_a_request_that_never_comes_back_is_not_mixed_with_the_next(rig: Rig) -> None:
    assert rig.step(1.0, (request("a", 20), 10)) is None
    assert rig.step(2.0, (request("b", 10), 10)) == PrefillReport(0, 10, 2.0)
