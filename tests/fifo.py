"""A FIFO that stand-ins for engines write to and keep open: its end means that all are gone."""

from __future__ import annotations

import asyncio
import os
import select
from pathlib import Path

# Reads happen on threads, which pytest's own time limit cannot end.
_LIMIT_S = 60.0


class Fifo:
    """Opened before the stand-in starts, so that nothing it writes is missed."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = str(path)
        # Opened without waiting for a writer; with a writer of our own from then on, or the first
        # read would see the end of the file.
        self._reading = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        self._keep_open: int | None = os.open(path, os.O_WRONLY)
        self._unread = b""

    def read_pids(self) -> list[int]:
        """Wait for the stand-in's first line."""
        return [int(pid) for pid in self.read_line().split()]

    def read_line(self) -> str:
        while b"\n" not in self._unread:
            if not self._read_more():
                break
        line, newline, self._unread = self._unread.partition(b"\n")
        return (line + newline).decode()

    def wait_until_all_are_gone(self) -> None:
        """Return when no process has the FIFO open any more."""
        if self._keep_open is not None:
            os.close(self._keep_open)
            self._keep_open = None
        while self._read_more():
            pass

    async def pids(self) -> list[int]:
        return await asyncio.to_thread(self.read_pids)

    async def all_gone(self) -> None:
        await asyncio.to_thread(self.wait_until_all_are_gone)

    def close(self) -> None:
        if self._keep_open is not None:
            os.close(self._keep_open)
        os.close(self._reading)

    def _read_more(self) -> bool:
        """Read what comes next; False at the end."""
        ready, _, _ = select.select([self._reading], [], [], _LIMIT_S)
        if not ready:
            raise TimeoutError(f"the stand-in said nothing for {_LIMIT_S:g} s")
        data = os.read(self._reading, 4096)
        self._unread += data
        return bool(data)
