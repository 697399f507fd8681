from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine_workers.process_tree import living_processes
from tests.engine_workers.conftest import STAND_IN
from tests.fifo import Fifo


@contextmanager
def guardian(*command: str, grace_s: float = 0.2) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(
        [sys.executable, "-m", "engine_workers.guardian", str(grace_s), *command],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def close_stdin(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()


def alive(pids: list[int]) -> set[int]:
    return set(pids) & {process.pid for process in living_processes()}


def test_when_the_pipe_closes_everything_ends_also_what_ignores_sigterm_or_left_the_session(
    fifo: Fifo,
) -> None:
    with guardian(sys.executable, STAND_IN, "clingy", fifo.path) as process:
        pids = fifo.read_pids()
        assert alive(pids) == set(pids)
        close_stdin(process)
        process.wait()
        assert not alive(pids)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_means_the_same(fifo: Fifo, number: signal.Signals) -> None:
    with guardian(sys.executable, STAND_IN, "clingy", fifo.path) as process:
        pids = fifo.read_pids()
        process.send_signal(number)
        process.wait()
        assert not alive(pids)


def test_an_engine_that_obeys_gets_to_end_by_itself(fifo: Fifo) -> None:
    with guardian(sys.executable, STAND_IN, "obey", fifo.path, grace_s=60) as process:
        fifo.read_pids()
        assert fifo.read_line() == "listening\n"
        close_stdin(process)
        assert process.wait() == 0


def test_an_engine_that_does_not_obey_is_killed_and_its_status_says_so(fifo: Fifo) -> None:
    command = (
        "import signal; signal.signal(15, 1); open(" + repr(fifo.path) + ", 'w').write('1\\n')"
    )
    command += "; [signal.pause() for _ in iter(int, 1)]"
    with guardian(sys.executable, "-c", command) as process:
        fifo.read_pids()
        close_stdin(process)
        assert process.wait() == 128 + signal.SIGKILL


def test_the_engines_own_end_ends_the_guardian_with_its_status(fifo: Fifo) -> None:
    with guardian(sys.executable, STAND_IN, "fail", fifo.path) as process:
        assert process.wait() == 3


def test_when_the_engines_first_process_dies_its_children_do_not_survive(fifo: Fifo) -> None:
    with guardian(sys.executable, STAND_IN, "clingy", fifo.path) as process:
        first, *others = fifo.read_pids()
        os.kill(first, signal.SIGKILL)
        assert process.wait() == 128 + signal.SIGKILL
        assert not alive(others)


def test_when_the_guardian_is_killed_the_kernel_kills_the_engines_first_process(
    fifo: Fifo,
) -> None:
    with guardian(sys.executable, STAND_IN, "obey", fifo.path) as process:
        fifo.read_pids()
        process.kill()
        fifo.wait_until_all_are_gone()


def test_a_program_that_does_not_exist_is_one_line(tmp_path: Path) -> None:
    with guardian(str(tmp_path / "none")) as process:
        assert process.wait() == 127
        assert process.stderr is not None
        assert process.stderr.read().decode().count("\n") == 1
