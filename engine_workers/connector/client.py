"""The connection to the cache server: a thread that keeps it, and queues to talk to it.

The engine never waits for it. A server that is not there, or ends, is a `Lost` and a new attempt
after a pause that grows; one that owes an answer and says nothing is left.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from engine_workers.cache_wire import (
    FromEngine,
    Hello,
    Lookup,
    Put,
    Refused,
    Welcome,
)
from engine_workers.connector.channel import ChannelEvent, Connected, Lost
from engine_workers.connector.frames import FrameError, FrameReader, frame_of
from engine_workers.connector.session import Session, SessionError, open_session

_log = logging.getLogger(__name__)

_MAX_OUTGOING_BYTES = 16 * 1024 * 1024
_MAX_EVENTS = 16 * 1024
_RECEIVE_BYTES = 256 * 1024
_MAX_DESCRIPTORS = 2


@dataclass(frozen=True, slots=True)
class ClientTimes:
    """How patient the connection is, in seconds."""

    welcome_s: float = 3.0
    """From connecting until the server's welcome."""
    silence_s: float = 5.0
    """How long a server may owe an answer and send nothing at all."""
    first_pause_s: float = 0.05
    """Before the first new attempt; the pause doubles with each one that fails."""
    longest_pause_s: float = 2.0


class ServerGoneError(Exception):
    """This connection is over: closed, silent, or refusing."""


class CacheServerClient:
    """A `Channel` over a Unix socket. Any thread may call it.

    Args:
        socket_path: Where the server listens, now or later.
        make_hello: Called in the thread before the first attempt: it may read model files.
        times: How patient it is.
    """

    def __init__(
        self, socket_path: Path, make_hello: Callable[[], Hello], times: ClientTimes | None = None
    ) -> None:
        self._path = str(socket_path)
        self._make_hello = make_hello
        self._times = times or ClientTimes()
        self._lock = threading.Lock()
        self._outgoing: deque[bytes] = deque()
        self._outgoing_bytes = 0
        self._events: deque[ChannelEvent] = deque()
        self._is_connected = False
        self._closing = threading.Event()
        self._owed_since_s: float | None = None
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        # A daemon, because an engine that is told to end must not wait for it.
        self._thread = threading.Thread(target=self._run, name="radixgate-cache", daemon=True)

    def start(self) -> None:
        """Begin to connect, and return at once."""
        self._thread.start()

    def send(self, message: FromEngine) -> bool:
        """Queue a message. False if nobody is connected or too much is queued: it is dropped."""
        frame = frame_of(message)
        with self._lock:
            if not self._is_connected or self._outgoing_bytes + len(frame) > _MAX_OUTGOING_BYTES:
                return False
            self._outgoing.append(frame)
            self._outgoing_bytes += len(frame)
            if self._owed_since_s is None and isinstance(message, Lookup | Put):
                self._owed_since_s = time.monotonic()
        self._wake()
        return True

    def poll(self) -> list[ChannelEvent]:
        """Return what happened since the last call, in order."""
        if not self._events:
            return []
        with self._lock:
            events = list(self._events)
            self._events.clear()
        return events

    def close(self, timeout_s: float = 1.0) -> None:
        """End the connection; after `timeout_s` without waiting for the thread any longer."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._wake()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        if not self._thread.is_alive():
            os.close(self._wake_read)
            os.close(self._wake_write)

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # full: the thread has been woken already
            os.write(self._wake_write, b"\0")

    def _run(self) -> None:
        try:
            hello = self._make_hello()
        except OSError as error:
            _log.warning("no cache for this engine: the model cannot be read (%s)", error)
            return
        pause_s = self._times.first_pause_s
        last_problem = ""
        while not self._closing.is_set():
            try:
                with self._connection(hello) as connection:
                    pause_s = self._times.first_pause_s
                    last_problem = ""
                    self._converse(connection)
            except (OSError, ServerGoneError, FrameError, SessionError) as error:
                problem = f"{type(error).__name__}: {error}"
                # Once for each reason: an engine without a cache server is no incident.
                if problem != last_problem and not self._closing.is_set():
                    _log.warning("cache server is out of reach, computing without it: %s", problem)
                last_problem = problem
            self._closing.wait(pause_s)
            pause_s = min(2 * pause_s, self._times.longest_pause_s)

    @contextmanager
    def _connection(self, hello: Hello) -> Iterator[socket.socket]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(self._times.welcome_s)
            connection.connect(self._path)
            connection.sendall(frame_of(hello))
            session = self._receive_welcome(connection)
            connection.setblocking(False)
            with self._lock:
                self._is_connected = True
                self._events.append(Connected(session, hello.namespace.fingerprint))
            try:
                yield connection
            finally:
                with self._lock:
                    self._is_connected = False
                    self._outgoing.clear()
                    self._outgoing_bytes = 0
                    self._owed_since_s = None
                    # What nobody asked for yet is void with its session. So nothing gathers here
                    # while an idle engine's server comes and goes.
                    self._events.clear()
                    self._events.append(Lost())

    def _receive_welcome(self, connection: socket.socket) -> Session:
        reader = FrameReader()
        descriptors: list[int] = []
        try:
            while True:
                # Small reads: descriptors come with the first byte of the frame they belong to.
                data, received, _, _ = socket.recv_fds(connection, 4096, _MAX_DESCRIPTORS)
                descriptors += received
                if not data:
                    raise ServerGoneError("closed before its welcome")
                for message in reader.feed(data):
                    if isinstance(message, Refused):
                        raise ServerGoneError(f"refused this engine: {message.reason}")
                    if isinstance(message, Welcome):
                        return open_session(message, descriptors)
                    raise ServerGoneError("spoke before its welcome")
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _converse(self, connection: socket.socket) -> None:
        reader = FrameReader()
        unsent = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_read, selectors.EVENT_READ)
            selector.register(connection, selectors.EVENT_READ)
            while not self._closing.is_set():
                unsent = unsent or self._take_outgoing()
                wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if unsent else 0)
                selector.modify(connection, wanted)
                for key, ready in selector.select(self._times.silence_s / 4):
                    if key.fileobj == self._wake_read:
                        os.read(self._wake_read, 4096)
                        continue
                    if ready & selectors.EVENT_READ:
                        self._receive(connection, reader)
                    if ready & selectors.EVENT_WRITE:
                        unsent = unsent[connection.send(unsent) :]
                self._check_silence()

    def _take_outgoing(self) -> bytes:
        with self._lock:
            frames = b"".join(self._outgoing)
            self._outgoing.clear()
            self._outgoing_bytes = 0
        return frames

    def _receive(self, connection: socket.socket, reader: FrameReader) -> None:
        data = connection.recv(_RECEIVE_BYTES)
        if not data:
            raise ServerGoneError("closed the connection")
        messages = reader.feed(data)
        if any(isinstance(message, Welcome | Refused) for message in messages):
            raise ServerGoneError("greeted twice")
        with self._lock:
            self._owed_since_s = None
            if len(self._events) + len(messages) > _MAX_EVENTS:
                raise ServerGoneError("sent more than anybody asked for")
            self._events.extend(messages)

    def _check_silence(self) -> None:
        with self._lock:
            owed_since_s = self._owed_since_s
        if owed_since_s is None:
            return
        if time.monotonic() - owed_since_s > self._times.silence_s:
            raise ServerGoneError(f"silent for {self._times.silence_s:g} s")
