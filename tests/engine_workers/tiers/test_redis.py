from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from cache_router.errors import BlockCorruptError, BlockLostError, ConfigurationError, TierError
from engine_workers.blocks.block_name import BlockName
from engine_workers.blocks.sealing import AesSeal, MacSeal, OpenSeal, Seal
from engine_workers.ports import any_free_ports
from engine_workers.tiers.redis import RedisTier
from engine_workers.tiers.redis_client import RedisOptions, configured_url
from engine_workers.tiers.redis_records import MANIFEST_BYTES, PART_BYTES, key_of
from engine_workers.tiers.tier import Tier
from tests.engine_workers.blocks.made_blocks import block_of, name_of
from tests.engine_workers.tiers.tier_contract import TierContract, header_list, load, store
from tests.engine_workers.tiers.valkey_server import ValkeyServer

SEALS: list[Seal] = [OpenSeal(), MacSeal(b"k" * 32), AesSeal(b"k" * 32)]
LARGE_BYTES = 2 * PART_BYTES + 1000


@pytest.fixture(scope="module")
def running() -> Iterator[ValkeyServer]:
    server = ValkeyServer()
    yield server
    server.stop()


@pytest.fixture
def valkey(running: ValkeyServer) -> ValkeyServer:
    running.client.flushall()
    return running


def tier_of(server: ValkeyServer, seal: Seal | None = None, timeout_s: float = 10.0) -> RedisTier:
    return RedisTier(RedisOptions(server.url, timeout_s=timeout_s), seal or OpenSeal())


async def store_many(tier: Tier) -> None:
    for number in range(20):
        await store(tier, number, 500_000)


def keys_in(server: ValkeyServer) -> set[bytes]:
    return set(server.client.scan_iter())


@pytest.fixture
async def tier(valkey: ValkeyServer) -> AsyncIterator[Tier]:
    tier = tier_of(valkey)
    yield tier
    await tier.close()


@pytest.fixture
async def other_node(valkey: ValkeyServer) -> AsyncIterator[Tier]:
    tier = tier_of(valkey)
    yield tier
    await tier.close()


class RedisStrings:
    """First strings in the server, without their manifests."""

    def __init__(self, server: ValkeyServer, seal: Seal) -> None:
        self._client = server.client
        self._seal = seal
        self._manifests: dict[BlockName, bytes] = {}

    async def read(self, name: BlockName) -> bytes:
        first: bytes = self._client.get(key_of(self._seal, name))  # type: ignore[assignment]
        self._manifests[name] = first[:MANIFEST_BYTES]
        return first[MANIFEST_BYTES:]

    async def write(self, name: BlockName, record: bytes) -> None:
        self._client.set(key_of(self._seal, name), self._manifests[name] + record)


@pytest.mark.parametrize("seal", SEALS, ids=lambda seal: seal.scope[:4])
class TestRedisTier(TierContract):
    @pytest.fixture
    async def tier(self, valkey: ValkeyServer, seal: Seal) -> AsyncIterator[Tier]:
        tier = tier_of(valkey, seal)
        yield tier
        await tier.close()

    @pytest.fixture
    def raw(self, valkey: ValkeyServer, seal: Seal) -> RedisStrings:
        return RedisStrings(valkey, seal)


async def test_another_node_finds_what_was_stored(tier: Tier, other_node: Tier) -> None:
    header, payload = await store(tier, 1)
    assert await other_node.contains([header.name]) == [True]
    assert await header_list(other_node) == []
    assert await load(other_node, header.name, len(payload)) == (header, payload)
    assert await header_list(other_node) == [header]


async def test_another_nodes_block_is_left_as_it_is(
    tier: Tier, other_node: Tier, valkey: ValkeyServer
) -> None:
    header, _ = await store(tier, 1, LARGE_BYTES)
    keys = keys_in(valkey)
    await store(other_node, 1, LARGE_BYTES)
    assert keys_in(valkey) == keys
    assert await header_list(other_node) == [header]


async def test_two_nodes_store_the_same_large_block_at_once_and_leave_no_scraps(
    tier: Tier, other_node: Tier, valkey: ValkeyServer
) -> None:
    header, payload = block_of(1, LARGE_BYTES)
    await asyncio.gather(*(node.store(header, memoryview(payload)) for node in (tier, other_node)))
    assert len(keys_in(valkey)) == 3
    assert await load(tier, header.name, LARGE_BYTES) == (header, payload)


async def test_a_large_block_is_cut_and_removed_with_all_its_parts(
    tier: Tier, valkey: ValkeyServer
) -> None:
    header, _ = await store(tier, 1, LARGE_BYTES)
    sizes = [valkey.client.strlen(key) for key in keys_in(valkey)]
    assert len(sizes) == 3
    assert max(sizes) <= PART_BYTES + MANIFEST_BYTES
    await tier.remove([header.name])
    assert not keys_in(valkey)


