from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_workers.blocks.block_name import BlockName
from engine_workers.cache_server.arena import Arena
from engine_workers.cache_server.catalog import CachedBlock, Catalog
from engine_workers.cache_server.engine_process import EngineProcess
from engine_workers.cache_server.eviction import S3Fifo
from engine_workers.cache_server.leases import Leases
from engine_workers.cache_server.tenant_quota import TenantQuota
from tests.engine_workers.cache_server.conftest import SLOT_BYTES, Clock
from tests.engine_workers.cache_server.test_catalog import Watcher, put

CONNECT_AND_WAIT = """
import socket, sys
connection = socket.socket(socket.AF_UNIX)
connection.connect(sys.argv[1])
sys.stdin.read()
"""


@pytest.fixture
def catalog() -> Iterator[Catalog]:
    arena = Arena(64 * SLOT_BYTES)
    policy = S3Fifo[BlockName](arena.num_bytes)
    yield Catalog(arena, policy, TenantQuota(arena.num_bytes), Watcher())
    arena.close()


@pytest.fixture
def leases(catalog: Catalog, clock: Clock) -> Leases:
    return Leases(catalog, 10.0, clock)


def saved(catalog: Catalog) -> CachedBlock:
    """A block whose pin can pass to a lease."""
    block = put(catalog, 1)
    assert block is not None
    return block


def test_a_lease_in_time_is_in_order(leases: Leases, catalog: Catalog, clock: Clock) -> None:
    block = saved(catalog)
    number = leases.grant("engine", "connection", [block])
    clock.now += 9
    leases.sweep(lambda _: True)
    assert (leases.num_held, leases.num_quarantined) == (1, 0)
    leases.release("engine", [number])
    assert block.num_pins == 0


def test_an_overdue_lease_holds_its_memory_until_its_engine_is_gone(
    leases: Leases, catalog: Catalog, clock: Clock
) -> None:
    block = saved(catalog)
    leases.grant("engine", "connection", [block])
    clock.now += 10
    leases.sweep(lambda _: False)
    assert (leases.num_held, leases.num_quarantined, block.num_pins) == (0, 1, 1)
    leases.sweep(lambda engine_id: engine_id == "engine")
    assert (leases.num_quarantined, block.num_pins) == (0, 0)


def test_an_overdue_lease_that_is_returned_after_all_is_over(
    leases: Leases, catalog: Catalog, clock: Clock
) -> None:
    block = saved(catalog)
    number = leases.grant("engine", "connection", [block])
    clock.now += 100
    leases.sweep(lambda _: False)
    leases.release("engine", [number])
    assert block.num_pins == 0


def test_only_the_leases_of_the_connection_that_ended_are_quarantined(
    leases: Leases, catalog: Catalog
) -> None:
    block = saved(catalog)
    catalog.pin(block)
    leases.grant("engine", "first", [block])
    leases.grant("engine", "second", [block])
    leases.quarantine_connection("first")
    leases.sweep(lambda _: True)
    assert (leases.num_held, block.num_pins) == (1, 1)


def test_a_clock_that_jumps_back_changes_nothing(
    leases: Leases, catalog: Catalog, clock: Clock
) -> None:
    leases.grant("engine", "connection", [saved(catalog)])
    clock.now -= 1000
    leases.sweep(lambda _: True)
    assert leases.num_held == 1


def test_numbers_are_never_used_again(leases: Leases, catalog: Catalog) -> None:
    block = saved(catalog)
    number = leases.grant("engine", "connection", [block])
    leases.release("engine", [number])
    catalog.pin(block)
    assert leases.grant("engine", "connection", [block]) > number


def test_a_process_is_gone_when_it_has_ended_and_not_when_it_only_hung_up() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    # Both ends are this process's.
    process = EngineProcess(ours)
    theirs.close()
    process.hung_up()
    assert not process.is_gone()
    process.close()
    ours.close()


def test_a_process_that_has_ended_is_gone(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        address = str(tmp_path / "s")
        listener.bind(address)
        listener.listen()
        child = subprocess.Popen(
            [sys.executable, "-c", CONNECT_AND_WAIT, address], stdin=subprocess.PIPE
        )
        connection, _ = listener.accept()
        process = EngineProcess(connection)
        assert not process.is_gone()
        child.communicate()
        assert process.is_gone()
        process.close()
        assert process.is_gone()
        connection.close()
