from __future__ import annotations

import socket

import pytest

from cache_router.errors import ConfigurationError
from engine_workers.ports import any_free_ports, claimed_port, claimed_ports, require_free

HOST = "127.0.0.1"


def test_a_taken_port_is_refused_by_its_setting() -> None:
    with socket.create_server((HOST, 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"RADIXGATE_PORT: port {port} on {HOST}"):
            require_free(HOST, port, "RADIXGATE_PORT")


def test_a_free_port_and_any_port_are_accepted() -> None:
    (port,) = any_free_ports(1)
    require_free(HOST, port, "RADIXGATE_PORT")
    require_free(HOST, 0, "RADIXGATE_PORT")


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid", "a..b"])
def test_an_address_of_another_machine_is_refused(host: str) -> None:
    for port in (0, *any_free_ports(1)):
        with pytest.raises(ConfigurationError, match="RADIXGATE_HOST"):
            require_free(host, port, "RADIXGATE_PORT")


def test_taken_ports_are_skipped() -> None:
    with socket.create_server((HOST, 0)) as server:
        first = server.getsockname()[1]
        with claimed_ports(2, first) as found:
            assert len(set(found)) == 2
            assert min(found) > first


def test_a_port_is_claimed_before_anybody_listens_there() -> None:
    (first,) = any_free_ports(1)
    with claimed_ports(2, first) as ours, claimed_ports(2, first) as theirs:
        assert len({*ours, *theirs}) == 4
        with (
            pytest.raises(ConfigurationError, match=f"port {ours[1]}"),
            claimed_port(HOST, ours[1], "RADIXGATE_PORT"),
        ):
            pass
    with claimed_ports(2, first) as again:
        assert again == ours


def test_the_end_of_the_port_range_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="too few free ports"):
        claimed_ports(3, 65534).__enter__()


def test_any_free_ports_are_distinct() -> None:
    assert len(set(any_free_ports(20))) == 20
