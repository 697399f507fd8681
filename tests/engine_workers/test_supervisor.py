from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from cache_router.errors import EngineError
from engine_workers.health_probe import is_healthy
from engine_workers.launch import EngineCommand
from engine_workers.ports import any_free_ports
from engine_workers.supervisor import (
    EngineState,
    EngineSupervisor,
    HealthProbe,
    SupervisionPolicy,
)
from tests.engine_workers.conftest import STAND_IN
from tests.fifo import Fifo

QUICK = SupervisionPolicy(probe_every_s=0.02, grace_s=0.2, first_pause_s=0.01)


def supervisor(
    mode: str,
    fifo: Fifo,
    log_file: Path,
    policy: SupervisionPolicy = QUICK,
    probe: HealthProbe = is_healthy,
) -> EngineSupervisor:
    (port,) = any_free_ports(1)
    arguments = (sys.executable, STAND_IN, mode, fifo.path, str(port))
    command = EngineCommand(arguments, dict(os.environ), "127.0.0.1", port)
    return EngineSupervisor("engine 7", command, log_file, policy, probe)


@asynccontextmanager
async def running(engine: EngineSupervisor) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(engine.run())
    try:
        yield task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def never_well(_host: str, _port: int) -> bool:
    return False


async def test_an_engine_is_ready_when_its_health_endpoint_says_so(
    fifo: Fifo, tmp_path: Path
) -> None:
    engine = supervisor("serve", fifo, tmp_path / "log")
    async with running(engine):
        await engine.wait_ready()
        assert await is_healthy(engine.command.host, engine.command.port)


async def test_when_supervision_ends_the_engine_has_ended(fifo: Fifo, tmp_path: Path) -> None:
    engine = supervisor("serve", fifo, tmp_path / "log")
    async with running(engine):
        await engine.wait_ready()
    assert engine.status.state is EngineState.STOPPED
    await fifo.all_gone()


async def test_supervision_can_end_while_the_engine_still_starts(
    fifo: Fifo, tmp_path: Path
) -> None:
    engine = supervisor("clingy", fifo, tmp_path / "log", probe=never_well)
    async with running(engine):
        await fifo.pids()
    await fifo.all_gone()


async def test_an_engine_that_dies_early_is_an_error_with_the_end_of_its_log(
    fifo: Fifo, tmp_path: Path
) -> None:
    engine = supervisor("fail", fifo, tmp_path / "log")
    with pytest.raises(EngineError, match=r"engine 7 .*status 3") as caught:
        await engine.run()
    assert str(caught.value).endswith("the stand-in cannot go on")


async def test_an_engine_that_is_never_ready_is_an_error_and_is_ended(
    fifo: Fifo, tmp_path: Path
) -> None:
    policy = SupervisionPolicy(ready_timeout_s=0.0, probe_every_s=0.02, grace_s=0.2)
    engine = supervisor("clingy", fifo, tmp_path / "log", policy, never_well)
    with pytest.raises(EngineError, match="not ready after 0 s"):
        await engine.run()
    await fifo.all_gone()


async def test_an_engine_that_dies_later_is_started_again(fifo: Fifo, tmp_path: Path) -> None:
    engine = supervisor("serve", fifo, tmp_path / "log")
    async with running(engine):
        await engine.wait_ready()
        (first,) = await fifo.pids()
        engine.kill()
        await engine.wait_ready(life=2)
        (second,) = await fifo.pids()
        assert first != second
        assert engine.status.life == 2


async def test_a_second_life_that_fails_is_no_error_but_a_third_life(
    fifo: Fifo, tmp_path: Path
) -> None:
    answers = iter([True])

    async def well_once(_host: str, _port: int) -> bool:
        return next(answers, False)

    engine = supervisor("serve", fifo, tmp_path / "log", probe=well_once)
    async with running(engine) as task:
        await engine.wait_ready()
        for _ in range(2):
            # Not by the supervisor, which may not have heard yet that its engine has started.
            for pid in await fifo.pids():
                os.kill(pid, signal.SIGKILL)
        await fifo.pids()
        assert engine.status.life == 3
        assert not task.done()


async def test_an_engine_lives_again_when_its_log_was_tidied_away(
    fifo: Fifo, tmp_path: Path
) -> None:
    engine = supervisor("serve", fifo, tmp_path / "log")
    async with running(engine):
        await engine.wait_ready()
        (tmp_path / "log").unlink()
        engine.kill()
        await engine.wait_ready(life=2)


async def test_a_second_life_that_cannot_be_started_is_tried_again(
    fifo: Fifo, tmp_path: Path
) -> None:
    logs = tmp_path / "logs"
    engine = supervisor("serve", fifo, logs / "log")
    async with running(engine):
        await engine.wait_ready()
        logs.rename(tmp_path / "away")
        engine.kill()
        async with asyncio.timeout(60):
            while engine.status.life < 3:  # noqa: ASYNC110 - every change of it would do
                await asyncio.sleep(0.01)
        (tmp_path / "away").rename(logs)
        await engine.wait_ready(life=3)


async def test_a_death_and_what_follows_are_logged(
    fifo: Fifo, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = supervisor("serve", fifo, tmp_path / "log")
    async with running(engine):
        await engine.wait_ready()
        engine.kill()
        await engine.wait_ready(life=2)
    died, ready = caplog.messages
    assert died.startswith("engine 7: it ended with status 137; it starts again in 0 s; its log: ")
    assert ready == "engine 7: ready again"


def test_pauses_double_up_to_a_limit() -> None:
    policy = SupervisionPolicy(first_pause_s=1.0, longest_pause_s=30.0)
    assert [policy.pause_s(n) for n in range(7)] == [1, 1, 2, 4, 8, 16, 30]
    assert policy.pause_s(1_000_000) == 30
