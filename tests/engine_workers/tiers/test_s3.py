from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import obstore
import pytest
from obstore.store import S3Store

from cache_router.errors import BlockCorruptError, BlockLostError, ConfigurationError, TierError
from engine_workers.blocks.block_name import BlockName
from engine_workers.blocks.sealing import AesSeal, MacSeal, OpenSeal, Seal
from engine_workers.tiers.s3 import MULTIPART_BYTES, S3Tier
from engine_workers.tiers.s3_client import (
    S3Credentials,
    S3Options,
    configured_credentials,
    connect,
)
from engine_workers.tiers.tier import Tier
from tests.engine_workers.blocks.made_blocks import NAMESPACE, block_of, name_of
from tests.engine_workers.tiers.s3_server import CREDENTIALS, S3Server
from tests.engine_workers.tiers.tier_contract import TierContract, header_list, load, store

SEALS: list[Seal] = [OpenSeal(), AesSeal(b"k" * 32)]


@pytest.fixture(scope="module")
def running() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.stop()


@pytest.fixture
def server(running: S3Server) -> S3Server:
    client = connect(running.options())
    for page in obstore.list(client):
        obstore.delete(client, [found["path"] for found in page])
    return running


@pytest.fixture
def client(server: S3Server) -> S3Store:
    return connect(server.options())


@pytest.fixture
async def tier(server: S3Server) -> AsyncIterator[Tier]:
    tier = S3Tier(server.options(), OpenSeal())
    yield tier
    await tier.close()


@pytest.fixture
async def other_node(server: S3Server) -> AsyncIterator[Tier]:
    tier = S3Tier(server.options(), OpenSeal())
    yield tier
    await tier.close()


def key_of(name: BlockName, seal: Seal | None = None) -> str:
    seal = seal or OpenSeal()
    label = seal.label(name)
    return f"{seal.scope}/{name.namespace.hex()}/{label[:2]}/{label}"


class S3Objects:
    def __init__(self, client: S3Store, seal: Seal) -> None:
        self._client = client
        self._seal = seal

    async def read(self, name: BlockName) -> bytes:
        return bytes(obstore.get(self._client, key_of(name, self._seal)).bytes())

    async def write(self, name: BlockName, record: bytes) -> None:
        obstore.put(self._client, key_of(name, self._seal), record)


@pytest.mark.parametrize("seal", SEALS, ids=lambda seal: seal.scope[:4])
class TestS3Tier(TierContract):
    @pytest.fixture
    async def tier(self, server: S3Server, seal: Seal) -> AsyncIterator[Tier]:
        tier = S3Tier(server.options(), seal)
        yield tier
        await tier.close()

    @pytest.fixture
    def raw(self, client: S3Store, seal: Seal) -> S3Objects:
        return S3Objects(client, seal)


async def test_another_node_finds_what_was_stored(tier: Tier, other_node: Tier) -> None:
    header, payload = await store(tier, 1)
    assert await other_node.contains([header.name]) == [True]
    assert await load(other_node, header.name, len(payload)) == (header, payload)
    assert await header_list(other_node) == [header]


async def test_a_block_of_many_parts_comes_back(tier: Tier) -> None:
    num_bytes = 2 * MULTIPART_BYTES + 7
    block = await store(tier, 1, num_bytes)
    assert await load(tier, name_of(1), num_bytes) == block


async def test_a_namespace_is_one_listing(tier: Tier, client: S3Store) -> None:
    for number in (1, 2, 3):
        await store(tier, number)
    found = [
        item["path"] for page in obstore.list(client, f"open/{NAMESPACE.hex()}") for item in page
    ]
    assert sorted(found) == [key_of(name_of(number)) for number in (1, 2, 3)]


async def test_an_object_that_is_longer_than_the_block_is_not_fetched(
    tier: Tier, client: S3Store
) -> None:
    obstore.put(client, key_of(name_of(1)), bytes(200_000))
    with pytest.raises(BlockCorruptError, match="too long"):
        await load(tier, name_of(1), 4096)
    assert await tier.contains([name_of(1)]) == [False]


async def test_a_block_that_the_store_expired_is_not_told_of(tier: Tier, client: S3Store) -> None:
    await store(tier, 1)
    kept, _ = await store(tier, 2)
    obstore.delete(client, key_of(name_of(1)))
    assert await header_list(tier) == [kept]


async def test_a_node_with_another_key_neither_finds_nor_deletes(server: S3Server) -> None:
    ours = S3Tier(server.options(), MacSeal(b"k" * 32))
    theirs = S3Tier(server.options(), MacSeal(b"g" * 32))
    header, payload = await store(ours, 1)
    with pytest.raises(BlockLostError):
        await load(theirs, header.name, len(payload))
    assert await load(ours, header.name, len(payload)) == (header, payload)
    await ours.close()
    await theirs.close()


