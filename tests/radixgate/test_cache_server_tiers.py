from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_workers.cache_wire import Refused
from tests.engine_workers.cache_server.wire_client import WireClient, hashes, payload
from tests.engine_workers.tiers.s3_server import BUCKET, CREDENTIALS, S3Server
from tests.engine_workers.tiers.valkey_server import ValkeyServer
from tests.radixgate.conftest import Start
from tests.radixgate.test_cache_server import started


@pytest.fixture
def valkey() -> Iterator[ValkeyServer]:
    server = ValkeyServer("--maxmemory", "256mb", "--maxmemory-policy", "allkeys-lru")
    yield server
    server.stop()


@pytest.fixture
def s3() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.stop()


async def node(start: Start, folder: Path, name: str, **variables: str) -> WireClient:
    """Start a node's server and connect to it."""
    path = folder / f"{name}.sock"
    started(start, path, folder / name, **variables)
    client = await WireClient.connect(path)
    assert not isinstance(client, Refused)
    return client


async def saved_on_all_tiers(start: Start, folder: Path, name: str) -> None:
    """Wait until nothing is queued any more."""
    while True:
        process = start("cache", "stats", "--json", "--cache-socket", str(folder / f"{name}.sock"))
        printed, _ = process.communicate()
        if printed.count('"waiting_bytes":0') == printed.count('"waiting_bytes"'):
            return


async def test_another_node_loads_what_one_node_saved(
    start: Start, tmp_path: Path, valkey: ValkeyServer
) -> None:
    shared = {"RADIXGATE_TIERS": "ram,ssd,redis", "RADIXGATE_REDIS_URL": valkey.url}
    first = await node(start, tmp_path, "first", **shared)
    second = await node(start, tmp_path, "second", **shared)
    await first.save(range(1, 31))
    await saved_on_all_tiers(start, tmp_path, "first")
    staged = await second.look_up(hashes(30))
    assert staged.sources == ["redis"] * 30
    assert [second.read(offset) for offset in staged.offsets] == [payload(n) for n in range(1, 31)]
    first.close()
    second.close()


async def test_another_node_loads_what_lies_in_s3(
    start: Start, tmp_path: Path, s3: S3Server
) -> None:
    shared = {
        "RADIXGATE_TIERS": "ram,s3",
        "RADIXGATE_S3_BUCKET": BUCKET,
        "RADIXGATE_S3_ENDPOINT": s3.endpoint,
        "RADIXGATE_S3_ACCESS_KEY_ID": CREDENTIALS.access_key_id,
        "RADIXGATE_S3_SECRET_ACCESS_KEY": CREDENTIALS.secret_access_key,
        "RADIXGATE_LOOKUP_DEADLINE_S": "5",
        "RADIXGATE_STAGE_DEADLINE_S": "10",
    }
    first = await node(start, tmp_path, "first", **shared)
    second = await node(start, tmp_path, "second", **shared)
    await first.save(range(1, 11))
    await saved_on_all_tiers(start, tmp_path, "first")
    staged = await second.look_up(hashes(10))
    assert staged.sources == ["s3"] * 10
    assert [second.read(offset) for offset in staged.offsets] == [payload(n) for n in range(1, 11)]
    first.close()
    second.close()


async def test_a_shared_tier_that_dies_costs_nothing_but_its_blocks(
    start: Start, tmp_path: Path, valkey: ValkeyServer
) -> None:
    shared = {"RADIXGATE_TIERS": "ram,redis", "RADIXGATE_REDIS_URL": valkey.url}
    client = await node(start, tmp_path, "one", **shared)
    await client.save(range(1, 6))
    valkey.kill()
    assert (await client.look_up(hashes(10))).num_blocks == 5
    assert (await client.save(range(6, 11))).num_kept == 5
    valkey.restart()
    assert (await client.look_up(hashes(10))).num_blocks == 10
    client.close()


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"RADIXGATE_TIERS": "ram,redis"}, "RADIXGATE_REDIS_URL"),
        ({"RADIXGATE_TIERS": "ram,s3"}, "RADIXGATE_S3_BUCKET"),
        (
            {
                "RADIXGATE_TIERS": "ram,redis",
                "RADIXGATE_REDIS_URL": "redis://127.0.0.1:1",
                "RADIXGATE_TIER_ENCRYPT": "true",
            },
            "RADIXGATE_TIER_ENCRYPT",
        ),
        ({"RADIXGATE_SSD_FOLDER": "/proc/none"}, "RADIXGATE_SSD_FOLDER"),
    ],
)
def test_a_tier_that_cannot_work_is_one_line(
    start: Start, tmp_path: Path, variables: dict[str, str], told: str
) -> None:
    process = start("cache-server", "--cache-socket", str(tmp_path / "s"), **variables)
    _, errors = process.communicate()
    assert process.returncode == 2
    assert errors.startswith(f"radixgate: {told}")
    assert errors.count("\n") == 1
