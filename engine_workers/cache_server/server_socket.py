"""The Unix socket that engines connect to: one server at a time, whatever an earlier one left."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from cache_router.errors import ConfigurationError
from cache_router.settings import Settings
from engine_workers.workspace import Workspace

_SETTING = "RADIXGATE_CACHE_SOCKET"
_MAX_PATH_BYTES = 107 - len(".12345678.e")
"""What the kernel takes in an address; sockets for events lie beside this one."""
_BACKLOG = 128


def cache_socket(settings: Settings, workspace: Workspace) -> Path:
    """Return where the node's cache server listens."""
    return settings.cache_socket or workspace.sockets / "cache.sock"


@contextlib.contextmanager
def listening_socket(path: Path) -> Iterator[socket.socket]:
    """Listen on a socket that only this user may open, and remove it at the end.

    A lock beside it, which the kernel releases with its process, tells a living server, even one
    that hangs, from one that is gone and left its socket.

    Raises:
        ConfigurationError: Another server lives there, or the path cannot be used.
    """
    if len(os.fsencode(path)) > _MAX_PATH_BYTES:
        raise ConfigurationError(_SETTING, f"{path} is longer than {_MAX_PATH_BYTES} bytes")
    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(path.with_name(path.name + ".lock").open("w"))
        except OSError as error:
            raise ConfigurationError(_SETTING, f"{path}: {error.strerror}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigurationError(
                _SETTING, f"another cache server serves {path}; stop it, or choose another path"
            ) from error
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        try:
            _remove_stale(path)
            listener.bind(os.fspath(path))
            stack.callback(path.unlink, missing_ok=True)
            path.chmod(0o600)
            listener.listen(_BACKLOG)
        except OSError as error:
            raise ConfigurationError(_SETTING, f"{path}: {error.strerror}") from error
        listener.setblocking(False)
        yield listener


def _remove_stale(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigurationError(_SETTING, f"{path} is there and is no socket")
    path.unlink()
