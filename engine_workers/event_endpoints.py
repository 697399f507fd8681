"""Where an engine publishes its KV events: Unix sockets, or TCP ports for other machines."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from cache_router.errors import ConfigurationError

# A Unix socket's address is 108 bytes, the last of them zero.
_MAX_SOCKET_PATH_BYTES = 107
_LONGEST_NAME = "engine-65535-events.sock"
_OWNER_ONLY = 0o700


@dataclass(frozen=True, slots=True)
class EventEndpoints:
    """Two ZeroMQ endpoints, as vLLM's `--kv-events-config` takes them."""

    events: str
    replay: str


def socket_endpoints(folder: Path, port: int) -> EventEndpoints:
    """Endpoints that only this machine's user can reach.

    Args:
        folder: From `socket_folder`.
        port: The engine's HTTP port, which tells engines apart.
    """
    name = folder / f"engine-{port}"
    return EventEndpoints(f"ipc://{name}-events.sock", f"ipc://{name}-replay.sock")


def tcp_endpoints(port: int) -> EventEndpoints:
    """Endpoints on all interfaces, `port` and the next; they show prompts' token ids to all.

    vLLM binds to no other address: with a host's name or address it connects instead, and nothing
    would ever arrive.
    """
    return EventEndpoints(f"tcp://*:{port}", f"tcp://*:{port + 1}")


@contextmanager
def socket_folder(preferred: Path) -> Iterator[Path]:
    """A folder, for this user only, whose sockets have short enough paths.

    Several processes may use it at once. Whoever finds that nobody else does removes the sockets
    that are in it: they are what crashed engines left, which nothing else would ever remove.

    Args:
        preferred: Used if the paths of sockets in it are short enough; else one below `/tmp` is.

    Raises:
        ConfigurationError: It cannot be made, or is not this user's.
    """
    folder = preferred
    if len(bytes(preferred / _LONGEST_NAME)) > _MAX_SOCKET_PATH_BYTES:
        # Not below `TMPDIR`, which may be as long; and always the same, so that it can be tidied.
        name = hashlib.sha256(bytes(preferred)).hexdigest()[:16]
        folder = Path(f"/tmp/radixgate-{os.getuid()}-{name}")
    with ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=_OWNER_ONLY)
            lock = stack.enter_context((folder / ".lock").open("w"))
            # Events carry the token ids of prompts. This also fails in another user's folder.
            folder.chmod(_OWNER_ONLY)
            _tidy(folder, lock)
            # Until the process ends, however it ends.
            fcntl.flock(lock, fcntl.LOCK_SH)
        except OSError as error:
            raise ConfigurationError(
                str(folder),
                f"event sockets cannot be made there ({error.strerror}); the folder must be this "
                "user's own, on a disk that can be written to",
            ) from error
        try:
            yield folder
        finally:
            _tidy(folder, lock)


def _tidy(folder: Path, lock: IO[str]) -> None:
    """Remove all engines' sockets, unless another process uses the folder.

    A cache server's socket may lie there too; it has a lock of its own.
    """
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    for left in folder.glob("engine-*.sock"):
        left.unlink(missing_ok=True)
