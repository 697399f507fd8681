"""An engine's requests, and a channel and a clock that do what a test says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from engine_workers.blocks.namespace import Namespace
from engine_workers.cache_wire import FromEngine, FromServer, Staged
from engine_workers.connector.channel import ChannelEvent, Connected, Lost
from engine_workers.connector.engine_request import EngineRequest
from engine_workers.connector.session import Session

BLOCK_SIZE = 4
BOOT = "boot"

NAMESPACE = Namespace(
    model="tiny",
    revision="",
    weight_quantization="",
    dtype="float32",
    kv_dtype="float32",
    num_layers=2,
    kv_heads=1,
    head_size=8,
    block_size=BLOCK_SIZE,
    layout="test",
    isa="test",
    tp_size=1,
    tp_rank=0,
    hash_algorithm="sha256",
    hash_seed="",
)


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def empty_session(boot_token: str = BOOT) -> Session:
    return Session(boot_token, np.zeros(1, np.uint8), np.empty((0, 0), np.uint8))


class FakeChannel:
    """Keeps what is sent, gives what a test puts in."""

    def __init__(self) -> None:
        self.sent: list[FromEngine] = []
        self.is_open = False
        self._events: list[ChannelEvent] = []
        self.connect()

    def connect(self, session: Session | None = None) -> None:
        self.is_open = True
        self._events.append(Connected(session or empty_session(), NAMESPACE.fingerprint))

    def lose(self) -> None:
        self.is_open = False
        self._events.append(Lost())

    def receive(self, message: FromServer) -> None:
        self._events.append(message)

    def send(self, message: FromEngine) -> bool:
        if self.is_open:
            self.sent.append(message)
        return self.is_open

    def poll(self) -> list[ChannelEvent]:
        events, self._events = self._events, []
        return events


@dataclass
class Request:
    """A request as an engine keeps it."""

    request_id: str
    all_token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int = 0
    block_hashes: list[bytes] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    def append(self, token_id: int) -> None:
        self.all_token_ids.append(token_id)
        self.block_hashes = hashes_of(self.all_token_ids)


def hashes_of(token_ids: Sequence[int]) -> list[bytes]:
    """Names for full blocks that depend on all tokens so far."""
    ends = range(BLOCK_SIZE, len(token_ids) + 1, BLOCK_SIZE)
    return [repr(tuple(token_ids[:end])).encode().ljust(32)[-32:] for end in ends]


def request(request_id: str, num_tokens: int) -> Request:
    token_ids = list(range(num_tokens))
    return Request(request_id, token_ids, num_tokens, block_hashes=hashes_of(token_ids))


class FakeView:
    """Says what the engine's own cache holds."""

    def __init__(self) -> None:
        self.num_local = 0

    def num_local_blocks(self, request: EngineRequest) -> int:
        return self.num_local

    def extra_keys(self, request: EngineRequest, number: int) -> tuple[object, ...]:
        return ("salt",) if number == 0 else ()


def staged(
    request_id: str, num_blocks: int, *, num_local: int = 0, lease: int = 7, boot: str = BOOT
) -> Staged:
    count = num_blocks - num_local
    return Staged(
        boot_token=boot,
        request_id=request_id,
        lease=lease,
        num_blocks=num_blocks,
        offsets=[1000 * (num_local + i) for i in range(count)],
        sources=["ram"] * count,
        checksums=[num_local + i for i in range(count)],
    )


def nothing_staged(request_id: str) -> Staged:
    return Staged(BOOT, request_id, 0, 0, [], [], [])
