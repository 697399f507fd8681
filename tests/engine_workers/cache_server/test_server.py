from __future__ import annotations

import asyncio
import mmap
import os
import struct
from pathlib import Path

import msgspec
import pytest
import xxhash

from engine_workers.blocks.block_header import PREFIX_BYTES, pack
from engine_workers.cache_server.admin_wire import Changed, ClearBlocks
from engine_workers.cache_wire import Freed, Hello, Lookup, Put, Staged, Welcome
from tests.engine_workers.cache_server.conftest import Clock, Running, Serve, until
from tests.engine_workers.cache_server.memory_tier import MemoryTier
from tests.engine_workers.cache_server.wire_client import (
    BLOCK_BYTES,
    BLOCK_SIZE,
    WireClient,
    block_hash,
    frame,
    hashes,
    header,
    namespace,
    payload,
    raw_connection,
)


async def test_what_one_engine_saved_another_one_finds_and_reads(running: Running) -> None:
    first = await running.client(engine_id="engine-1")
    second = await running.client(engine_id="engine-2", role="scheduler")
    assert (await first.save([1, 2, 3])).num_kept == 3
    staged = await second.look_up(hashes(4))
    assert staged.num_blocks == 3
    assert [second.read(offset) for offset in staged.offsets] == [payload(n) for n in (1, 2, 3)]
    assert staged.sources == ["engine"] * 3
    assert staged.checksums == [header(n, namespace()).checksum for n in (1, 2, 3)]


async def test_two_engines_read_the_same_memory(running: Running) -> None:
    first = await running.client(engine_id="engine-1")
    second = await running.client(engine_id="engine-2")
    await first.save([1])
    assert (await first.look_up(hashes(1))).offsets == (await second.look_up(hashes(1))).offsets
    assert os.fstat(first.arena_fd).st_ino == os.fstat(second.arena_fd).st_ino


async def test_an_engine_can_neither_map_the_arena_for_writing_nor_write_nor_resize_it(
    running: Running,
) -> None:
    client = await running.client()
    with pytest.raises(PermissionError):
        mmap.mmap(client.arena_fd, 4096)
    with pytest.raises(PermissionError):
        os.pwrite(client.arena_fd, b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(client.arena_fd, 0)
    again = os.open(f"/proc/self/fd/{client.arena_fd}", os.O_RDWR)
    try:
        with pytest.raises(PermissionError):
            mmap.mmap(again, 4096)
    finally:
        os.close(again)


async def test_only_blocks_beyond_the_local_ones_are_leased(running: Running) -> None:
    client = await running.client()
    await client.save([1, 2, 3])
    staged = await client.look_up(hashes(3), num_local=2)
    assert (staged.num_blocks, len(staged.offsets)) == (3, 1)
    assert client.read(staged.offsets[0]) == payload(3)


async def test_a_prefix_ends_at_its_first_gap(running: Running) -> None:
    client = await running.client()
    await client.save([1, 3])
    assert (await client.look_up(hashes(3))).num_blocks == 1
    assert running.parts.leases.num_held == 1


async def test_nothing_found_is_an_answer_without_a_lease(running: Running) -> None:
    client = await running.client(role="scheduler")
    staged = await client.look_up(hashes(3), num_local=1)
    assert (staged.lease, staged.num_blocks, staged.offsets) == (0, 1, [])


async def test_blocks_of_another_namespace_are_not_found(running: Running) -> None:
    await (await running.client(engine_id="a")).save([1])
    other = await running.client(engine_id="b", space=namespace(dtype="float16"))
    assert (await other.look_up(hashes(1))).num_blocks == 0


async def test_an_engine_with_another_namespace_is_refused_and_told_the_field(
    running: Running,
) -> None:
    await running.client()
    reason = await running.refusal(space=namespace(dtype="float16", layout="other"))
    assert "dtype is 'float16' and was 'float32'" in reason
    assert "layout" in reason
    assert "model" not in reason


async def test_the_ranks_of_one_engine_are_served(running: Running) -> None:
    await running.client(space=namespace(tp_size=2, tp_rank=0))
    await running.client(space=namespace(tp_size=2, tp_rank=1))


async def test_a_namespace_has_blocks_of_one_size(running: Running) -> None:
    await running.client()
    assert "block_bytes" in await running.refusal(engine_id="b", block_bytes=BLOCK_BYTES + 1)


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ({"protocol": 99}, "protocol 99"),
        ({"role": "guest"}, "role"),
        ({"engine_id": ""}, "engine id"),
        ({"block_bytes": 0}, "blocks of 0 bytes"),
        ({"block_bytes": 10**12}, "RADIXGATE_ARENA_BYTES"),
    ],
)
async def test_what_cannot_be_served_is_refused_with_its_reason(
    running: Running, how: dict[str, object], told: str
) -> None:
    assert told in await running.refusal(**how)


