from __future__ import annotations

import os
import subprocess
import sys

from engine_workers.process_tree import descendants_of, first_to_kill, members_of_session
from tests.engine_workers.conftest import STAND_IN
from tests.fifo import Fifo


def test_descendants_are_found_over_session_bounds(fifo: Fifo) -> None:
    with subprocess.Popen([sys.executable, STAND_IN, "clingy", fifo.path]) as process:
        first, same_session, other_session = pids = fifo.read_pids()
        try:
            assert descendants_of(first) == {same_session, other_session}
            assert set(pids) <= descendants_of(os.getpid())
            assert members_of_session(os.getsid(0)) & set(pids) == {first, same_session}
            assert members_of_session(other_session) == {other_session}
        finally:
            for pid in pids:
                os.kill(pid, 9)
            process.wait()


def test_a_process_may_have_any_bytes_for_a_name() -> None:
    name = "import ctypes, sys; ctypes.CDLL(None).prctl(15, b'caf\\xc3) R', 0, 0, 0)"
    told = "; sys.stdout.write('x'); sys.stdout.flush(); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", name + told], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        assert process.pid in descendants_of(os.getpid())


def test_a_zombie_does_not_count() -> None:
    with subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert process.pid not in descendants_of(os.getpid())


def test_resource_trackers_are_not_the_first_to_be_killed() -> None:
    # As multiprocessing starts it; it ends when its pipe does.
    program = "print(flush=True);from multiprocessing.resource_tracker import main;main(0)"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as tracker:
        assert tracker.stdout is not None
        tracker.stdout.readline()  # a moment earlier it may not have its command line yet
        assert first_to_kill({os.getpid(), tracker.pid}) == {os.getpid()}
        tracker.communicate()
