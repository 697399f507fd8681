"""One engine under its guardian: start it, wait for it, stop it, and leave nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from cache_router.errors import EngineError
from engine_workers.launch import EngineCommand
from engine_workers.process_tree import TRACKER_GRACE_S, first_to_kill, members_of_session

# How much longer than the engine's own grace the guardian may take to end everything.
_GUARDIAN_SLACK_S = 4.0
_POLL_S = 0.02
# Created too: somebody may have tidied it away since the engine's last life.
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT


class GuardedProcess:
    """A running engine; made by `start`."""

    def __init__(self, guardian: asyncio.subprocess.Process, grace_s: float) -> None:
        self._guardian = guardian
        self._grace_s = grace_s

    @classmethod
    async def start(
        cls, command: EngineCommand, *, log_file: Path | None, grace_s: float
    ) -> GuardedProcess:
        """Start a guardian, which starts the engine.

        Args:
            command: What to run.
            log_file: Gets the engine's output at its end; None: it goes where ours goes.
            grace_s: Seconds between SIGTERM and SIGKILL when it is stopped.

        Raises:
            EngineError: The log cannot be written, or the process not be made.
        """
        arguments = [sys.executable, "-m", "engine_workers.guardian", str(grace_s)]
        try:
            log = None if log_file is None else os.open(log_file, _APPEND)
            try:
                guardian = await asyncio.create_subprocess_exec(
                    *arguments,
                    *command.arguments,
                    # Nothing is ever written to this pipe: its end is the order to stop.
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env=dict(command.environment),
                    # Out of the terminal's reach, so that Ctrl-C comes to us alone, and with a
                    # session id by which everything of this engine can be found.
                    start_new_session=True,
                )
            finally:
                if log is not None:
                    os.close(log)
        except OSError as error:
            raise EngineError(f"the engine's guardian cannot be started: {error}") from error
        return cls(guardian, grace_s)

    @property
    def session_id(self) -> int:
        """Session of the guardian and all of the engine's processes; its leader is the guardian."""
        return self._guardian.pid

    async def wait(self) -> int:
        """Wait until the engine has ended, and everything it started.

        Returns:
            The exit status; 128 + N or -N if signal N ended the engine or the guardian.
        """
        status = await self._guardian.wait()
        if status < 0:  # the guardian was killed and could not clean up
            await self._kill_session()
        return status

    async def stop(self) -> int:
        """End the engine, in order if it can, and return its exit status."""
        assert self._guardian.stdin is not None
        self._guardian.stdin.close()
        try:
            async with asyncio.timeout(self._grace_s + _GUARDIAN_SLACK_S):
                return await self.wait()
        except TimeoutError:
            await self._kill_session()
            return await self._guardian.wait()

    def kill(self) -> None:
        """End the engine at once, as a crash would: SIGKILL to all but the guardian."""
        for pid in first_to_kill(members_of_session(self.session_id) - {self.session_id}):
            _kill(pid)

    async def _kill_session(self) -> None:
        # Again and again, since a process may have been born while the list was made.
        begun_at = time.monotonic()
        while left := members_of_session(self.session_id):
            waited_s = time.monotonic() - begun_at
            if waited_s > _GUARDIAN_SLACK_S:
                return
            for pid in left if waited_s > TRACKER_GRACE_S else first_to_kill(left):
                _kill(pid)
            await asyncio.sleep(_POLL_S)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
