from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from engine_workers.cache_wire import Refused
from engine_workers.ports import any_free_ports
from tests.engine_workers.cache_server.wire_client import WireClient, hashes, payload
from tests.radixgate.conftest import Start

ENGINE = """
import asyncio, sys
from pathlib import Path
from tests.engine_workers.cache_server.wire_client import WireClient, hashes

async def main():
    client = await WireClient.connect(Path(sys.argv[1]), engine_id="dying")
    await client.save([1])
    staged = await client.look_up(hashes(1))
    print(staged.num_blocks, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache.sock"


@pytest.fixture
def server(start: Start, path: Path, tmp_path: Path) -> subprocess.Popen[str]:
    return started(start, path, tmp_path)


def started(start: Start, path: Path, folder: Path, **variables: str) -> subprocess.Popen[str]:
    process = start(
        "cache-server",
        "--arena-gib",
        "0.25",
        RADIXGATE_CACHE_SOCKET=str(path),
        RADIXGATE_SSD_FOLDER=str(folder / "ssd"),
        **variables,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == f"listening on {path}\n"
    return process


async def connected(path: Path) -> WireClient:
    client = await WireClient.connect(path)
    assert not isinstance(client, Refused)
    return client


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_cleanly(
    server: subprocess.Popen[str], path: Path, number: signal.Signals
) -> None:
    server.send_signal(number)
    _, errors = server.communicate()
    assert (server.returncode, errors) == (0, "")
    assert not path.exists()


async def test_a_signal_ends_it_with_an_engine_connected(
    server: subprocess.Popen[str], path: Path
) -> None:
    client = await connected(path)
    server.terminate()
    assert await client.receive_any() is None
    assert server.wait() == 0
    client.close()


async def test_blocks_on_the_ssd_outlive_the_server(
    start: Start, path: Path, tmp_path: Path
) -> None:
    first = started(start, path, tmp_path)
    client = await connected(path)
    await client.save(range(1, 31))
    first.terminate()
    assert first.wait() == 0
    client.close()
    started(start, path, tmp_path)
    client = await connected(path)
    staged = await client.look_up(hashes(30))
    assert staged.sources == ["ssd"] * 30
    assert [client.read(offset) for offset in staged.offsets] == [payload(n) for n in range(1, 31)]
    client.close()


async def test_what_was_mapped_stays_readable_when_the_server_is_killed_and_restarted(
    start: Start, path: Path, tmp_path: Path
) -> None:
    first = started(start, path, tmp_path)
    old = await connected(path)
    await old.save([1])
    staged = await old.look_up(hashes(1))
    first.kill()
    assert await old.receive_any() is None
    started(start, path, tmp_path)
    new = await connected(path)
    assert old.read(staged.offsets[0]) == payload(1)
    assert new.welcome.boot_token != old.welcome.boot_token
    old.close()
    new.close()


def second_fails(start: Start, path: Path, tmp_path: Path) -> str:
    second = start("cache-server", "--cache-socket", str(path), "--tiers", "ram")
    _, errors = second.communicate()
    assert second.returncode == 2
    assert errors.count("\n") == 1
    return errors


def test_the_socket_of_a_living_server_is_not_taken(
    server: subprocess.Popen[str], start: Start, path: Path, tmp_path: Path
) -> None:
    assert "another cache server serves" in second_fails(start, path, tmp_path)
    assert path.is_socket()


def test_the_socket_of_a_server_that_hangs_is_not_taken(
    server: subprocess.Popen[str], start: Start, path: Path, tmp_path: Path
) -> None:
    server.send_signal(signal.SIGSTOP)
    assert "another cache server serves" in second_fails(start, path, tmp_path)


def test_a_file_that_is_no_socket_is_left_alone(start: Start, path: Path, tmp_path: Path) -> None:
    path.write_text("mine")
    assert "is no socket" in second_fails(start, path, tmp_path)
    assert path.read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--tiers", "ram,tape"], "RADIXGATE_TIERS: there is no tier 'tape'"),
        (["--tiers", "ssd"], "RADIXGATE_TIERS: begin with ram"),
        (["--tiers", "ram,ssd,ssd"], "RADIXGATE_TIERS: name each tier once"),
        (["--arena-gib", "inf"], "--arena-gib"),
        (["--cache-socket", "/proc/none/cache.sock"], "RADIXGATE_CACHE_SOCKET"),
        (["--cache-socket", "/tmp/" + "x" * 108], "RADIXGATE_CACHE_SOCKET"),
    ],
)
def test_a_configuration_that_cannot_work_is_one_line(
    start: Start, path: Path, arguments: list[str], told: str
) -> None:
    process = start("cache-server", *arguments, RADIXGATE_CACHE_SOCKET=str(path))
    _, errors = process.communicate()
    assert process.returncode == 2
    assert told in errors
    assert errors.count("\n") == 1


def test_the_leases_of_an_engine_that_is_killed_are_free_again(
    start: Start, path: Path, tmp_path: Path
) -> None:
    (port,) = any_free_ports(1)
    started(start, path, tmp_path, RADIXGATE_CACHE_SERVER_METRICS_PORT=str(port))
    engine = subprocess.Popen(
        [sys.executable, "-c", ENGINE, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert engine.stdout is not None
    assert engine.stdout.readline() == "1\n"
    assert sample(port, "radixgate_cache_leases") == 1
    engine.kill()
    engine.communicate()
    while sample(port, "radixgate_cache_quarantined_leases") or sample(
        port, "radixgate_cache_leases"
    ):
        pass
    assert sample(port, "radixgate_cache_engines") == 0


def test_metrics_are_served_and_nothing_else(start: Start, path: Path, tmp_path: Path) -> None:
    (port,) = any_free_ports(1)
    started(start, path, tmp_path, RADIXGATE_CACHE_SERVER_METRICS_PORT=str(port))
    assert sample(port, "radixgate_cache_arena_bytes") > 0
    with pytest.raises(HTTPError) as refused:
        urlopen(f"http://127.0.0.1:{port}/other")
    refused.value.close()
    assert refused.value.code == 404
    second = start(
        "cache-server",
        "--tiers",
        "ram",
        RADIXGATE_CACHE_SOCKET=str(path) + "2",
        RADIXGATE_CACHE_SERVER_METRICS_PORT=str(port),
    )
    _, errors = second.communicate()
    assert second.returncode == 2
    assert "RADIXGATE_CACHE_SERVER_METRICS_PORT: cannot listen" in errors


def sample(port: int, name: str) -> float:
    with urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        for line in answer.read().decode().splitlines():
            if line.startswith(f"{name} "):
                return float(line.split()[1])
    raise AssertionError(name)
