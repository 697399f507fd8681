"""Runs one engine and sees to it that nothing of it outlives whoever asked for it.

    python -m engine_workers.guardian GRACE_S PROGRAM [ARGUMENT ...]

Its standard input is a pipe whose other end the supervisor holds and never writes to. The kernel
closes that end when the supervisor ends, however it ends, SIGKILL included; the guardian then stops
the engine and ends. SIGTERM and SIGINT mean the same as the pipe's end.

An engine is several processes: HTTP server, scheduler, workers, each the child of the one before.
Where one of them dies, its children become the guardian's (it is their subreaper), so they cannot
get out of its sight. If the guardian itself is killed, the kernel kills the engine's first process,
and the supervisor what is left of the guardian's session.

Standard library only and small, since one of these runs for each engine.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import time

from engine_workers.process_tree import TRACKER_GRACE_S, descendants_of, first_to_kill

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_KILL_TIMEOUT_S = 5.0
_POLL_S = 0.02
_CANNOT_EXECUTE = 127


class Guardian:
    """One engine, from its start until its last process is gone.

    Args:
        command: Program and arguments; looked up in `PATH` if the program has no slash.
        grace_s: Seconds between SIGTERM and SIGKILL.
    """

    def __init__(self, command: list[str], grace_s: float) -> None:
        self._command = command
        self._grace_s = grace_s
        self._engine_pid = 0
        self._status: int | None = None

    def run(self) -> int:
        """Start the engine, wait for its end or for the order to stop it, and clean up.

        Returns:
            The engine's exit status, 128 + N if signal N ended it.
        """
        prctl = ctypes.CDLL(None, use_errno=True).prctl
        prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        wake_up = _wake_up_pipe(signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        self._engine_pid = self._start(prctl)
        asked_to_stop = False
        while self._status is None and not asked_to_stop:
            readable, _, _ = select.select([sys.stdin.fileno(), wake_up], [], [])
            if wake_up in readable:
                received = set(os.read(wake_up, 4096))
                asked_to_stop = bool(received - {signal.SIGCHLD})
            if sys.stdin.fileno() in readable:
                asked_to_stop |= not os.read(sys.stdin.fileno(), 4096)
            self._reap()
        if self._status is None:
            self._terminate()
        self._kill_what_is_left()
        return self._status if self._status is not None else 128 + signal.SIGKILL

    def _start(self, prctl: ctypes._NamedFuncPointer) -> int:
        guardian_pid = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        try:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != guardian_pid:  # it was gone before the line above took effect
                os._exit(_CANNOT_EXECUTE)
            os.setpgid(0, 0)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.execvp(self._command[0], self._command)
        except OSError as error:
            sys.stderr.write(f"{self._command[0]} cannot be started: {error.strerror}\n")
            sys.stderr.flush()
        finally:
            os._exit(_CANNOT_EXECUTE)

    def _reap(self) -> None:
        """Collect every child that has ended, adopted ones too, and note the engine's status."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._engine_pid:
                code = os.waitstatus_to_exitcode(status)
                self._status = code if code >= 0 else 128 - code

    def _terminate(self) -> None:
        """Let the engine's first process end the others in order, for a while."""
        deadline = time.monotonic() + self._grace_s
        os.kill(self._engine_pid, signal.SIGTERM)
        while self._status is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            self._reap()

    def _kill_what_is_left(self) -> None:
        begun_at = time.monotonic()
        while left := descendants_of(os.getpid()):
            waited_s = time.monotonic() - begun_at
            if waited_s > _KILL_TIMEOUT_S:
                sys.stderr.write(f"processes that SIGKILL does not end: {sorted(left)}\n")
                return
            for pid in left if waited_s > TRACKER_GRACE_S else first_to_kill(left):
                _kill(pid)
            time.sleep(_POLL_S)
            self._reap()


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _wake_up_pipe(*signals: signal.Signals) -> int:
    """A descriptor that becomes readable when one of the signals comes; its number is what is read.

    Unlike a handler that only sets a flag, this cannot miss one that comes just before the wait.
    """
    readable, writable = os.pipe()
    os.set_blocking(writable, False)
    signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    for number in signals:
        # SIG_IGN would be inherited by the engine; a handler is reset when it executes.
        signal.signal(number, lambda _number, _frame: None)
    return readable


def main() -> int:
    """Run as a program; returns the exit status."""
    grace_s, *command = sys.argv[1:]
    return Guardian(command, float(grace_s)).run()


if __name__ == "__main__":
    sys.exit(main())
