from __future__ import annotations

import socket

import pytest

from cache_router.errors import ConfigurationError
from engine_workers.ports import any_free_ports, free_ports, require_free

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


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_an_address_of_another_machine_is_refused(host: str) -> None:
    (port,) = any_free_ports(1)
    with pytest.raises(ConfigurationError, match="RADIXGATE_HOST"):
        require_free(host, port, "RADIXGATE_PORT")


def test_taken_ports_are_skipped() -> None:
    with socket.create_server((HOST, 0)) as server:
        first = server.getsockname()[1]
        found = free_ports(2, first)
        assert len(set(found)) == 2
        assert first not in found
        assert min(found) > first


def test_the_end_of_the_port_range_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="too few free ports"):
        free_ports(3, 65534)


def test_any_free_ports_are_distinct() -> None:
    assert len(set(any_free_ports(20))) == 20
