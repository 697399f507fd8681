from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from engine_workers.cache_server.sealed_memory import SealedMemory
from engine_workers.cache_wire import (
    PROTOCOL_VERSION,
    Freed,
    FromServer,
    Hello,
    Lookup,
    Refused,
    Welcome,
)
from engine_workers.connector.channel import ChannelEvent, Connected, Lost
from engine_workers.connector.client import CacheServerClient, ClientTimes
from engine_workers.connector.session import SessionError, open_session
from tests.engine_workers.connector.cache_server_process import cache_server
from tests.engine_workers.connector.fakes import NAMESPACE
from tests.engine_workers.connector.numpy_engine import until

HELLO = Hello(PROTOCOL_VERSION, "engine", "worker", NAMESPACE, 1000, 2)
LOOKUP = Lookup("a", [b"h" * 32], 0, 40)
PATIENT = ClientTimes(welcome_s=20.0, silence_s=20.0, first_pause_s=0.01, longest_pause_s=0.05)
LEAVES_THE_SILENT = replace(PATIENT, silence_s=0.1)
LEAVES_THE_RUDE = replace(PATIENT, welcome_s=0.5)


class ScriptedServer:
    """Accepts connections, and says to each what a test wants it to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        self._listener.settimeout(20)
        self.connections: list[socket.socket] = []
        self.arena = SealedMemory.written_here("arena", 4096)
        self.ring = SealedMemory.written_elsewhere("ring", 8192)

    def accept(self) -> socket.socket:
        connection, _ = self._listener.accept()
        connection.settimeout(20)
        self.connections.append(connection)
        return connection

    def say(self, connection: socket.socket, message: FromServer) -> None:
        body = msgspec.msgpack.encode(message)
        connection.sendall(len(body).to_bytes(4, "little") + body)

    def welcome(self, connection: socket.socket, boot_token: str = "boot") -> None:
        body = msgspec.msgpack.encode(Welcome(boot_token, 4096, 1024, 2, 4096))
        frame = len(body).to_bytes(4, "little") + body
        socket.send_fds(connection, [frame], [self.arena.fd, self.ring.fd])

    def close(self) -> None:
        for connection in self.connections:
            connection.close()
        self._listener.close()
        self.arena.close()
        self.ring.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ScriptedServer]:
    server = ScriptedServer(tmp_path / "scripted.sock")
    yield server
    server.close()


@pytest.fixture
def times() -> ClientTimes:
    return PATIENT


@pytest.fixture
def client(server: ScriptedServer, times: ClientTimes) -> Iterator[CacheServerClient]:
    client = CacheServerClient(server.path, lambda: HELLO, times)
    client.start()
    yield client
    client.close(5.0)


def next_events(client: CacheServerClient) -> list[ChannelEvent]:
    while not (events := client.poll()):
        time.sleep(0.001)
    return events


def test_nothing_waits_for_a_server_that_is_not_there_and_it_is_found_when_it_comes(
    tmp_path: Path,
) -> None:
    client = CacheServerClient(tmp_path / "cache.sock", lambda: HELLO, PATIENT)
    client.start()
    assert not client.send(LOOKUP)
    assert client.poll() == []
    with cache_server(tmp_path):
        (event,) = next_events(client)
        assert isinstance(event, Connected)
        assert event.session.num_slots == 2
        assert client.send(LOOKUP)
        client.close(5.0)


def test_the_arena_can_be_read_and_not_written_and_the_ring_is_the_engines(
    server: ScriptedServer, client: CacheServerClient
) -> None:
    server.welcome(server.accept())
    (event,) = next_events(client)
    assert isinstance(event, Connected)
    server.arena.data[7] = 9
    assert event.session.arena[7] == 9
    with pytest.raises(ValueError, match="read-only"):
        event.session.arena[7] = 1
    event.session.ring[1, 5] = 3
    assert server.ring.data[4096 + 5] == 3
    assert event.session.boot_token == "boot"


def test_messages_go_both_ways(server: ScriptedServer, client: CacheServerClient) -> None:
    connection = server.accept()
    server.welcome(connection)
    next_events(client)
    assert client.send(LOOKUP)
    received = b""
    while b"Lookup" not in received:
        received += connection.recv(4096)
    server.say(connection, Freed("boot", [1], 1))
    assert next_events(client) == [Freed("boot", [1], 1)]


@pytest.mark.parametrize("times", [LEAVES_THE_RUDE])
def test_a_server_that_does_not_greet_is_left_and_tried_again(
    server: ScriptedServer, client: CacheServerClient
) -> None:
    server.accept()
    server.welcome(server.accept())
    (event,) = next_events(client)
    assert isinstance(event, Connected)


@pytest.mark.parametrize("times", [LEAVES_THE_SILENT])
def test_a_server_that_owes_an_answer_and_is_silent_is_left(
    server: ScriptedServer, client: CacheServerClient
) -> None:
    server.welcome(server.accept())
    next_events(client)
    assert client.send(LOOKUP)
    assert next_events(client) == [Lost()]
    server.welcome(server.accept(), "another")
    (event,) = next_events(client)
    assert isinstance(event, Connected)
    assert event.session.boot_token == "another"


@pytest.mark.parametrize("times", [LEAVES_THE_SILENT])
def test_a_server_that_owes_nothing_may_be_silent(
    server: ScriptedServer, client: CacheServerClient
) -> None:
    connection = server.accept()
    server.welcome(connection)
    next_events(client)
    threading.Event().wait(3 * LEAVES_THE_SILENT.silence_s)
    server.say(connection, Freed("boot", [], 0))
    assert next_events(client) == [Freed("boot", [], 0)]


@pytest.mark.parametrize(
    "garbage",
    [b"\xff" * 64, b"\4\0\0\0\xc1\xc1\xc1\xc1", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"],
)
def test_garbage_ends_the_connection_and_nothing_else(
    server: ScriptedServer, client: CacheServerClient, garbage: bytes
) -> None:
    connection = server.accept()
    server.welcome(connection)
    next_events(client)
    connection.sendall(garbage)
    assert next_events(client) == [Lost()]
    server.welcome(server.accept())
    (event,) = next_events(client)
    assert isinstance(event, Connected)


def test_a_refusal_is_logged_with_its_reason_once_and_tried_again(
    server: ScriptedServer, client: CacheServerClient, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        connection = server.accept()
        assert connection.recv(4096)
        server.say(connection, Refused("dtype is float16 and was float32"))
        connection.close()
    server.welcome(server.accept())
    next_events(client)
    assert caplog.text.count("dtype is float16 and was float32") == 1


def test_what_was_not_asked_for_yet_is_void_with_its_connection(
    server: ScriptedServer, client: CacheServerClient
) -> None:
    connection = server.accept()
    server.welcome(connection)
    server.say(connection, Freed("boot", [1], 1))
    connection.close()
    second = server.accept()
    second.close()
    third = server.accept()
    server.welcome(third, "third")
    until(lambda: client.send(LOOKUP))
    events = client.poll()
    assert events[0] == Lost()
    assert isinstance(events[1], Connected)
    assert events[1].session.boot_token == "third"


def test_a_server_that_reads_nothing_fills_a_bounded_queue(
    server: ScriptedServer, client: CacheServerClient
) -> None:
    server.welcome(server.accept())
    next_events(client)
    large = Lookup("a", [bytes(32)] * 100_000, 0, 0)
    until(lambda: not client.send(large))


def test_a_client_that_is_closed_takes_nothing_more(
    server: ScriptedServer, client: CacheServerClient
) -> None:
    server.welcome(server.accept())
    next_events(client)
    client.close(5.0)
    assert not client.send(LOOKUP)


def test_a_model_that_cannot_be_read_leaves_the_engine_without_a_cache(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def unreadable() -> Hello:
        raise FileNotFoundError("no such model")

    client = CacheServerClient(tmp_path / "none.sock", unreadable, PATIENT)
    client.start()
    until(lambda: "no such model" in caplog.text)
    assert not client.send(LOOKUP)
    client.close(5.0)


# --- what comes with a welcome ---


@pytest.fixture
def unsealed() -> Iterator[int]:
    descriptor = os.memfd_create("unsealed", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, 4096)
    yield descriptor
    with suppress(OSError):
        os.close(descriptor)


def test_memory_that_could_shrink_under_the_engine_is_refused(unsealed: int) -> None:
    with pytest.raises(SessionError, match="sealed"):
        open_session(Welcome("boot", 4096, 64, 0, 0), [unsealed])


def test_memory_smaller_than_was_said_is_refused(server: ScriptedServer) -> None:
    with pytest.raises(SessionError, match="smaller"):
        open_session(Welcome("boot", 8192, 64, 0, 0), [server.arena.fd])


@pytest.mark.parametrize("num_slots", [0, 2])
def test_a_descriptor_too_few_or_too_many_is_refused(
    server: ScriptedServer, num_slots: int
) -> None:
    descriptors = [server.arena.fd] * (1 if num_slots else 2)
    with pytest.raises(SessionError, match="descriptors"):
        open_session(Welcome("boot", 4096, 64, num_slots, 1024), descriptors)


def test_a_session_outlives_its_descriptors(server: ScriptedServer) -> None:
    copies = [os.dup(server.arena.fd), os.dup(server.ring.fd)]
    session = open_session(Welcome("boot", 4096, 64, 2, 4096), copies)
    for descriptor in copies:
        os.close(descriptor)
    server.arena.data[:] = 5
    assert np.all(session.arena == 5)
