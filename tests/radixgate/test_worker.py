from __future__ import annotations

import signal
import socket
from pathlib import Path

import pytest

from engine_workers.ports import any_free_ports
from tests.fifo import Fifo
from tests.radixgate.conftest import Start


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_engine_cleanly(
    start: Start, model: Path, fifo: Fifo, number: signal.Signals
) -> None:
    (port,) = any_free_ports(1)
    process = start("worker", "--port", str(port), "--model", str(model))
    fifo.read_line()
    process.send_signal(number)
    _, errors = process.communicate()
    assert (process.returncode, errors) == (0, "")
    fifo.wait_until_all_are_gone()


def test_an_engine_that_ends_by_itself_is_status_1(start: Start, model: Path) -> None:
    (port,) = any_free_ports(1)
    process = start("worker", "--port", str(port), "--model", str(model), STAND_IN_MODE="fail")
    _, errors = process.communicate()
    assert process.returncode == 1
    assert "ValueError: the stand-in cannot go on" in errors
    assert errors.splitlines()[-1].startswith("radixgate: the engine ended by itself")


def test_events_can_be_published_to_other_machines(start: Start, model: Path, fifo: Fifo) -> None:
    (port,) = any_free_ports(1)
    arguments = ("worker", "--port", str(port), "--model", str(model), "--kv-events-port")
    (events,) = any_free_ports(1)
    start(*arguments, str(events))
    flags = fifo.read_line()
    assert f'"endpoint": "tcp://*:{events}", "replay_endpoint": "tcp://*:{events + 1}"' in flags


def test_a_taken_event_port_is_refused(start: Start, model: Path) -> None:
    (port,) = any_free_ports(1)
    arguments = ("worker", "--port", str(port), "--model", str(model), "--kv-events-port")
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        for first in (taken, taken - 1):  # the events', and the replay's
            process = start(*arguments, str(first))
            _, errors = process.communicate()
            assert process.returncode == 2
            assert errors.startswith(f"radixgate: --kv-events-port: port {taken} ")


def test_sigkill_leaves_no_engine(start: Start, model: Path, fifo: Fifo) -> None:
    (port,) = any_free_ports(1)
    process = start("worker", "--port", str(port), "--model", str(model))
    fifo.read_line()
    process.kill()
    fifo.wait_until_all_are_gone()
