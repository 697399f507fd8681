from __future__ import annotations

import msgspec
import pytest

from engine_workers.cache_wire import MAX_FRAME_BYTES, Freed, FromServer, Lookup, Staging
from engine_workers.connector.frames import FrameError, FrameReader, frame_of


def from_server(message: FromServer) -> bytes:
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(4, "little") + body


MESSAGES: list[FromServer] = [
    Freed("boot", [1, 2], 2),
    Staging("boot", "a", 0.5),
    Freed("boot", [], 0),
]
STREAM = b"".join(from_server(message) for message in MESSAGES)


@pytest.mark.parametrize("size", [1, 2, 3, 7, len(STREAM)])
def test_messages_come_whole_and_in_order_however_the_bytes_are_cut(size: int) -> None:
    reader = FrameReader()
    parts = [STREAM[start : start + size] for start in range(0, len(STREAM), size)]
    assert [message for part in parts for message in reader.feed(part)] == MESSAGES


@pytest.mark.parametrize(
    "wrong",
    [
        (MAX_FRAME_BYTES + 1).to_bytes(4, "little"),
        b"\0\0\0\0",
        b"\1\0\0\0\xc1",
        from_server(Freed("boot", [1], 1)).replace(b"Freed", b"Freez"),
    ],
)
def test_what_no_server_says_is_an_error(wrong: bytes) -> None:
    with pytest.raises(FrameError):
        FrameReader().feed(wrong)


def test_a_message_over_the_limit_is_not_made() -> None:
    with pytest.raises(FrameError):
        frame_of(Lookup("a", [bytes(32)] * (MAX_FRAME_BYTES // 32), 0, 0))


def test_a_lookup_takes_less_than_40_bytes_a_block() -> None:
    assert len(frame_of(Lookup("a" * 40, [bytes(32)] * 256, 0, 8192))) < 256 * 40
