"""TCP ports that nobody listens on, and that no other radixgate is about to listen on."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from cache_router.errors import ConfigurationError

_NUM_TRIED = 200


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now.

    Raises:
        OSError: `host` is not an address of this machine.
    """
    with socket.socket(_family(host), socket.SOCK_STREAM) as probe:
        # As servers do: connections of a server that has just ended do not block its successor.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            raise
    return True


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


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
        free = is_free(host, port)
    except (OSError, UnicodeError) as error:  # a name that IDNA cannot encode is the latter
        reason = error.strerror if isinstance(error, OSError) else "it is no host name"
        raise ConfigurationError(
            "RADIXGATE_HOST",
            f"cannot listen on {host} ({reason}); use an address of this machine",
        ) from error
    if not free:
        raise _taken(host, port, setting)


def _taken(host: str, port: int, setting: str) -> ConfigurationError:
    return ConfigurationError(
        setting,
        f"port {port} on {host} is taken or not allowed; stop what listens there, or choose "
        f"another port",
    )


@contextmanager
def claimed_port(host: str, port: int, setting: str) -> Iterator[None]:
    """Keep a port that is free from other radixgates of this machine, for the length of a block.

    A server that needs half a minute to load listens late; who looks for a free port meanwhile
    must not take the same one.

    Raises:
        ConfigurationError: See `require_free`; or another radixgate is about to listen there.
    """
    require_free(host, port, setting)
    with ExitStack() as claims:
        if not _claim(port, claims):
            raise _taken(host, port, setting)
        yield


def _claim(port: int, claims: ExitStack) -> bool:
    # A name in the abstract namespace: it belongs to one socket, and is gone with its process.
    claim = claims.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    try:
        claim.bind(f"\0radixgate-port-{port}")
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return False
    return True


@contextmanager
def claimed_ports(num_ports: int, first: int, host: str = "127.0.0.1") -> Iterator[list[int]]:
    """The lowest free ports from `first` on, claimed as by `claimed_port`.

    Args:
        num_ports: How many.
        first: Where to begin.
        host: Where the servers will listen.

    Raises:
        ConfigurationError: There are not enough in the range that is tried.
    """
    with ExitStack() as claims:
        found: list[int] = []
        for port in range(first, min(first + _NUM_TRIED, 65536)):
            if len(found) < num_ports and is_free(host, port) and _claim(port, claims):
                found.append(port)
        if len(found) < num_ports:
            raise ConfigurationError(
                "RADIXGATE_PORT",
                f"too few free ports follow {first} for {num_ports} engines; choose another",
            )
        yield found


def any_free_ports(num_ports: int, host: str = "127.0.0.1") -> list[int]:
    """Distinct free ports that the kernel picks."""
    sockets = [socket.socket(_family(host), socket.SOCK_STREAM) for _ in range(num_ports)]
    try:
        for probe in sockets:
            probe.bind((host, 0))
        return [int(probe.getsockname()[1]) for probe in sockets]
    finally:
        for probe in sockets:
            probe.close()
