from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from engine_workers.hang_watch import HangPolicy, HangWatch
from engine_workers.launch import EngineCommand
from engine_workers.supervisor import EngineState, EngineStatus

POLICY = HangPolicy(look_every_s=2.0, silence_s=30.0)


@dataclass
class Process:
    """A supervised process whose clock the test moves."""

    name: str = "cache server"
    command: EngineCommand = field(default_factory=lambda: EngineCommand((), {}, "127.0.0.1", 1))
    status: EngineStatus = field(default_factory=lambda: EngineStatus(EngineState.READY))
    answers: bool = True
    now_s: float = 0.0
    num_kills: int = 0

    def kill(self) -> None:
        self.num_kills += 1

    async def probe(self, _host: str, _port: int) -> bool:
        return self.answers

    def clock(self) -> float:
        return self.now_s


@pytest.fixture
def process() -> Process:
    return Process()


@pytest.fixture
def watch(process: Process) -> HangWatch:
    return HangWatch(process, process.probe, POLICY, process.clock)


async def test_one_that_is_silent_for_too_long_is_killed_once(
    process: Process, watch: HangWatch
) -> None:
    process.answers = False
    process.now_s = 29.0
    await watch.look()
    assert process.num_kills == 0
    process.now_s = 30.0
    await watch.look()
    process.now_s = 32.0
    await watch.look()
    assert process.num_kills == 1


async def test_an_answer_in_between_starts_the_wait_again(
    process: Process, watch: HangWatch
) -> None:
    process.now_s = 29.0
    await watch.look()
    process.answers = False
    process.now_s = 58.0
    await watch.look()
    assert process.num_kills == 0


async def test_one_that_starts_is_its_supervisors_to_judge(
    process: Process, watch: HangWatch
) -> None:
    process.status = EngineStatus(EngineState.STARTING, life=2)
    process.answers = False
    process.now_s = 60.0
    await watch.look()
    process.status = EngineStatus(EngineState.READY, life=2)
    await watch.look()
    assert process.num_kills == 0
