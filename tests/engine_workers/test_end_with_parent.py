from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from engine_workers.end_with_parent import LAUNCHED_VARIABLE
from tests.fifo import Fifo

PROGRAM = """
import multiprocessing, signal, sys, threading
from engine_workers.end_with_parent import register

def inner(fifo, depth):
    register()
    register()
    told = open(fifo, "w")
    if depth:
        multiprocessing.Process(target=inner, args=(fifo, depth - 1)).start()
    else:
        told.write(f"{threading.active_count()} threads\\n")
        told.flush()
    signal.pause()

if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    register()
    multiprocessing.Process(target=inner, args=(sys.argv[1], 1)).start()
    signal.pause()
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    """An engine's shape: a first process, its child, and its child's child."""
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    return str(file)


def start(program: str, fifo: Fifo, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    path = str(Path(__file__).parents[2])
    return subprocess.Popen(
        [sys.executable, program, fifo.path],
        env=os.environ | {"PYTHONPATH": path} | environment,
        start_new_session=True,
    )


def test_all_of_an_engine_ends_when_its_first_process_is_killed(program: str, fifo: Fifo) -> None:
    with start(program, fifo, {LAUNCHED_VARIABLE: "1"}) as first:
        assert fifo.read_line() == "2 threads\n"
        first.kill()
        fifo.wait_until_all_are_gone()


def test_processes_that_we_did_not_launch_are_left_alone(program: str, fifo: Fifo) -> None:
    with start(program, fifo, {}) as first:
        assert fifo.read_line() == "1 threads\n"
        os.killpg(first.pid, signal.SIGKILL)
        fifo.wait_until_all_are_gone()
