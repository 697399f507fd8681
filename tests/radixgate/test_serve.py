from __future__ import annotations

import json
import shlex
import signal
import subprocess
from pathlib import Path

import pytest

from engine_workers.ports import any_free_ports
from tests.fifo import Fifo
from tests.radixgate.conftest import Start


def serve(start: Start, model: Path, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    options = ("--port", "0", "--model", str(model), "--tiers", "")
    return start("serve", *options, *arguments, **variables)


def read_until(process: subprocess.Popen[str], beginning: str) -> list[str]:
    """Lines of stdout up to the one that begins so; pytest's time limit is the bound."""
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line.rstrip("\n"))
        if line.startswith(beginning):
            return lines
    pytest.fail(f"ended before {beginning!r}: {lines}")


def test_the_curl_command_of_the_ready_line_works_when_pasted(
    start: Start, model: Path, fifo: Fifo
) -> None:
    process = serve(start, model)
    *before, ready, curl = read_until(process, "curl ")
    assert "engine 0: ready" in " ".join(before)
    assert "engine 1: ready" in " ".join(before)
    assert "serves Tiny from 2 engines" in ready
    answer = subprocess.run(
        [*shlex.split(curl), "--silent", "--include"], capture_output=True, text=True, check=True
    ).stdout
    head, _, body = answer.partition("\n\n")
    assert json.loads(body)["choices"][0]["message"]["content"] == "stand-in"
    assert "x-radixgate-worker: http://127.0.0.1:" in head


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_gateway_and_engines_cleanly(
    start: Start, model: Path, fifo: Fifo, number: signal.Signals
) -> None:
    process = serve(start, model)
    read_until(process, "curl ")
    process.send_signal(number)
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
    fifo.wait_until_all_are_gone()


def test_a_signal_during_the_start_ends_everything_cleanly(
    start: Start, model: Path, fifo: Fifo
) -> None:
    process = serve(start, model, STAND_IN_MODE="load")
    fifo.read_line()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    assert (process.returncode, errors) == (0, "")
    fifo.wait_until_all_are_gone()


def test_two_at_once_take_neither_each_others_ports_nor_logs(
    start: Start, model: Path, fifo: Fifo, environment: dict[str, str]
) -> None:
    (port,) = any_free_ports(1)
    arguments = ("serve", "--model", str(model), "--engines", "1", "--tiers", "", "--port")
    start(*arguments, str(port), STAND_IN_MODE="load")  # its engine never comes to listen
    fifo.read_line()
    refused = start(*arguments, str(port + 1))
    _, errors = refused.communicate()
    assert refused.returncode == 2
    assert errors.startswith(f"radixgate: RADIXGATE_PORT: port {port + 1} ")
    start(*arguments, str(port + 2), STAND_IN_MODE="load")
    fifo.read_line()
    logs = Path(environment["RADIXGATE_ENGINE_LOG_DIR"])
    assert {log.name for log in logs.iterdir()} == {"engine-0.log", "engine-0.2.log"}


def test_sigkill_leaves_no_engine(start: Start, model: Path, fifo: Fifo) -> None:
    process = serve(start, model)
    read_until(process, "curl ")
    process.kill()
    fifo.wait_until_all_are_gone()


def test_an_engine_that_cannot_start_ends_it_with_the_engines_own_words(
    start: Start, model: Path, fifo: Fifo
) -> None:
    process = serve(start, model, STAND_IN_MODE="fail")
    _, errors = process.communicate()
    assert process.returncode == 1
    assert errors.startswith("radixgate: engine ")
    assert "ValueError: the stand-in cannot go on" in errors
    assert "Traceback" not in errors
    fifo.wait_until_all_are_gone()


def test_what_follows_two_dashes_goes_to_vllm(start: Start, model: Path, fifo: Fifo) -> None:
    arguments = ("--engines", "1", "--tool-call-parser", "hermes", "--", "--max-num-seqs", "7")
    process = serve(start, model, *arguments)
    flags = fifo.read_line()
    assert flags.endswith("--tool-call-parser hermes --max-num-seqs 7\n")
    read_until(process, "curl ")
