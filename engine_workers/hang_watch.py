"""Kill a supervised process that lives and answers nothing, so that another one is started."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from engine_workers.launch import EngineCommand
from engine_workers.supervisor import EngineState, EngineStatus, HealthProbe

logger = logging.getLogger(__name__)


class Watched(Protocol):
    """What is needed of an `EngineSupervisor`."""

    name: str
    command: EngineCommand
    status: EngineStatus

    def kill(self) -> None:
        """Kill the process; the supervisor starts another."""


@dataclass(frozen=True, slots=True)
class HangPolicy:
    """How patient a watch is; seconds."""

    look_every_s: float = 2.0
    silence_s: float = 30.0
    """Without an answer for so long, it hangs."""


class HangWatch:
    """Looks at one process.

    Args:
        watched: Whom to look at.
        probe: Whether the server at (host, port) is well.
        policy: Time limits.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        watched: Watched,
        probe: HealthProbe,
        policy: HangPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._watched = watched
        self._probe = probe
        self._policy = policy or HangPolicy()
        self._clock = clock
        self._answered_at = clock()

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(self._policy.look_every_s)

    async def look(self) -> None:
        """Look once."""
        status = self._watched.status
        command = self._watched.command
        # One that starts has its supervisor's time limit.
        if status.state is not EngineState.READY or await self._probe(command.host, command.port):
            self._answered_at = self._clock()
            return
        silent_s = self._clock() - self._answered_at
        if silent_s >= self._policy.silence_s and self._watched.status == status:
            logger.warning("%s: no answer for %.0f s; killed", self._watched.name, silent_s)
            self._watched.kill()
            self._answered_at = self._clock()
