"""Where an engine publishes its KV events: Unix sockets, or TCP ports for other machines."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

# A Unix socket's address is 108 bytes, the last of them zero.
_MAX_SOCKET_PATH_BYTES = 107
_LONGEST_NAME = "engine-65535-events.sock"


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

    Args:
        preferred: Used if the paths of sockets in it are short enough; else a temporary folder is,
            and is removed at the end.
    """
    if len(bytes(preferred / _LONGEST_NAME)) > _MAX_SOCKET_PATH_BYTES:
        # Not below `TMPDIR`, which may be as long.
        with tempfile.TemporaryDirectory(prefix="radixgate-", dir="/tmp") as temporary:
            yield Path(temporary)
        return
    preferred.mkdir(parents=True, exist_ok=True)
    # Events carry the token ids of prompts.
    preferred.chmod(0o700)
    yield preferred
