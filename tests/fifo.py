"""A FIFO that stand-ins for engines write to and keep open: its end means that all are gone."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path


class Fifo:
    """Opened before the stand-in starts, so that nothing it writes is missed."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = str(path)
        # Opened without waiting for a writer, then read as a blocking file: with a writer of our
        # own in between, or the first read would see the end of the file.
        self._reading = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        self._keep_open: int | None = os.open(path, os.O_WRONLY)
        os.set_blocking(self._reading, True)
        self._file = os.fdopen(self._reading)

    def read_pids(self) -> list[int]:
        """Wait for the stand-in's first line."""
        return [int(pid) for pid in self._file.readline().split()]

    def read_line(self) -> str:
        return self._file.readline()

    def wait_until_all_are_gone(self) -> None:
        """Return when no process has the FIFO open any more; pytest's time limit is the bound."""
        if self._keep_open is not None:
            os.close(self._keep_open)
            self._keep_open = None
        self._file.read()

    async def pids(self) -> list[int]:
        return await asyncio.to_thread(self.read_pids)

    async def all_gone(self) -> None:
        await asyncio.to_thread(self.wait_until_all_are_gone)

    def close(self) -> None:
        if self._keep_open is not None:
            os.close(self._keep_open)
        self._file.close()
