from __future__ import annotations

import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.fifo import Fifo
from tests.radixgate.conftest import Start
from tests.radixgate.test_serve import read_until


@pytest.fixture
def path() -> Iterator[Path]:
    # Short: a Unix socket's path has to fit 108 bytes.
    with tempfile.TemporaryDirectory(prefix="serve-") as folder:
        yield Path(folder) / "cache.sock"


def serve(
    start: Start, model: Path, path: Path, *arguments: str, **variables: str
) -> subprocess.Popen[str]:
    return start(
        *("serve", "--port", "0", "--model", str(model), "--engines", "1", *arguments),
        RADIXGATE_CACHE_SOCKET=str(path),
        RADIXGATE_SSD_FOLDER=str(path.parent / "ssd"),
        **variables,
    )


def answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(str(path))
        except OSError:
            return False
    return True


def wait_gone(path: Path) -> None:
    """Until nobody listens; pytest's time limit is the bound."""
    while answers(path):
        pass


def test_engines_get_the_connector_and_the_ready_line_says_which_tiers(
    start: Start, model: Path, fifo: Fifo, path: Path
) -> None:
    process = serve(start, model, path)
    flags = fifo.read_line()
    assert answers(path)
    assert f'"kv_connector_extra_config": {{"socket": "{path}"}}' in flags
    *before, ready, _ = read_until(process, "curl ")
    assert any(line.startswith("cache server: ready; tiers ram,ssd") for line in before)
    assert "from 1 engines and tiers ram,ssd" in ready
    assert (path.parent / "ssd").is_dir()


def test_no_tiers_are_no_cache_server_and_no_connector(
    start: Start, model: Path, fifo: Fifo, path: Path
) -> None:
    process = serve(start, model, path, "--tiers", "")
    assert "--kv-transfer-config" not in fifo.read_line()
    *_, ready, _ = read_until(process, "curl ")
    assert "tiers" not in ready
    assert not path.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_cache_server_as_well(
    start: Start, model: Path, fifo: Fifo, path: Path, number: signal.Signals
) -> None:
    process = serve(start, model, path)
    read_until(process, "curl ")
    process.send_signal(number)
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
    assert not path.exists()
    fifo.wait_until_all_are_gone()


def test_sigkill_leaves_no_cache_server(start: Start, model: Path, fifo: Fifo, path: Path) -> None:
    process = serve(start, model, path)
    read_until(process, "curl ")
    process.kill()
    wait_gone(path)


def test_a_successor_waits_for_the_cache_server_of_a_killed_one(
    start: Start, model: Path, fifo: Fifo, path: Path
) -> None:
    first = serve(start, model, path)
    read_until(first, "curl ")
    first.kill()
    read_until(serve(start, model, path), "curl ")


def test_a_cache_server_that_is_killed_is_started_again_and_serving_goes_on(
    start: Start, model: Path, fifo: Fifo, path: Path
) -> None:
    process = serve(start, model, path)
    *_, ready, _ = read_until(process, "curl ")
    url = ready.split(": ")[1].split(" ")[0]
    (child,) = cache_server_processes(process)
    child_gone = Path(f"/proc/{child}")
    subprocess.run(["kill", "-KILL", str(child)], check=True)
    while child_gone.exists():
        pass
    with urlopen(f"{url}/models") as models:
        assert models.status == 200
    while not answers(path):
        pass
    assert process.poll() is None


def cache_server_processes(process: subprocess.Popen[str]) -> list[int]:
    """Of that `serve`: grandchildren, below their guardians."""
    return [
        pid
        for guardian in children(process.pid)
        for pid in children(guardian)
        if b"cache-server" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize(
    ("tiers", "told"),
    [
        ("ram,tape", "RADIXGATE_TIERS: there is no tier 'tape'"),
        ("ssd", "RADIXGATE_TIERS: begin with ram"),
        ("ram,redis", "RADIXGATE_REDIS_URL"),
        ("ram,s3", "RADIXGATE_S3_BUCKET"),
    ],
)
def test_tiers_that_cannot_work_are_one_line_before_anything_starts(
    start: Start, model: Path, path: Path, tiers: str, told: str
) -> None:
    process = serve(start, model, path, "--tiers", tiers)
    output, errors = process.communicate()
    assert (process.returncode, output) == (2, "")
    assert told in errors
    assert errors.count("\n") == 1
    assert not path.exists()


def test_a_socket_that_has_a_server_is_refused(
    start: Start, model: Path, fifo: Fifo, path: Path
) -> None:
    read_until(serve(start, model, path), "curl ")
    second = serve(start, model, path)
    _, errors = second.communicate()
    assert second.returncode == 2
    assert "RADIXGATE_CACHE_SOCKET: another cache server" in errors


def test_an_arena_for_which_there_is_no_memory_is_refused(
    start: Start, model: Path, path: Path
) -> None:
    process = serve(start, model, path, RADIXGATE_ARENA_BYTES=str(2**50))
    output, errors = process.communicate()
    assert (process.returncode, output) == (2, "")
    assert "for the cache server" in errors