async def test_a_large_block_whose_part_was_evicted_is_lost(
    tier: Tier, valkey: ValkeyServer
) -> None:
    header, payload = await store(tier, 1, LARGE_BYTES)
    part = next(key for key in keys_in(valkey) if not key.endswith(b"}"))
    valkey.client.delete(part)
    with pytest.raises(BlockLostError):
        await load(tier, header.name, len(payload))
    assert await tier.contains([header.name]) == [False]


async def test_a_block_that_the_server_evicted_is_not_told_of(
    tier: Tier, valkey: ValkeyServer
) -> None:
    await store(tier, 1)
    kept, _ = await store(tier, 2)
    valkey.client.delete(key_of(OpenSeal(), name_of(1)))
    assert await header_list(tier) == [kept]
    assert tier.usage().num_blocks == 1


async def test_blocks_expire(tier: Tier, valkey: ValkeyServer) -> None:
    await store(tier, 1, LARGE_BYTES)
    first = key_of(OpenSeal(), name_of(1)).encode()
    lives = {key == first: valkey.client.ttl(key) for key in keys_in(valkey)}
    assert 0 < lives[True] <= 7 * 24 * 3600 < lives[False]


async def test_something_else_under_a_blocks_name_is_lost_and_deleted(
    tier: Tier, valkey: ValkeyServer
) -> None:
    valkey.client.rpush(key_of(OpenSeal(), name_of(1)), "x")
    with pytest.raises(BlockCorruptError, match="not a string"):
        await load(tier, name_of(1), 4096)
    assert await tier.contains([name_of(1)]) == [False]


async def test_a_manifest_cannot_make_us_fetch_more_than_the_block_is_long(
    tier: Tier, valkey: ValkeyServer
) -> None:
    await store(tier, 1)
    key = key_of(OpenSeal(), name_of(1))
    first: bytes = valkey.client.get(key)  # type: ignore[assignment]
    for num_parts in (1, 100, 60_000):
        forged = first[:6] + num_parts.to_bytes(2, "little") + first[8:]
        valkey.client.set(key, forged)
        with pytest.raises(BlockCorruptError):
            await load(tier, name_of(1), 4096)


async def test_a_node_with_another_key_neither_finds_nor_deletes(valkey: ValkeyServer) -> None:
    ours, theirs = tier_of(valkey, MacSeal(b"k" * 32)), tier_of(valkey, MacSeal(b"g" * 32))
    header, payload = await store(ours, 1)
    assert await theirs.contains([header.name]) == [False]
    with pytest.raises(BlockLostError):
        await load(theirs, header.name, len(payload))
    assert await load(ours, header.name, len(payload)) == (header, payload)
    await ours.close()
    await theirs.close()


async def test_a_server_that_is_not_there_cannot_be_asked(tmp_path: Path) -> None:
    tier = RedisTier(RedisOptions(f"unix://{tmp_path}/none", timeout_s=1.0), OpenSeal())
    header, payload = block_of(1)
    for call in (
        tier.contains([header.name]),
        load(tier, header.name, len(payload)),
        tier.store(header, memoryview(payload)),
        tier.remove([header.name]),
    ):
        with pytest.raises(TierError):
            await call
    await tier.close()


async def test_what_does_not_speak_redis_cannot_be_asked() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"SSH-2.0-something\r\n" * 100)
        writer.close()

    listener = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    tier = RedisTier(RedisOptions(f"redis://127.0.0.1:{port}", timeout_s=2.0), OpenSeal())
    with pytest.raises(TierError):
        await tier.contains([name_of(1)])
    with pytest.raises(TierError):
        await load(tier, name_of(1), 4096)
    await tier.close()
    listener.close()
    await listener.wait_closed()


async def test_a_server_that_died_is_told_and_used_again_when_it_is_back() -> None:
    server = ValkeyServer()
    tier = tier_of(server)
    block = await store(tier, 1)
    server.kill()
    with pytest.raises(TierError):
        await load(tier, name_of(1), 4096)
    with pytest.raises(TierError):
        await store(tier, 2)
    server.restart()
    assert await tier.contains([name_of(1)]) == [False]
    assert await store(tier, 1) == block
    assert await load(tier, name_of(1), 4096) == block
    await tier.close()
    server.stop()


