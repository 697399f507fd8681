from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cache_router.errors import EngineError
from engine_workers.guarded_process import GuardedProcess
from engine_workers.launch import EngineCommand
from engine_workers.process_tree import members_of_session
from tests.engine_workers.conftest import STAND_IN
from tests.fifo import Fifo


def command(*arguments: str) -> EngineCommand:
    return EngineCommand((sys.executable, STAND_IN, *arguments), dict(os.environ), "127.0.0.1", 1)


async def start(mode: str, fifo: Fifo, log_file: Path | None = None) -> GuardedProcess:
    return await GuardedProcess.start(command(mode, fifo.path), log_file=log_file, grace_s=0.2)


async def test_stop_ends_everything(fifo: Fifo) -> None:
    process = await start("clingy", fifo)
    assert len(await fifo.pids()) == 3
    assert await process.stop() == 128 + signal.SIGTERM
    await fifo.all_gone()


async def test_wait_gives_the_engines_status(fifo: Fifo) -> None:
    process = await start("fail", fifo)
    assert await process.wait() == 3


async def test_output_is_added_to_the_log(fifo: Fifo, tmp_path: Path) -> None:
    log_file = tmp_path / "log"
    log_file.write_text("before\n")
    process = await start("fail", fifo, log_file)
    await process.wait()
    assert log_file.read_text() == "before\nthe stand-in cannot go on\n"


async def test_a_log_that_cannot_be_written_is_an_engine_error(fifo: Fifo, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="none"):
        await start("fail", fifo, tmp_path / "none" / "log")


async def test_kill_is_a_crash_of_the_engine_and_not_of_the_guardian(fifo: Fifo) -> None:
    process = await start("clingy", fifo)
    await fifo.pids()
    process.kill()
    assert await process.wait() == 128 + signal.SIGKILL
    await fifo.all_gone()


async def test_when_the_guardian_is_killed_the_session_is_cleaned_up(fifo: Fifo) -> None:
    process = await start("clingy", fifo)
    first, same_session, other_session = await fifo.pids()
    os.kill(process.session_id, signal.SIGKILL)
    assert await process.wait() == -signal.SIGKILL
    # What the engine put into a session of its own is out of reach now; vLLM does no such thing.
    os.kill(other_session, signal.SIGKILL)
    await fifo.all_gone()
    assert not members_of_session(process.session_id) & {first, same_session}


def test_sigkill_of_the_parent_leaves_nothing(fifo: Fifo) -> None:
    program = (
        "import asyncio, os, sys\n"
        "from engine_workers.guarded_process import GuardedProcess\n"
        "from engine_workers.launch import EngineCommand\n"
        "async def main():\n"
        "    command = EngineCommand(tuple(sys.argv[1:]), dict(os.environ), '127.0.0.1', 1)\n"
        "    process = await GuardedProcess.start(command, log_file=None, grace_s=0.2)\n"
        "    await process.wait()\n"
        "asyncio.run(main())\n"
    )
    arguments = [sys.executable, "-c", program, sys.executable, STAND_IN, "clingy", fifo.path]
    with subprocess.Popen(arguments) as parent:
        fifo.read_pids()
        parent.kill()
        fifo.wait_until_all_are_gone()
        assert parent.wait() == -signal.SIGKILL
