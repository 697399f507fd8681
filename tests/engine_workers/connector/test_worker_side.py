from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine_workers.blocks.block_header import checksum_of, unpack
from engine_workers.blocks.block_name import BlockName
from engine_workers.cache_wire import Forget, Freed, FromEngine, Put
from engine_workers.connector.arena_reader import LoadResults
from engine_workers.connector.plan import LoadJob, RankLoad, SaveBlock, SaveChain
from engine_workers.connector.rank_agreement import CommittedBlocks
from engine_workers.connector.session import Session
from engine_workers.connector.worker_side import WorkerSide
from tests.engine_workers.connector.cache_server_process import CacheServerProcess, cache_server
from tests.engine_workers.connector.fakes import NAMESPACE, FakeChannel, request
from tests.engine_workers.connector.numpy_engine import (
    LAYER_BLOCK_BYTES,
    NUM_BLOCKS,
    NUM_LAYERS,
    NumpyEngine,
    layout_of,
    until,
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CacheServerProcess]:
    with cache_server(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture
def model(request: pytest.FixtureRequest) -> str:
    """A namespace of its own for each test."""
    return str(request.node.name)


def ready(engine: NumpyEngine) -> NumpyEngine:
    """Wait until both of its connections stand."""
    until(lambda: engine.scheduler.is_connected and engine.worker.is_connected)
    return engine


def saved(engine: NumpyEngine, num_blocks: int) -> None:
    """Wait until the server took over that many blocks."""
    num_committed = 0
    while num_committed < num_blocks:
        engine.worker.save((), ())
        report = engine.worker.take_committed()
        num_committed += len(report.by_rank[0]) if report is not None else 0


def test_another_engine_gets_the_same_bytes(server: CacheServerProcess, model: str) -> None:
    with (
        NumpyEngine(server.socket, "one", model=model) as one,
        NumpyEngine(server.socket, "two", model=model) as two,
    ):
        computed = ready(one).compute(request("a", 25), content=1)
        saved(one, 6)
        loaded = ready(two).load(request("b", 25))
        assert len(loaded) == 6
        assert two.bytes_of(loaded) == one.bytes_of(computed[:6])
        # The gaps between blocks, and other blocks, are not ours to write.
        assert not two.memory[:, :, LAYER_BLOCK_BYTES:].any()
        untouched = sorted(set(range(NUM_BLOCKS)) - set(loaded))
        assert not two.memory[:, untouched].any()


def test_another_model_gets_nothing(server: CacheServerProcess, model: str) -> None:
    with (
        NumpyEngine(server.socket, "one", model=model) as one,
        NumpyEngine(server.socket, "two", model=f"{model}, trained on") as two,
    ):
        ready(one).compute(request("a", 25), content=1)
        saved(one, 6)
        assert ready(two).load(request("b", 25)) == []


def test_a_full_ring_drops_the_rest_of_a_chain_and_takes_the_next(
    server: CacheServerProcess, model: str
) -> None:
    with NumpyEngine(server.socket, "one", ring_slots=2, model=model) as engine:
        ready(engine).compute(request("a", 25), content=1)
        saved(engine, 2)
        assert len(engine.load(request("b", 25))) == 2
        engine.compute(request("c", 9), content=1)
        saved(engine, 2)


def test_after_a_restart_of_the_server_blocks_are_saved_and_loaded_again(
    tmp_path: Path, model: str
) -> None:
    with cache_server(tmp_path) as server, NumpyEngine(server.socket, model=model) as engine:
        ready(engine).compute(request("a", 9), content=1)
        saved(engine, 2)
        server.kill()
        until(lambda: not engine.scheduler.is_connected)
        assert engine.load(request("b", 9)) == []
        server.start()
        assert ready(engine).load(request("c", 9)) == []
        computed = engine.compute(request("d", 9), content=2)
        saved(engine, 2)
        loaded = engine.load(request("e", 9))
        assert engine.bytes_of(loaded) == engine.bytes_of(computed[:2])


# --- copies against an arena that is in the test's hands ---


class Rig:
    """A worker's side over an arena of three blocks and a ring of two slots."""

    def __init__(self, channel: FakeChannel | None = None) -> None:
        self.memory = np.zeros((NUM_LAYERS, NUM_BLOCKS, LAYER_BLOCK_BYTES), np.uint8)
        self.layout = layout_of(self.memory)
        self.size = self.layout.payload_bytes
        self.arena = np.random.default_rng(0).integers(0, 256, 3 * self.size, np.uint8)
        self.session = Session("boot", self.arena, np.zeros((2, self.size + 66_000), np.uint8))
        self.channel = channel or FakeChannel()
        self.channel.poll()
        self.side = WorkerSide(self.channel, self.layout, 0)
        self.channel.connect(self.session)

    def part(self, num_blocks: int = 3) -> RankLoad:
        offsets = range(0, num_blocks * self.size, self.size)
        checksums = [checksum_of(self.arena[start : start + self.size].data) for start in offsets]
        return RankLoad("boot", tuple(offsets), tuple(checksums))

    def load(self, part: RankLoad, block_ids: tuple[int, ...] = (5, 3, 9)) -> LoadResults:
        hashes = tuple(b"%d" % block_id for block_id in block_ids)
        self.side.start_loads([LoadJob("a", (part,), block_ids, hashes)])
        results = LoadResults()
        while not results.finished:
            results = self.side.take_results()
        return results

    def save(self, request_id: str, *hashes: bytes) -> None:
        blocks = tuple(
            SaveBlock(number, block_hash, None, (1, 2), ())
            for number, block_hash in enumerate(hashes)
        )
        self.side.save([SaveChain(request_id, blocks)], ())


LOADED = LoadResults(frozenset("a"), frozenset())
FAILED = LoadResults(frozenset("a"), frozenset("a"))


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.side.close(5.0)


def test_blocks_are_scattered_to_the_blocks_that_the_engine_chose(rig: Rig) -> None:
    assert rig.load(rig.part()) == LOADED
    for number, block_id in enumerate((5, 3, 9)):
        payload = rig.arena[number * rig.size : (number + 1) * rig.size]
        assert rig.memory[:, block_id].tobytes() == payload.tobytes()


def test_a_block_that_is_not_what_was_staged_fails_the_load_and_is_reported(rig: Rig) -> None:
    part = rig.part()
    rig.arena[rig.size + 100] ^= 1
    assert rig.load(part) == FAILED
    assert rig.channel.sent == [Forget([b"3"])]


@pytest.mark.parametrize(
    "change",
    [
        {"boot_token": "another life"},
        {"offsets": (0, 1, -1)},
        {"offsets": (0, 1, 10**9)},
        {"offsets": (0, 1)},
        {"checksums": ()},
    ],
)
def test_what_cannot_be_read_without_a_doubt_fails_before_anything_is_copied(
    rig: Rig, change: dict[str, Any]
) -> None:
    assert rig.load(replace(rig.part(), **change)) == FAILED
    assert not rig.memory.any()


def test_blocks_that_the_engine_does_not_have_are_not_written(rig: Rig) -> None:
    assert rig.load(rig.part(), (1, 2, NUM_BLOCKS)) == FAILED
    assert not rig.memory.any()


def test_without_a_server_every_load_fails_at_once(rig: Rig) -> None:
    rig.channel.lose()
    assert rig.load(rig.part()) == FAILED


def test_a_slot_holds_header_and_payload_as_the_wire_says(rig: Rig) -> None:
    rig.memory[:, 0] = 7
    rig.side.save([SaveChain("a", (SaveBlock(0, b"h" * 32, b"p" * 32, (1, 2), ("s",)),))], ())
    (put,) = rig.channel.sent
    assert isinstance(put, Put)
    assert put.block_hashes == [b"h" * 32]
    slot = rig.session.ring[put.slots[0]]
    length = int.from_bytes(slot[:4].tobytes(), "little")
    header = unpack(slot[4 : 4 + length].tobytes())
    assert header.name == BlockName(NAMESPACE.fingerprint, b"h" * 32)
    assert (header.parent_hash, header.token_ids, header.extra_keys) == (b"p" * 32, (1, 2), ("s",))
    start = -(-(4 + length) // 64) * 64
    payload = slot[start : start + rig.size]
    assert payload.tobytes() == rig.memory[:, 0].tobytes()
    assert header.checksum == checksum_of(payload.data)


def test_a_put_says_how_long_copying_has_held_up_the_engine(rig: Rig) -> None:
    ticks = itertools.count(start=7)
    side = WorkerSide(rig.channel, rig.layout, 0, clock=lambda: float(next(ticks)))
    rig.channel.connect(rig.session)
    side.save([SaveChain("a", (SaveBlock(0, b"0", None, (1, 2), ()),))], ())
    side.close(5.0)
    assert [put.seconds for put in rig.channel.sent if isinstance(put, Put)] == [1.0]


def test_a_block_without_a_slot_is_dropped_with_all_its_children(rig: Rig) -> None:
    rig.save("a", b"0", b"1", b"2")
    rig.channel.receive(Freed("boot", [0, 1], 2))
    rig.save("a", b"3")
    rig.save("b", b"4")
    assert [put.block_hashes for put in rig.channel.sent if isinstance(put, Put)] == [
        [b"0", b"1"],
        [b"4"],
    ]
    rig.side.save([], ["a"])
    rig.save("a", b"0")
    assert len(rig.channel.sent) == 3


def test_blocks_count_as_stored_only_if_the_server_kept_all_that_it_freed(rig: Rig) -> None:
    rig.save("a", b"0", b"1")
    assert rig.side.take_committed() is None
    rig.channel.receive(Freed("boot", [0, 1], 1))
    rig.save("b", b"2")
    assert rig.side.take_committed() is None
    (_, put) = rig.channel.sent
    assert isinstance(put, Put)
    rig.channel.receive(Freed("boot", put.slots, 1))
    rig.side.save([], [])
    assert rig.side.take_committed() == CommittedBlocks({0: (b"2",)})
    assert rig.side.take_committed() is None


def test_slots_that_were_never_given_are_not_freed(rig: Rig) -> None:
    rig.channel.receive(Freed("boot", [0, 0, 17], 3))
    rig.save("a", b"0", b"1", b"2", b"3")
    (put,) = rig.channel.sent
    assert isinstance(put, Put)
    assert sorted(put.slots) == [0, 1]
    assert rig.side.take_committed() is None


def test_a_message_that_is_not_taken_leaves_its_slots_free(rig: Rig) -> None:
    rig.side.save([], [])
    rig.channel.is_open = False
    rig.save("a", b"0", b"1")
    rig.channel.is_open = True
    rig.save("b", b"0", b"1")
    (put,) = rig.channel.sent
    assert isinstance(put, Put)
    assert sorted(put.slots) == [0, 1]


def test_a_save_that_goes_wrong_in_an_unknown_way_does_not_end_the_engine(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken(FakeChannel):
        def send(self, message: FromEngine) -> bool:
            raise TypeError("a bug")

    rig = Rig(Broken())
    try:
        rig.save("a", b"0")
        rig.save("b", b"1")
        (record,) = caplog.records
        assert record.exc_text is not None
        assert record.exc_text.endswith("TypeError: a bug")
        assert rig.load(rig.part()) == LOADED
    finally:
        rig.side.close(5.0)
