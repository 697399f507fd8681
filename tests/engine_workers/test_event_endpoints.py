from __future__ import annotations

import shutil
import socket
import stat
from pathlib import Path

import pytest

from cache_router.errors import ConfigurationError
from engine_workers.event_endpoints import socket_endpoints, socket_folder, tcp_endpoints


def test_sockets_lie_in_a_folder_that_only_this_user_can_enter(tmp_path: Path) -> None:
    preferred = tmp_path / "s"
    with socket_folder(preferred) as folder:
        assert folder == preferred
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_path_that_is_too_long_gives_way_to_a_short_private_one(tmp_path: Path) -> None:
    preferred = tmp_path / ("long" * 30)
    with socket_folder(preferred) as folder:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        endpoints = socket_endpoints(folder, 65535)
        for endpoint in (endpoints.events, endpoints.replay):
            assert len(endpoint.removeprefix("ipc://").encode()) <= 107
    assert not preferred.exists()
    with socket_folder(preferred) as again:
        assert again == folder
    shutil.rmtree(folder)


def a_socket_left_in(folder: Path) -> Path:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(folder / "engine-9-events.sock"))
    return folder / "engine-9-events.sock"


def test_sockets_that_a_crash_left_are_removed_by_the_next_start_and_by_the_end(
    tmp_path: Path,
) -> None:
    left = a_socket_left_in(tmp_path)
    with socket_folder(tmp_path) as folder:
        assert not left.exists()
        a_socket_left_in(folder)
    assert not left.exists()


def test_sockets_of_others_that_still_run_are_left_alone(tmp_path: Path) -> None:
    with socket_folder(tmp_path):
        left = a_socket_left_in(tmp_path)
        with socket_folder(tmp_path):
            assert left.exists()
        assert left.exists()


def test_a_cache_servers_socket_is_left_alone(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as serving:
        serving.bind(str(tmp_path / "cache.sock"))
        with socket_folder(tmp_path):
            pass
    assert (tmp_path / "cache.sock").is_socket()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with (
        pytest.raises(ConfigurationError, match="event sockets cannot be made") as caught,
        socket_folder(tmp_path / "file" / "s"),
    ):
        pass
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("length", "kept"), [(107, True), (108, False)])
def test_the_limit_is_107_bytes(tmp_path: Path, length: int, kept: bool) -> None:
    name = "/engine-65535-events.sock"
    preferred = tmp_path / ("x" * (length - len(str(tmp_path)) - 1 - len(name)))
    with socket_folder(preferred) as folder:
        assert (folder == preferred) is kept
    shutil.rmtree(folder)


def test_tcp_endpoints_bind_to_all_interfaces_since_vllm_would_connect_otherwise() -> None:
    endpoints = tcp_endpoints(5557)
    assert (endpoints.events, endpoints.replay) == ("tcp://*:5557", "tcp://*:5558")