async def test_two_engines_that_save_the_same_block_share_one_copy(running: Running) -> None:
    first = await running.client(engine_id="a")
    second = await running.client(engine_id="b")
    kept = await asyncio.gather(first.save([1, 2, 3, 4]), second.save([1, 2, 3, 4]))
    assert [freed.num_kept for freed in kept] == [4, 4]
    assert len(running.parts.catalog) == 4
    staged = await first.look_up(hashes(4))
    assert [first.read(offset) for offset in staged.offsets] == [payload(n) for n in range(1, 5)]


async def test_what_an_engine_writes_later_does_not_change_what_was_saved(
    running: Running,
) -> None:
    client = await running.client()
    await client.save([1])
    client.ring[:] = 0xFF
    staged = await client.look_up(hashes(1))
    assert client.read(staged.offsets[0]) == payload(1)


async def test_a_payload_that_its_header_does_not_match_is_not_kept(running: Running) -> None:
    client = await running.client()
    client.write(0, header(1, namespace()), payload(2))
    await client.send(Put([0], [block_hash(1)]))
    assert (await client.receive(Freed)).num_kept == 0
    assert running.count(
        "radixgate_cache_operations_total", tier="ram", operation="save", result="corrupt"
    )
    assert running.parts.arena.slots.used_bytes == 0


async def test_a_block_cannot_be_saved_under_the_name_of_another(running: Running) -> None:
    client = await running.client()
    client.write(0, header(1, namespace()), payload(1))
    client.write(1, header(2, namespace(dtype="float16")), payload(2))
    await client.send(Put([0, 1], [block_hash(7), block_hash(2)]))
    assert (await client.receive(Freed)).num_kept == 0
    assert len(running.parts.catalog) == 0


@pytest.mark.parametrize("length", [0, 64 * 1024 + 1, 2**32 - 1])
async def test_a_header_length_that_cannot_be_is_not_believed(
    running: Running, length: int
) -> None:
    client = await running.client()
    client.ring[0, :4] = list(struct.pack("<I", length))
    await client.send(Put([0], [block_hash(1)]))
    assert (await client.receive(Freed)).num_kept == 0


_GOOD = pack(header(1, namespace()))


def with_field(place: int, value: object) -> bytes:
    """A header with one field changed, and its checksum made right again."""
    fields = msgspec.msgpack.decode(_GOOD[PREFIX_BYTES:])
    body = msgspec.msgpack.encode([*fields[:place], value, *fields[place + 1 :]])
    front = _GOOD[:8] + (PREFIX_BYTES + len(body)).to_bytes(4, "little")
    checksum = xxhash.xxh3_64(front)
    checksum.update(body)
    return front + checksum.intdigest().to_bytes(8, "little") + body


def nested(depth: int) -> list[object]:
    lists: list[object] = []
    for _ in range(depth):
        lists = [lists]
    return lists