async def assert_cannot_be_asked(options: S3Options, match: str) -> TierError:
    tier = S3Tier(options, OpenSeal())
    header, payload = block_of(1)
    for call in (
        tier.contains([header.name]),
        load(tier, header.name, len(payload)),
        tier.store(header, memoryview(payload)),
        tier.remove([header.name]),
    ):
        with pytest.raises(TierError, match=match) as caught:
            await call
    await tier.close()
    return caught.value


async def test_a_store_that_is_not_there_cannot_be_asked() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    await assert_cannot_be_asked(
        S3Options("b", endpoint=f"http://127.0.0.1:{port}", credentials=CREDENTIALS, timeout_s=1.0),
        "HTTP error",
    )


async def test_wrong_credentials_are_told_without_showing_them(server: S3Server) -> None:
    for wrong in (
        S3Credentials(CREDENTIALS.access_key_id, "not-the-secret"),
        S3Credentials("nobodys-key", "not-the-secret"),
    ):
        options = server.options(credentials=wrong)
        error = await assert_cannot_be_asked(options, "403 Forbidden")
        assert "not-the-secret" not in f"{error}{options!r}"
        assert wrong.access_key_id not in f"{error}{options!r}"


async def test_a_store_that_hangs_costs_the_time_limit_and_is_used_again(
    tier: Tier, server: S3Server
) -> None:
    block = await store(tier, 1)
    impatient = S3Tier(server.options(timeout_s=0.4), OpenSeal())
    server.process.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(TierError):
            await load(impatient, name_of(1), 4096)
        with pytest.raises(TierError):
            await impatient.contains([name_of(1)])
    finally:
        server.process.send_signal(signal.SIGCONT)
    assert await load(tier, name_of(1), 4096) == block
    await impatient.close()


async def test_what_does_not_speak_s3_cannot_be_asked() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"SSH-2.0-something\r\n")
        writer.close()

    listener = await asyncio.start_server(answer, "127.0.0.1", 0)
    endpoint = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    options = S3Options("b", endpoint=endpoint, credentials=CREDENTIALS, timeout_s=1.0)
    await assert_cannot_be_asked(options, "HTTP error")
    listener.close()
    await listener.wait_closed()


STORE_AND_EXIT = """
import asyncio, sys
from engine_workers.blocks.sealing import OpenSeal
from engine_workers.tiers.s3 import S3Tier
from engine_workers.tiers.s3_client import S3Options
from tests.engine_workers.blocks.made_blocks import name_of
from tests.engine_workers.tiers.s3_server import BUCKET, CREDENTIALS
from tests.engine_workers.tiers.tier_contract import load, store

async def main():
    tier = S3Tier(S3Options(BUCKET, endpoint=sys.argv[1], credentials=CREDENTIALS), OpenSeal())
    await store(tier, 1)
    await tier.contains([name_of(number) for number in range(40)])
    await load(tier, name_of(1), 4096)

asyncio.run(main())
"""


def test_a_process_may_exit_right_after_its_last_request(server: S3Server) -> None:
    for _ in range(4):
        command = [sys.executable, "-c", STORE_AND_EXIT, server.endpoint]
        child = subprocess.run(command, capture_output=True, timeout=60, check=False)
        assert (child.returncode, child.stderr) == (0, b"")


def test_credentials_come_from_a_file_if_there_is_one(tmp_path: Path) -> None:
    file = tmp_path / "credentials"
    file.write_text("[default]\naws_access_key_id = a\naws_secret_access_key = b%c\n")
    assert configured_credentials("x", "y", file) == S3Credentials("a", "b%c")
    file.write_text(file.read_text() + "aws_session_token = t\n")
    assert configured_credentials(None, None, file) == S3Credentials("a", "b%c", "t")
    assert configured_credentials("x", "y", None) == S3Credentials("x", "y")
    assert configured_credentials(None, None, None) is None


@pytest.mark.parametrize("text", ["", "secret-word", "[default]\naws_access_key_id = secret-word"])
def test_a_credentials_file_that_cannot_be_used_is_named_and_not_shown(
    tmp_path: Path, text: str
) -> None:
    file = tmp_path / "credentials"
    file.write_text(text)
    with pytest.raises(ConfigurationError, match="RADIXGATE_S3_CREDENTIALS_FILE") as caught:
        configured_credentials(None, None, file)
    assert "secret-word" not in str(caught.value)
    with pytest.raises(ConfigurationError, match="RADIXGATE_S3_CREDENTIALS_FILE"):
        configured_credentials(None, None, tmp_path / "missing")


def test_a_key_without_its_secret_is_refused() -> None:
    for key, secret in (("a", None), (None, "b")):
        with pytest.raises(ConfigurationError, match="RADIXGATE_S3_ACCESS_KEY_ID"):
            configured_credentials(key, secret, None)


def test_an_endpoint_that_is_no_url_is_refused(server: S3Server) -> None:
    for endpoint in ("not a url", "ftp://host", ""):
        with pytest.raises(ConfigurationError, match="RADIXGATE_S3_ENDPOINT"):
            connect(replace(server.options(), endpoint=endpoint))
