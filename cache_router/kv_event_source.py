"""One connection to a vLLM event publisher: what it publishes, and what it can replay.

The publisher has two sockets. PUB sends `(topic, sequence, payload)`. ROUTER takes
`(empty, first sequence)` and answers with `(empty, topic, sequence, payload)` for each batch
that it still has, then with an end marker. Sequences are 8 bytes, big-endian; the marker's is -1.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from cache_router.errors import EventDecodeError
from cache_router.worker_registry import EventEndpoint

_SEQUENCE = struct.Struct(">q")
_END_OF_REPLAY = -1

# vLLM keeps 10,000 batches for replay; what overflows here is a gap and comes back that way.
_MAX_QUEUED_BATCHES = 16_384
_MAX_BATCH_BYTES = 256 * 1024 * 1024
# The publisher sends an answer in one go, and its socket drops what it cannot queue: silence
# within an answer is a lost end, which is not worth the patience that its beginning may need.
_SILENCE_WITHIN_ANSWER_S = 0.5
# A peer that vanished without a word (a cut cable, a stopped process) must break the connection.
_HEARTBEAT_MS = 2_000
_HEARTBEAT_TIMEOUT_MS = 10_000


class SourceLostError(Exception):
    """Nothing more can be learnt from this connection; start again. Stays within the follower."""


class ReplayFailedError(SourceLostError):
    """No answer to a replay request, or none that can be read."""


@dataclass(frozen=True, slots=True)
class Published:
    """One batch as it was published, still encoded."""

    sequence: int
    payload: bytes


class EventConnection:
    """A subscription from its handshake until it breaks; a context manager.

    Once broken it stays lost, although ZMQ would reconnect: what is published in between goes
    unseen, and another process may answer.
    """

    def __init__(self, context: zmq.asyncio.Context, endpoint: EventEndpoint) -> None:
        """Begin to connect.

        Raises:
            SourceLostError: the address cannot be one to connect to.
        """
        self._context = context
        self._endpoint = endpoint
        self._subscriber = _socket(context, zmq.SUB)
        self._subscriber.setsockopt(zmq.SUBSCRIBE, endpoint.topic.encode())
        self._monitor = self._subscriber.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        self._poller = zmq.asyncio.Poller()
        self._poller.register(self._monitor, zmq.POLLIN)
        try:
            self._subscriber.connect(endpoint.endpoint)
        except zmq.ZMQError as error:
            self._close()
            raise SourceLostError(f"cannot connect to {endpoint.endpoint}: {error}") from error

    def __enter__(self) -> Self:
        """Nothing more to do."""
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close all sockets."""
        self._close()

    @property
    def can_replay(self) -> bool:
        """Whether the publisher has a replay address."""
        return self._endpoint.replay_endpoint is not None

    async def wait_open(self) -> None:
        """Wait for the publisher, however long it takes it to appear."""
        while await _next_event(self._monitor) != zmq.EVENT_HANDSHAKE_SUCCEEDED:
            pass
        self._poller.register(self._subscriber, zmq.POLLIN)

    async def receive(self, timeout_s: float) -> Published | None:
        """The next batch in the order of arrival, None if nothing came in that time.

        Raises:
            EventDecodeError: the message does not have a batch's frames.
            SourceLostError: the connection broke.
        """
        ready = dict(await self._poller.poll(int(timeout_s * 1000)))
        if self._monitor in ready:
            await _raise_if_lost(self._monitor)
        if self._subscriber not in ready:
            return None
        frames = await self._subscriber.recv_multipart()
        if len(frames) != 3 or len(frames[1]) != _SEQUENCE.size:
            raise EventDecodeError(f"a message of {len(frames)} frames is not a KV event batch")
        (sequence,) = _SEQUENCE.unpack(frames[1])
        return Published(sequence, frames[2])

    def replay_from(self, sequence: int, timeout_s: float) -> Replay:
        """Ask for all batches from that sequence on; enter the answer as a context manager.

        Args:
            sequence: The first batch wanted.
            timeout_s: Longest silence before the answer; within it, half a second is too long.

        Raises:
            ReplayFailedError: the address cannot be one to connect to.
        """
        assert self._endpoint.replay_endpoint is not None, "ask `can_replay` first"
        return Replay(
            self._context, self._monitor, self._endpoint.replay_endpoint, sequence, timeout_s
        )

    def _close(self) -> None:
        self._subscriber.disable_monitor()
        self._monitor.close(linger=0)
        self._subscriber.close(linger=0)


class Replay:
    """The answer to one replay request; a context manager.

    It has a socket of its own, so that a late answer is never taken for the next one's.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        monitor: zmq.asyncio.Socket,
        address: str,
        sequence: int,
        timeout_s: float,
    ) -> None:
        """See `EventConnection.replay_from`."""
        self._monitor = monitor
        self._sequence = sequence
        self._timeout_s = timeout_s
        self._asked = False
        self._dealer = _socket(context, zmq.DEALER)
        self._poller = zmq.asyncio.Poller()
        self._poller.register(self._dealer, zmq.POLLIN)
        self._poller.register(monitor, zmq.POLLIN)
        try:
            self._dealer.connect(address)
        except zmq.ZMQError as error:
            self._dealer.close(linger=0)
            raise ReplayFailedError(f"cannot connect to {address}: {error}") from error

    def __enter__(self) -> Self:
        """Nothing more to do."""
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the socket; what is still to come is not wanted."""
        self._dealer.close(linger=0)

    async def next_batch(self) -> Published | None:
        """The next batch of the answer, None at its end.

        Raises:
            ReplayFailedError: silence for too long, or frames that are no answer.
            SourceLostError: the subscription broke meanwhile.
        """
        if not self._asked:
            await self._dealer.send_multipart((b"", _SEQUENCE.pack(self._sequence)))
            self._asked = True
        ready = dict(await self._poller.poll(int(self._timeout_s * 1000)))
        if self._monitor in ready:
            await _raise_if_lost(self._monitor)
        if self._dealer not in ready:
            raise ReplayFailedError(f"a replay was silent for {self._timeout_s:g} s")
        self._timeout_s = min(self._timeout_s, _SILENCE_WITHIN_ANSWER_S)
        frames = await self._dealer.recv_multipart()
        if len(frames) != 4 or len(frames[2]) != _SEQUENCE.size:
            raise ReplayFailedError(f"a message of {len(frames)} frames is no replay")
        (sequence,) = _SEQUENCE.unpack(frames[2])
        if sequence == _END_OF_REPLAY:
            return None
        if sequence < self._sequence:
            raise ReplayFailedError(f"{sequence} is before {self._sequence}, which was asked for")
        return Published(sequence, frames[3])


def _socket(context: zmq.asyncio.Context, kind: int) -> zmq.asyncio.Socket:
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.RCVHWM, _MAX_QUEUED_BATCHES)
    socket.setsockopt(zmq.MAXMSGSIZE, _MAX_BATCH_BYTES)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
    return socket


async def _raise_if_lost(monitor: zmq.asyncio.Socket) -> None:
    if await _next_event(monitor) == zmq.EVENT_DISCONNECTED:
        raise SourceLostError("the event stream's connection broke")


async def _next_event(monitor: zmq.asyncio.Socket) -> int:
    return int(parse_monitor_message(await monitor.recv_multipart())["event"])