@pytest.mark.parametrize(
    "packed",
    [
        pytest.param(with_field(4, nested(400)), id="extra keys 400 deep"),
        pytest.param(with_field(4, nested(900)), id="extra keys 900 deep"),
        pytest.param(with_field(4, [{"a": 1}]), id="a map for a key"),
        pytest.param(with_field(3, b""), id="no tokens"),
        pytest.param(with_field(3, bytes(4 * BLOCK_SIZE + 4)), id="too many tokens"),
        pytest.param(with_field(3, bytes(4 * BLOCK_SIZE - 1)), id="a part of a token"),
        pytest.param(with_field(5, "x" * (64 * 1024 - len(_GOOD) - 20)), id="no room for a MAC"),
        pytest.param(with_field(6, 99), id="an unknown codec"),
        pytest.param(with_field(7, -1), id="a negative length"),
        pytest.param(with_field(9, b"mac"), id="a MAC"),
    ],
)
async def test_a_header_that_no_engine_of_ours_sends_does_no_harm(
    serve: Serve, packed: bytes
) -> None:
    ssd = MemoryTier("ssd")
    async with serve(ssd) as running:
        liar = await running.client(engine_id="liar")
        liar.write_packed(0, packed, payload(1))
        await liar.send(Put([0], [block_hash(1)]))
        freed = await liar.receive(Freed)
        assert (freed.num_kept, len(running.parts.catalog)) in ((0, 0), (1, 1))
        assert (await liar.save([2])).num_kept == 1
        await running.parts.writer.drain()
        for block, _ in ssd.blocks.values():
            pack(block)


async def test_a_block_of_another_size_is_not_kept(running: Running) -> None:
    client = await running.client()
    client.write(0, header(1, namespace(), BLOCK_BYTES - 1), payload(1, BLOCK_BYTES - 1))
    await client.send(Put([0], [block_hash(1)]))
    assert (await client.receive(Freed)).num_kept == 0


@pytest.mark.parametrize(
    "lie",
    [
        Put([8], [block_hash(1)]),
        Put([-1], [block_hash(1)]),
        Put([0, 0], [block_hash(1), block_hash(2)]),
        Put([0], []),
        Put([], []),
        Put([0], [b""]),
        Put([0], [b"x" * 65]),
        Lookup("r", [block_hash(1)], 2, 4),
        Lookup("r", [block_hash(1)], -1, 4),
        Hello(1, "engine-1", "worker", namespace(), BLOCK_BYTES),
    ],
)
async def test_a_message_that_cannot_be_meant_closes_its_connection_only(
    running: Running, lie: Put | Lookup | Hello
) -> None:
    liar = await running.client(engine_id="liar")
    other = await running.client(engine_id="other")
    await liar.send(lie)
    assert await liar.receive_any() is None
    assert (await other.save([1])).num_kept == 1
    assert running.count("radixgate_cache_closed_connections_total", reason="malformed") == 1


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\xff\xff\xff",
        struct.pack("<I", 3) + b"\x00\x01\x02",
        struct.pack("<I", 0),
        frame(Welcome("t", 1, 1, 1, 1))[:-1] + b"\xff",  # type: ignore[arg-type]  # on purpose
    ],
)
async def test_garbage_closes_its_connection_only(running: Running, garbage: bytes) -> None:
    fresh = await raw_connection(running.path)
    known = await running.client()
    other = await running.client(engine_id="other")
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(fresh, garbage)
    await known.send_bytes(garbage)
    assert await loop.sock_recv(fresh, 100) == b""
    assert await known.receive_any() is None
    assert (await other.look_up(hashes(1))).num_blocks == 0
    fresh.close()


async def test_a_client_that_hangs_up_within_a_frame_is_gone_without_a_trace(
    running: Running,
) -> None:
    client = await running.client()
    await client.send_bytes(frame(Lookup("r", hashes(3), 0, 12))[:-5])
    client.close()
    await until(lambda: running.server.num_connections == 0)
    assert not running.count("radixgate_cache_closed_connections_total", reason="malformed")


async def test_blocks_that_were_written_but_not_announced_are_never_looked_at(
    running: Running,
) -> None:
    client = await running.client()
    client.write(0, header(1, namespace()), payload(1))
    client.close()
    other = await running.client(engine_id="other")
    assert (await other.look_up(hashes(1))).num_blocks == 0


