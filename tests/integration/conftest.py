"""A gateway process of its own in front of the two real engines of the session."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
import openai
import pytest

from engine_workers.ports import any_free_ports
from tests.real_engines import RunningEngines

_READY_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class GatewayProcess:
    """A running `radixgate gateway`."""

    url: str
    model: str
    process: subprocess.Popen[bytes]
    log: Path


@contextmanager
def gateway_process(
    engines: RunningEngines, log: Path, arguments: Sequence[str] = (), **environment: str
) -> Iterator[GatewayProcess]:
    """Start the command as users do, wait until both engines take requests, end it by SIGTERM."""
    (port,) = any_free_ports(1)
    command = [str(Path(sys.executable).parent / "radixgate"), "gateway", "--port", str(port)]
    for url in engines.urls:
        command += ["--worker", url]
    environment = {**os.environ, "RADIXGATE_ROUTE_HEADERS": "true", **environment}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *arguments], stdout=output, stderr=subprocess.STDOUT, env=environment
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_ready(url, process, log, engines)
        yield GatewayProcess(url, engines.model, process, log)
    finally:
        process.terminate()
        process.wait(30)


def _wait_ready(
    url: str, process: subprocess.Popen[bytes], log: Path, engines: RunningEngines
) -> None:
    deadline_s = time.monotonic() + _READY_TIMEOUT_S
    while time.monotonic() < deadline_s:
        assert process.poll() is None, log.read_text()
        try:
            health = httpx2.get(f"{url}/health").json()
            if len(health["workers"]) == len(engines.urls) and all(
                worker["ready"] and worker["trust"] == "exact" for worker in health["workers"]
            ):
                return
        except httpx2.TransportError:
            pass
        time.sleep(0.05)
    raise AssertionError(f"the gateway was not ready in time: {log.read_text()}")


@pytest.fixture(scope="session")
def real_gateway(
    engines: RunningEngines, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    log = tmp_path_factory.mktemp("gateway") / "gateway.log"
    with gateway_process(engines, log) as gateway:
        yield gateway


@pytest.fixture(scope="session")
def sdk(real_gateway: GatewayProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{real_gateway.url}/v1", api_key="sk-any", max_retries=0, timeout=120
    ) as client:
        yield client


@pytest.fixture(scope="session")
def model(real_gateway: GatewayProcess) -> str:
    return real_gateway.model
