"""Two real engines and a gateway in front of them, started for one benchmark run."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
from rich.console import Console

from engine_workers.engine_runtime import load_runtime
from engine_workers.event_endpoints import socket_folder
from engine_workers.fleet import Fleet, FleetPlan, check_memory, engine_specs
from engine_workers.hardware import available_memory_bytes, usable_cores
from engine_workers.model_store import default_model
from engine_workers.ports import any_free_ports
from engine_workers.supervisor import SupervisionPolicy
from engine_workers.workspace import Workspace
from radixgate.startup_display import show_startup

BLOCK_SIZE = 32
# SmolLM2: keys and values, layers, KV heads, head size, bytes of a float32.
_KV_BYTES_PER_BLOCK = 2 * 30 * 3 * 64 * 4 * BLOCK_SIZE
_READY_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class RunningGateway:
    """A gateway process, and what its start cost."""

    url: str
    pid: int
    live_after_s: float
    """Seconds from its start to its first answer."""
    ready_after_s: float
    """Seconds from its start until it took requests."""

    @property
    def resident_bytes(self) -> int:
        """Its memory now."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


@asynccontextmanager
async def running_engines(
    num_engines: int,
    kv_blocks: int,
    *,
    cache_socket: Path | None = None,
    cores: Sequence[int] | None = None,
) -> AsyncIterator[tuple[str, Sequence[str]]]:
    """Start engines that hold `kv_blocks` blocks of KV each.

    Args:
        num_engines: How many.
        kv_blocks: Size of each one's own cache.
        cache_socket: Socket of their cache server, which need not run yet; None: no tiers.
        cores: Logical CPUs that they share; default: all.

    Yields:
        The served model's name and the engines' URLs.
    """
    workspace = Workspace.current()
    model = default_model(workspace)
    plan = FleetPlan(
        model=model,
        runtime=load_runtime(workspace, None),
        ports=any_free_ports(num_engines),
        kv_cache_bytes=kv_blocks * _KV_BYTES_PER_BLOCK,
        max_model_len=4096,
        cache_socket=cache_socket,
        # One block is vLLM's own, for padding.
        extra_arguments=("--num-gpu-blocks-override", str(kv_blocks + 1)),
        extra_environment={"VLLM_SERVER_DEV_MODE": "1"},
    )
    check_memory(plan, available_memory_bytes())
    with socket_folder(workspace.sockets) as sockets:
        fleet = Fleet(
            engine_specs(plan, list(cores or usable_cores()), sockets),
            log_folder=workspace.logs / "bench",
            environment=os.environ,
            policy=SupervisionPolicy(ready_timeout_s=_READY_TIMEOUT_S),
        )
        async with asyncio.TaskGroup() as tasks:
            supervision = tasks.create_task(fleet.run(), name="engines")
            try:
                await show_startup(fleet.engines, Console())
                yield model.served_name, fleet.urls
            finally:
                supervision.cancel()


@asynccontextmanager
async def running_gateway(workers: Sequence[str]) -> AsyncIterator[RunningGateway]:
    """Start `radixgate gateway` as users do, a process of its own."""
    (port,) = any_free_ports(1)
    command = [str(Path(sys.executable).parent / "radixgate"), "gateway", "--port", str(port)]
    for url in workers:
        command += ["--worker", url]
    began_s = time.perf_counter()
    process = await asyncio.create_subprocess_exec(
        *command, env={**os.environ, "RADIXGATE_ROUTE_HEADERS": "true"}
    )
    url = f"http://127.0.0.1:{port}"
    try:
        async with asyncio.timeout(60), httpx2.AsyncClient() as client:
            live_after_s = await _answers(client, f"{url}/live", began_s)
            ready_after_s = await _answers(client, f"{url}/ready", began_s)
        yield RunningGateway(url, process.pid, live_after_s, ready_after_s)
    finally:
        process.terminate()
        await process.wait()


async def _answers(client: httpx2.AsyncClient, url: str, began_s: float) -> float:
    while True:
        try:
            if (await client.get(url)).status_code == 200:
                return time.perf_counter() - began_s
        except httpx2.TransportError:
            pass
        await asyncio.sleep(0.02)


async def forget_prefixes(client: httpx2.AsyncClient, engines: Sequence[str]) -> None:
    """Empty the engines' prefix caches, so that each policy starts from nothing."""
    for url in engines:
        (await client.post(f"{url}/reset_prefix_cache")).raise_for_status()
