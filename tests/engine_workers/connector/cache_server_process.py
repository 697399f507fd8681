"""A cache server as users start it, and what may happen to one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class CacheServerProcess:
    """`radixgate cache-server` with an arena and, if a folder is given, an SSD tier below it."""

    def __init__(
        self, socket: Path, folder: Path, arena_bytes: int, ssd: Path | None = None
    ) -> None:
        self.socket = socket
        self._log = folder / "cache-server.log"
        self._environment = {
            **os.environ,
            "RADIXGATE_TIERS": "ram" if ssd is None else "ram,ssd",
            **({} if ssd is None else {"RADIXGATE_SSD_FOLDER": str(ssd)}),
            "RADIXGATE_CACHE_SOCKET": str(socket),
            "RADIXGATE_ARENA_BYTES": str(arena_bytes),
        }
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        command = [str(Path(sys.executable).parent / "radixgate"), "cache-server"]
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, env=self._environment
            )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        self._process.stdout.close()
        assert "listening" in line, line + self._log.read_text()

    def stop(self) -> None:
        self._signal(signal.SIGTERM)
        assert self._process is not None
        assert self._process.wait() == 0

    def kill(self) -> None:
        self._signal(signal.SIGKILL)
        assert self._process is not None
        self._process.wait()

    def hang(self) -> None:
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)


@contextmanager
def cache_server(
    folder: Path,
    arena_bytes: int = 256 * 1024**2,
    *,
    socket: Path | None = None,
    ssd: Path | None = None,
) -> Iterator[CacheServerProcess]:
    """Start one, and end it with the test whatever has become of it."""
    server = CacheServerProcess(socket or folder / "cache.sock", folder, arena_bytes, ssd)
    try:
        server.start()
        yield server
    finally:
        server.kill()
