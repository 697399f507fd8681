"""TCP ports that nobody listens on."""

from __future__ import annotations

import errno
import socket
from itertools import islice

from cache_router.errors import ConfigurationError

_NUM_TRIED = 200


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now.

    Raises:
        OSError: `host` is not an address of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do: connections of a server that has just ended do not block its successor.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            raise
    return True


def require_free(host: str, port: int, setting: str) -> None:
    """Check an address before anything slow is started for it.

    Args:
        host: Address to listen on, as `RADIXGATE_HOST` says.
        port: 0 is always free: the kernel picks one.
        setting: Where the port comes from.

    Raises:
        ConfigurationError: Another process listens there, or `host` is not this machine's.
    """
    try:
        free = port == 0 or is_free(host, port)
    except OSError as error:
        raise ConfigurationError(
            "RADIXGATE_HOST",
            f"cannot listen on {host} ({error.strerror or error}); use an address of this machine",
        ) from error
    if not free:
        raise ConfigurationError(
            setting,
            f"port {port} on {host} is taken or not allowed; stop what listens there, or choose "
            f"another port",
        )


def free_ports(num_ports: int, first: int, host: str = "127.0.0.1") -> list[int]:
    """The lowest free ports from `first` on.

    Args:
        num_ports: How many.
        first: Where to begin.
        host: Where the servers will listen.

    Raises:
        ConfigurationError: There are not enough in the range that is tried.
    """
    candidates = range(first, min(first + _NUM_TRIED, 65536))
    found = list(islice((port for port in candidates if is_free(host, port)), num_ports))
    if len(found) < num_ports:
        raise ConfigurationError(
            "RADIXGATE_PORT",
            f"too few free ports follow {first} for {num_ports} engines; choose another",
        )
    return found


def any_free_ports(num_ports: int, host: str = "127.0.0.1") -> list[int]:
    """Distinct free ports that the kernel picks."""
    sockets = [socket.socket(socket.AF_INET, socket.SOCK_STREAM) for _ in range(num_ports)]
    try:
        for probe in sockets:
            probe.bind((host, 0))
        return [int(probe.getsockname()[1]) for probe in sockets]
    finally:
        for probe in sockets:
            probe.close()
