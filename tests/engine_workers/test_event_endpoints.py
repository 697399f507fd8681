from __future__ import annotations

import stat
from pathlib import Path

import pytest

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
    assert not folder.exists()
    assert not preferred.exists()


@pytest.mark.parametrize(("length", "kept"), [(107, True), (108, False)])
def test_the_limit_is_107_bytes(tmp_path: Path, length: int, kept: bool) -> None:
    name = "/engine-65535-events.sock"
    preferred = tmp_path / ("x" * (length - len(str(tmp_path)) - 1 - len(name)))
    with socket_folder(preferred) as folder:
        assert (folder == preferred) is kept


def test_tcp_endpoints_bind_to_all_interfaces_since_vllm_would_connect_otherwise() -> None:
    endpoints = tcp_endpoints(5557)
    assert (endpoints.events, endpoints.replay) == ("tcp://*:5557", "tcp://*:5558")