async def test_blocks_that_were_announced_are_saved_although_their_engine_dies(
    running: Running,
) -> None:
    client = await running.client()
    for slot in range(8):
        client.write(slot, header(slot + 1, namespace()), payload(slot + 1))
    await client.send(Put(list(range(8)), hashes(8)))
    client.close()
    await until(lambda: len(running.parts.catalog) == 8)
    other = await running.client(engine_id="other")
    staged = await other.look_up(hashes(8))
    assert [other.read(offset) for offset in staged.offsets] == [payload(n) for n in range(1, 9)]


async def test_a_client_that_does_not_read_is_disconnected(running: Running) -> None:
    client = await running.client()
    await client.save(range(1, 101))
    request = frame(Lookup("r", hashes(100), 0, 400))
    sending = asyncio.create_task(_flood(client, request))
    await until(
        lambda: bool(running.count("radixgate_cache_closed_connections_total", reason="hung"))
    )
    await sending
    other = await running.client(engine_id="other")
    assert (await other.look_up(hashes(100))).num_blocks == 100


async def _flood(client: WireClient, request: bytes) -> None:
    try:
        while True:
            await client.send_bytes(request)
    except ConnectionError:
        return


async def test_a_full_arena_lets_what_is_unused_go_and_keeps_what_is_leased(
    serve: Serve,
) -> None:
    async with serve(num_slots=64) as running:
        client = await running.client()
        await client.save([1])
        staged = await client.look_up(hashes(1))
        await client.save(range(2, 300))
        assert running.count("radixgate_cache_evictions_total", tier="ram") > 200
        assert client.read(staged.offsets[0]) == payload(1)
        assert (await client.look_up(hashes(1))).offsets == staged.offsets


async def test_with_everything_leased_saves_are_dropped_and_go_on_once_it_is_returned(
    serve: Serve,
) -> None:
    async with serve(num_slots=64) as running:
        client = await running.client()
        await client.save(range(1, 65))
        staged = await client.look_up(hashes(64))
        assert staged.num_blocks == 64
        assert (await client.save([100])).num_kept == 0
        assert [client.read(offset) for offset in staged.offsets] == [
            payload(n) for n in range(1, 65)
        ]
        await client.release(staged.lease)
        assert (await client.save([100])).num_kept == 1


async def test_blocks_of_two_sizes_take_each_others_segments(serve: Serve) -> None:
    async with serve(num_slots=256) as running:
        small = await running.client(engine_id="small")
        large = await running.client(
            engine_id="large", space=namespace(num_layers=4), block_bytes=3 * BLOCK_BYTES
        )
        await small.save(range(1, 257))
        assert (await large.save(range(1, 11))).num_kept == 10
        staged = await large.look_up(hashes(10))
        assert [large.read(offset) for offset in staged.offsets] == [
            payload(n, 3 * BLOCK_BYTES) for n in range(1, staged.num_blocks + 1)
        ]
        assert staged.num_blocks > 0


async def test_leases_can_only_be_returned_by_their_engine(running: Running) -> None:
    owner = await running.client(engine_id="owner")
    other = await running.client(engine_id="other")
    await owner.save([1])
    staged = await owner.look_up(hashes(1))
    await other.release(staged.lease, 10**9, -1)
    await other.look_up([])
    assert running.parts.leases.num_held == 1
    await owner.release(staged.lease, staged.lease)
    await owner.look_up([])
    assert running.parts.leases.num_held == 0


async def test_a_lease_outlives_its_connection_while_its_engine_lives(running: Running) -> None:
    client = await running.client()
    await client.save([1])
    staged = await client.look_up(hashes(1))
    client.close()
    await until(lambda: running.parts.leases.num_quarantined == 1)
    running.server.sweep()  # the engine is this process
    assert running.parts.leases.num_quarantined == 1
    again = await running.client()
    await again.release(staged.lease)
    await again.look_up([])
    assert running.parts.leases.num_quarantined == 0


