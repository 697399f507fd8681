"""Keep one engine running: start it, see when it is ready, start it again when it dies."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from cache_router.errors import EngineError
from engine_workers.engine_log import bound_log, last_lines, own_log
from engine_workers.guarded_process import GuardedProcess
from engine_workers.health_probe import is_healthy
from engine_workers.launch import EngineCommand

logger = logging.getLogger(__name__)

_NUM_LOG_LINES = 12


class EngineState(StrEnum):
    """Where an engine is in its life."""

    NEW = "new"
    """Nobody has started it yet."""
    STARTING = "starting"
    READY = "ready"
    DEAD = "dead"
    """It will be started again after a pause."""
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """What is known of an engine now."""

    state: EngineState = EngineState.NEW
    life: int = 1
    """1 for the first process, one more after each restart."""
    problem: str = ""
    """Why it died, if it is dead."""


@dataclass(frozen=True, slots=True)
class SupervisionPolicy:
    """How patient a supervisor is; seconds."""

    ready_timeout_s: float = 900.0
    probe_every_s: float = 0.25
    grace_s: float = 3.0
    """Between SIGTERM and SIGKILL."""
    first_pause_s: float = 1.0
    """Before the first restart; doubled for each further one."""
    longest_pause_s: float = 30.0
    stable_after_s: float = 60.0
    """An engine that was ready for so long starts again with the first pause."""
    log_check_s: float = 60.0
    """Between two looks at how large the log of a running engine has grown."""

    def pause_s(self, num_short_lives: int) -> float:
        """Seconds before the next start, after so many lives in a row that were not stable."""
        # The exponent is bounded as well: an engine may fail for weeks.
        doubled = self.first_pause_s * 2.0 ** min(max(num_short_lives - 1, 0), 20)
        return min(doubled, self.longest_pause_s)


HealthProbe = Callable[[str, int], Awaitable[bool]]


class EngineSupervisor:
    """One engine, over all of its lives.

    Args:
        name: For messages, for example `engine 1`.
        command: How to start it.
        log_file: Gets the engine's output; emptied at the start, kept over restarts. Another one
            beside it does if another process uses it, see `own_log`.
        policy: Time limits.
        probe: Whether a server at (host, port) is well.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        name: str,
        command: EngineCommand,
        log_file: Path,
        policy: SupervisionPolicy | None = None,
        probe: HealthProbe = is_healthy,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.command = command
        self.log_file = log_file
        self.log_begin = 0
        """Bytes in the log that earlier lives have written."""
        self.status = EngineStatus()
        self._policy = policy or SupervisionPolicy()
        self._probe = probe
        self._clock = clock
        self._changed = asyncio.Condition()
        self._process: GuardedProcess | None = None

    async def run(self) -> None:
        """Supervise until cancelled; then the engine is stopped before this returns.

        Raises:
            EngineError: The first start failed; the message has the end of the log. Later deaths
                only lead to restarts.
        """
        with own_log(self.log_file) as self.log_file:
            try:
                await self._live_again_and_again()
            finally:
                await self._change(EngineStatus(EngineState.STOPPED, self.status.life))

    async def _live_again_and_again(self) -> None:
        num_short_lives = 0
        life = 1
        while True:
            await self._change(EngineStatus(EngineState.STARTING, life))
            ready_s = await self._live()
            if life == 1 and ready_s is None:
                raise EngineError(self._last_words())
            long_enough = ready_s is not None and ready_s >= self._policy.stable_after_s
            num_short_lives = 0 if long_enough else num_short_lives + 1
            pause_s = self._policy.pause_s(num_short_lives)
            logger.warning(
                "%s: %s; it starts again in %.0f s; its log: %s",
                self.name,
                self.status.problem,
                pause_s,
                self.log_file,
            )
            await asyncio.sleep(pause_s)
            life += 1

    async def wait_ready(self, life: int = 1) -> None:
        """Wait until the engine is ready in the given life or a later one.

        Whoever waits needs a time limit of their own, or must run beside `run` in a task group:
        nothing comes here from an engine that cannot start.
        """
        async with self._changed:
            await self._changed.wait_for(
                lambda: self.status.state is EngineState.READY and self.status.life >= life
            )

    def kill(self) -> None:
        """Kill the engine as a crash would; `run` then starts it again."""
        if self._process is not None:
            self._process.kill()

    async def _live(self) -> float | None:
        """Start the engine and wait for its end.

        Returns:
            Seconds that it was ready, None if it never was.
        """
        await self._bound_log()
        try:
            self.log_begin = self.log_file.stat().st_size if self.log_file.exists() else 0
            self._process = await GuardedProcess.start(
                self.command, log_file=self.log_file, grace_s=self._policy.grace_s
            )
        except (EngineError, OSError) as error:
            await self._die(str(error))
            return None
        death = asyncio.create_task(self._process.wait(), name=f"{self.name}: wait")
        try:
            if not await self._becomes_ready(death):
                return None
            ready_at = self._clock()
            await self._change(EngineStatus(EngineState.READY, self.status.life))
            if self.status.life > 1:
                logger.warning("%s: ready again", self.name)
            while not death.done():
                await asyncio.wait([death], timeout=self._policy.log_check_s)
                await self._bound_log()
            await self._die(f"it ended with status {death.result()}")
            return self._clock() - ready_at
        finally:
            if not death.done():
                await self._process.stop()
            await death
            self._process = None

    async def _becomes_ready(self, death: asyncio.Task[int]) -> bool:
        deadline = self._clock() + self._policy.ready_timeout_s
        while not death.done():
            if await self._probe(self.command.host, self.command.port) and not death.done():
                return True
            if self._clock() > deadline:
                await self._die(f"it was not ready after {self._policy.ready_timeout_s:.0f} s")
                return False
            await asyncio.wait([death], timeout=self._policy.probe_every_s)
        await self._die(f"it ended with status {death.result()} before it was ready")
        return False

    async def _bound_log(self) -> None:
        try:
            await asyncio.to_thread(bound_log, self.log_file)
        except OSError as error:  # a full disk is no reason to end a running engine
            logger.warning("%s: its log grows: %s", self.name, error)

    async def _die(self, problem: str) -> None:
        await self._change(EngineStatus(EngineState.DEAD, self.status.life, problem))

    async def _change(self, status: EngineStatus) -> None:
        async with self._changed:
            self.status = status
            self._changed.notify_all()

    def _last_words(self) -> str:
        words = f"{self.name} cannot start: {self.status.problem}"
        try:
            end = last_lines(self.log_file, _NUM_LOG_LINES)
        except OSError:  # it may be the very reason
            return words
        return f"{words}; the end of its log {self.log_file}:\n{end}"
