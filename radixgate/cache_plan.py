"""From settings to a cache server of `serve`'s own, decided before anything starts."""

from __future__ import annotations

import fcntl
import itertools
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from cache_router.errors import ConfigurationError
from cache_router.settings import Settings
from engine_workers.blocks.sealing import configured_seal
from engine_workers.cache_server.configured_tiers import tier_names
from engine_workers.launch import EngineCommand
from engine_workers.tiers.redis_client import configured_url
from engine_workers.tiers.s3_client import configured_credentials
from engine_workers.workspace import Workspace

_HOST = "127.0.0.1"
_SMALLEST_DEFAULT_ARENA_BYTES = 512 * 1024**2
# A server whose parent was killed is ended by its guardian, which gives it three seconds.
_OTHERS_END_S = 4.0
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class CachePlan:
    """One cache server beside the engines of one `serve`."""

    tiers: str
    """As in RADIXGATE_TIERS."""
    socket: Path
    ssd_folder: Path
    port: int
    """Of its HTTP pages, on this machine's own address."""

    @property
    def url(self) -> str:
        """Where a gateway asks it what it holds."""
        return f"http://{_HOST}:{self.port}"

    def command(self, environment: Mapping[str, str], arena_bytes: int) -> EngineCommand:
        """Build its command.

        Args:
            environment: What it inherits: every setting that has no flag of `serve`.
            arena_bytes: Size of its shared memory.
        """
        return EngineCommand(
            arguments=(sys.executable, "-m", "radixgate", "cache-server"),
            environment={
                **environment,
                "RADIXGATE_HOST": _HOST,
                "RADIXGATE_TIERS": self.tiers,
                "RADIXGATE_CACHE_SOCKET": str(self.socket),
                "RADIXGATE_SSD_FOLDER": str(self.ssd_folder),
                "RADIXGATE_ARENA_BYTES": str(arena_bytes),
                "RADIXGATE_CACHE_SERVER_METRICS_PORT": str(self.port),
            },
            host=_HOST,
            port=self.port,
        )


@contextmanager
def planned_cache_server(
    settings: Settings, workspace: Workspace, sockets: Path, port: int
) -> Iterator[CachePlan]:
    """Choose socket and SSD folder, and keep them from other radixgates for the length of a block.

    Args:
        settings: Tiers, and what of them is given.
        workspace: Where tier data lies.
        sockets: Folder for the socket.
        port: A free port for its pages.

    Raises:
        ConfigurationError: A tier is unknown or lacks a setting, or the socket that is given has a
            server already.
    """
    _check_tiers(settings)
    with ExitStack() as claims:
        number = _claimed_number(settings.cache_socket, sockets, claims)
        ssd_folder = settings.ssd_folder or workspace.state / _numbered("ssd", number)
        yield CachePlan(
            ",".join(["ram", *tier_names(settings)]),
            settings.cache_socket or _socket(sockets, number),
            ssd_folder.absolute(),
            port,
        )


def reserved_bytes(settings: Settings) -> int:
    """Memory that must be there for the cache server and for its engines' write rings."""
    arena_bytes = settings.arena_bytes
    if "arena_bytes" not in settings.model_fields_set:
        arena_bytes = min(arena_bytes, _SMALLEST_DEFAULT_ARENA_BYTES)
    return arena_bytes + settings.engines * settings.write_ring_bytes


def fitting_arena_bytes(settings: Settings, left_bytes: int) -> int:
    """Size the arena: as it is set; by default no larger than what the engines leave.

    Args:
        settings: What is given.
        left_bytes: Memory that is there beside the engines; at least `reserved_bytes`.
    """
    if "arena_bytes" in settings.model_fields_set:
        return settings.arena_bytes
    left_bytes -= settings.engines * settings.write_ring_bytes
    return max(min(settings.arena_bytes, left_bytes), _SMALLEST_DEFAULT_ARENA_BYTES)


def _check_tiers(settings: Settings) -> None:
    names = tier_names(settings)
    if "redis" in names:
        configured_url(settings.redis_url, settings.redis_url_file)
    if "s3" in names:
        if settings.s3_bucket is None:
            raise ConfigurationError("RADIXGATE_S3_BUCKET", "the tier s3 needs a bucket")
        configured_credentials(
            settings.s3_access_key_id, settings.s3_secret_access_key, settings.s3_credentials_file
        )
    if "redis" in names or "s3" in names:
        configured_seal(settings.tier_key_file, encrypt=settings.tier_encrypt)


def _socket(sockets: Path, number: int) -> Path:
    return sockets / f"{_numbered('cache', number)}.sock"


def _numbered(name: str, number: int) -> str:
    return name if number == 1 else f"{name}.{number}"


def _claimed_number(given: Path | None, sockets: Path, claims: ExitStack) -> int:
    """Number the server: 1, or more where others have servers of their own in this checkout."""
    if given is not None:
        if not _claim(given, claims):
            raise ConfigurationError(
                "RADIXGATE_CACHE_SOCKET", f"another cache server serves {given}; choose another"
            )
        return 1
    return next(n for n in itertools.count(1) if _claim(_socket(sockets, n), claims))


def _claim(socket: Path, claims: ExitStack) -> bool:
    with ExitStack() as stack:
        if not _locked(socket.with_name(f"{socket.name}.claim"), stack):
            return False
        # A `cache-server` that somebody started alone, or one whose end is near.
        deadline = time.monotonic() + _OTHERS_END_S
        while not _can_lock(socket.with_name(f"{socket.name}.lock")):
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        claims.push(stack.pop_all())
    return True


def _can_lock(file: Path) -> bool:
    with ExitStack() as stack:
        return _locked(file, stack)


def _locked(file: Path, stack: ExitStack) -> bool:
    try:
        lock = stack.enter_context(file.open("w"))
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise ConfigurationError("RADIXGATE_CACHE_SOCKET", f"{file}: {error.strerror}") from error
    return True
