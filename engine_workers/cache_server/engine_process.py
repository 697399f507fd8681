"""Whether the process at the other end of a socket still runs."""

from __future__ import annotations

import os
import select
import socket
import struct

_CREDENTIALS = struct.Struct("3i")


class EngineProcess:
    """A process that connected. Its id cannot be taken by another one: a pidfd names it.

    Where the system does not show it (another container's process ids), its hanging up is taken
    for its end: a dying process lets go of its memory before the kernel closes its sockets.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.pid = peer_pid(connection)
        self._pidfd: int | None = None
        self._is_gone = False
        if self.pid > 0:
            try:
                self._pidfd = os.pidfd_open(self.pid)
            except ProcessLookupError:
                self._is_gone = True

    def is_known_to_live(self) -> bool:
        """Whether the system shows it, and that it has not ended."""
        return self._pidfd is not None and not self.is_gone()

    def hung_up(self) -> None:
        """Note that it closed the connection, rather than we."""
        if self._pidfd is None:
            self._is_gone = True

    def is_gone(self) -> bool:
        """Whether it ended, and with it all that it did."""
        if self._pidfd is not None and not self._is_gone:
            poller = select.poll()
            poller.register(self._pidfd, select.POLLIN)
            self._is_gone = bool(poller.poll(0))
        return self._is_gone

    def close(self) -> None:
        """Stop watching."""
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


def peer_pid(connection: socket.socket) -> int:
    """Return the id of the process at the other end, 0 if the system does not show it."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid: int = _CREDENTIALS.unpack(credentials)[0]
    return pid
