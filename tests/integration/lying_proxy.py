"""Between an engine and its cache server: everything passes, but every checksum is a lie."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from engine_workers.cache_wire import FromServer, Staged

_decoder: msgspec.msgpack.Decoder[FromServer] = msgspec.msgpack.Decoder(FromServer)


@contextmanager
def lying_proxy(path: Path, server: Path) -> Iterator[None]:
    """Listen at `path` for engines, and speak for them to the server at `server`."""
    connections: list[socket.socket] = []
    threads: list[threading.Thread] = []
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    path.unlink(missing_ok=True)  # a server that was killed leaves its socket's file
    listener.bind(str(path))
    listener.listen()

    def accept() -> None:
        with suppress(OSError):  # closed at the end
            while True:
                engine, _ = listener.accept()
                upstream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                connections.extend((engine, upstream))
                upstream.connect(str(server))
                for work, ends in ((_pass_on, (engine, upstream)), (_lie, (upstream, engine))):
                    threads.append(threading.Thread(target=work, args=ends))
                    threads[-1].start()

    threads.append(threading.Thread(target=accept))
    threads[0].start()
    try:
        yield
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        threads[0].join()
        for connection in connections:
            with suppress(OSError):  # not connected any more
                connection.shutdown(socket.SHUT_RDWR)
        for thread in threads[1:]:
            thread.join()
        for connection in (*connections, listener):
            connection.close()
        path.unlink()


def _pass_on(engine: socket.socket, upstream: socket.socket) -> None:
    with suppress(OSError):
        while data := engine.recv(65536):
            upstream.sendall(data)
        upstream.shutdown(socket.SHUT_WR)


def _lie(upstream: socket.socket, engine: socket.socket) -> None:
    received = b""
    with suppress(OSError):
        while True:
            data, descriptors, _, _ = socket.recv_fds(upstream, 65536, 4)
            if not data:
                break
            received += data
            while len(received) >= 4:
                end = 4 + int.from_bytes(received[:4], "little")
                if len(received) < end:
                    break
                frame, received = _changed(received[4:end]), received[end:]
                socket.send_fds(engine, [frame], descriptors)
                for descriptor in descriptors:
                    os.close(descriptor)
                descriptors = []
        engine.shutdown(socket.SHUT_WR)


def _changed(body: bytes) -> bytes:
    message = _decoder.decode(body)
    if isinstance(message, Staged):
        lies = [checksum ^ 1 for checksum in message.checksums]
        message = msgspec.structs.replace(message, checksums=lies)
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(4, "little") + body