async def test_a_server_that_hangs_costs_the_time_limit_and_is_used_again(
    tier: Tier, valkey: ValkeyServer
) -> None:
    block = await store(tier, 1)
    impatient = tier_of(valkey, timeout_s=0.2)
    valkey.process.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(TierError, match=r"no answer|Timeout"):
            await load(impatient, name_of(1), 4096)
        with pytest.raises(TierError, match=r"no answer|Timeout"):
            await impatient.contains([name_of(1)])
    finally:
        valkey.process.send_signal(signal.SIGCONT)
    assert await load(tier, name_of(1), 4096) == block
    await impatient.close()


async def test_a_server_that_is_slow_is_waited_for_within_the_time_limit(
    tier: Tier, valkey: ValkeyServer
) -> None:
    block = await store(tier, 1)
    valkey.client.client_pause(200)
    assert await load(tier, name_of(1), 4096) == block


async def test_wrong_credentials_are_told_without_showing_them(
    valkey: ValkeyServer, caplog: pytest.LogCaptureFixture
) -> None:
    options = RedisOptions(f"unix://user@{valkey.socket}?password=secret-word")
    tier = RedisTier(options, OpenSeal())
    with pytest.raises(TierError, match="username-password") as caught:
        await tier.contains([name_of(1)])
    assert "secret-word" not in f"{caught.value!r} {options!r} {caplog.text}"
    await tier.close()


async def test_a_full_server_that_evicts_nothing_is_told_and_warned_of_once(
    valkey: ValkeyServer, caplog: pytest.LogCaptureFixture
) -> None:
    used: int = valkey.client.info("memory")["used_memory"]
    valkey.client.config_set("maxmemory", used + 3_000_000)
    tier = tier_of(valkey)
    try:
        with caplog.at_level(logging.WARNING), pytest.raises(TierError, match="full"):
            await store_many(tier)
        assert caplog.text.count("noeviction") == 1
        header, payload = block_of(0, 500_000)
        assert await load(tier, header.name, len(payload)) == (header, payload)
    finally:
        valkey.client.config_set("maxmemory", 0)
    await tier.close()


async def test_a_server_that_evicts_makes_room(valkey: ValkeyServer) -> None:
    used: int = valkey.client.info("memory")["used_memory"]
    valkey.client.config_set("maxmemory-policy", "allkeys-lru")
    valkey.client.config_set("maxmemory", used + 5_000_000)
    tier = tier_of(valkey)
    try:
        await store_many(tier)
        headers = await header_list(tier)
        assert 0 < len(headers) == tier.usage().num_blocks < 20
    finally:
        valkey.client.config_set("maxmemory", 0)
        valkey.client.config_set("maxmemory-policy", "noeviction")
    await tier.close()


async def test_a_cluster_keeps_a_blocks_parts_together() -> None:
    port, bus_port = any_free_ports(2)
    server = ValkeyServer(
        *("--port", str(port), "--bind", "127.0.0.1", "--cluster-port", str(bus_port)),
        *("--cluster-enabled", "yes", "--cluster-announce-ip", "127.0.0.1"),
    )
    server.client.cluster("ADDSLOTSRANGE", 0, 16383)
    for _ in range(2000):
        if server.client.cluster("INFO")["cluster_state"] == "ok":
            break
        await asyncio.sleep(0.01)
    tier = RedisTier(RedisOptions(f"redis://127.0.0.1:{port}", cluster=True), OpenSeal())
    try:
        header, payload = await store(tier, 1, LARGE_BYTES)
        small = await store(tier, 5)
        assert len({server.client.cluster("KEYSLOT", key) for key in keys_in(server)}) == 2
        assert await tier.contains([name_of(1), name_of(2), name_of(5)]) == [True, False, True]
        assert await load(tier, header.name, LARGE_BYTES) == (header, payload)
        assert await load(tier, name_of(5), 4096) == small
        await tier.remove([name_of(1), name_of(2), name_of(5)])
        assert not keys_in(server)
    finally:
        await tier.close()
        server.stop()


def test_the_url_comes_from_its_file_if_there_is_one(tmp_path: Path) -> None:
    file = tmp_path / "url"
    file.write_text("redis://user:word@host/1\n")
    assert configured_url("redis://other", file) == "redis://user:word@host/1"
    assert configured_url("redis://other", None) == "redis://other"
    with pytest.raises(ConfigurationError, match="REDIS_URL_FILE"):
        configured_url(None, tmp_path / "missing")
    with pytest.raises(ConfigurationError, match="REDIS_URL"):
        configured_url(None, None)


@pytest.mark.parametrize("url", ["", "http://word@host", "redis://host:port", "redis://h?db=word"])
def test_what_is_no_url_of_redis_is_refused_without_showing_it(url: str) -> None:
    for cluster in (False, True):
        with pytest.raises(ConfigurationError, match="RADIXGATE_REDIS_URL: is no") as caught:
            RedisTier(RedisOptions(url, cluster), OpenSeal())
        assert "word" not in str(caught.value)
