from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cache_router.settings import Settings
from engine_workers.cache_server.server_socket import listening_socket
from engine_workers.workspace import Workspace
from radixgate.cache_plan import fitting_arena_bytes, planned_cache_server, reserved_bytes

GIB = 1024**3
RING_BYTES = Settings().write_ring_bytes


@pytest.fixture
def folder() -> Iterator[Path]:
    # Short: a Unix socket's path has to fit 108 bytes.
    with tempfile.TemporaryDirectory(prefix="plan-") as made:
        yield Path(made)


def test_two_serves_of_one_checkout_share_neither_socket_nor_ssd_folder(folder: Path) -> None:
    workspace = Workspace(folder)
    with (
        planned_cache_server(Settings(), workspace, folder, 1) as first,
        planned_cache_server(Settings(), workspace, folder, 2) as second,
    ):
        assert (first.socket.name, second.socket.name) == ("cache.sock", "cache.2.sock")
        assert (first.ssd_folder.name, second.ssd_folder.name) == ("ssd", "ssd.2")
    with planned_cache_server(Settings(), workspace, folder, 1) as third:
        assert third == first


def test_the_socket_of_a_server_that_runs_alone_is_not_taken(folder: Path) -> None:
    with (
        listening_socket(folder / "cache.sock"),
        planned_cache_server(Settings(), Workspace(folder), folder, 1) as plan,
    ):
        assert plan.socket.name == "cache.2.sock"


def test_the_default_arena_takes_no_more_than_the_engines_leave() -> None:
    settings = Settings(engines=2)
    left_bytes = 3 * GIB + 2 * RING_BYTES
    assert fitting_arena_bytes(settings, left_bytes) == 3 * GIB
    assert fitting_arena_bytes(settings, 100 * GIB) == settings.arena_bytes
    assert reserved_bytes(settings) < left_bytes


def test_an_arena_that_is_set_is_reserved_as_it_is() -> None:
    settings = Settings(engines=1, arena_bytes=9 * GIB)
    assert fitting_arena_bytes(settings, 100 * GIB) == 9 * GIB
    assert reserved_bytes(settings) == 9 * GIB + RING_BYTES


def test_the_server_gets_what_has_no_flag_from_the_environment(folder: Path) -> None:
    with planned_cache_server(Settings(tiers=" ram, ssd"), Workspace(folder), folder, 7) as plan:
        command = plan.command({"RADIXGATE_SSD_FSYNC": "true"}, GIB)
    assert command.environment["RADIXGATE_SSD_FSYNC"] == "true"
    assert command.environment["RADIXGATE_TIERS"] == "ram,ssd"
    assert plan.url == f"http://{command.host}:{command.port}" == "http://127.0.0.1:7"