async def test_an_engine_that_reconnects_again_and_again_takes_nothing_each_time(
    running: Running,
) -> None:
    await running.client()
    for _ in range(20):
        client = await running.client()
        await client.save([1])
        client.close()
    await until(lambda: running.server.num_connections == 1)
    running.server.sweep()
    assert num_pidfds() == 1


def num_pidfds() -> int:
    links = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return links.count("anon_inode:[pidfd]")


async def test_an_overdue_lease_is_quarantined_and_its_memory_not_used_again(
    serve: Serve, clock: Clock
) -> None:
    async with serve(num_slots=64, lease_ttl_s=10) as running:
        client = await running.client()
        await client.save([1])
        staged = await client.look_up(hashes(1))
        clock.now += 11
        running.server.sweep()
        assert (running.parts.leases.num_held, running.parts.leases.num_quarantined) == (0, 1)
        await client.save(range(2, 200))
        assert client.read(staged.offsets[0]) == payload(1)


async def test_forgotten_blocks_are_found_no_more_and_their_memory_stays_while_leased(
    serve: Serve,
) -> None:
    async with serve(num_slots=64) as running:
        client = await running.client()
        await client.save([1, 2])
        staged = await client.look_up(hashes(2))
        await client.forget(1)
        assert (await client.look_up(hashes(2))).num_blocks == 0
        await client.save(range(10, 200))
        assert client.read(staged.offsets[0]) == payload(1)
        await client.release(staged.lease)
        await client.save(range(200, 300))
        assert running.parts.arena.slots.used_bytes <= running.parts.arena.num_bytes


async def test_a_restarted_server_has_another_boot_token_and_no_blocks(serve: Serve) -> None:
    async with serve() as running:
        client = await running.client()
        await client.save([1])
        first = client.welcome.boot_token
    async with serve() as running:
        client = await running.client()
        staged = await client.look_up(hashes(1))
        assert staged.num_blocks == 0
        assert staged.boot_token == client.welcome.boot_token != first


async def test_every_reply_carries_the_boot_token(running: Running) -> None:
    client = await running.client()
    token = running.parts.boot_token
    assert client.welcome.boot_token == token
    assert (await client.save([1])).boot_token == token
    assert (await client.look_up(hashes(1))).boot_token == token


async def test_a_request_costs_few_control_bytes(running: Running) -> None:
    num_blocks = 256
    client = await running.client()
    await client.save(range(1, num_blocks + 1))
    client.num_sent_bytes = client.num_received_bytes = 0
    staged = await client.look_up(hashes(num_blocks), request_id="chatcmpl-" + "0" * 32)
    await client.release(staged.lease)
    assert staged.num_blocks == num_blocks
    control_bytes = client.num_sent_bytes + client.num_received_bytes
    assert control_bytes <= 4096 + 128 * num_blocks


async def test_a_worker_gets_no_larger_ring_than_is_configured(serve: Serve) -> None:
    async with serve(write_ring_bytes=1024 * 1024) as running:
        client = await running.client(ring_slots=10**9)
        assert 1 <= client.welcome.ring_slots <= 1024 * 1024 // client.welcome.ring_slot_bytes


async def test_an_arena_takes_memory_only_as_it_fills(serve: Serve) -> None:
    async with serve(num_slots=10 * 1024 * 1024) as running:
        client = await running.client()
        await client.save([1, 2, 3])
        assert client.welcome.arena_bytes > 100 * 1024**3
        assert os.fstat(client.arena_fd).st_blocks * 512 < 1024 * 1024


async def test_clearing_keeps_the_memory_of_what_is_leased(running: Running) -> None:
    client = await running.client()
    await client.save([1, 2])
    staged = await client.look_up(hashes(2))
    operator = WireClient(await raw_connection(running.path), client.hello)
    assert await operator.ask(ClearBlocks(["ram"])) == Changed(2)
    operator.close()
    assert (await client.look_up(hashes(2))).num_blocks == 0
    await client.save(range(10, 100))
    assert [client.read(offset) for offset in staged.offsets] == [payload(1), payload(2)]
    assert isinstance(staged, Staged)
