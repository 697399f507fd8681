"""All in one: engines and a gateway in front of them, in the foreground."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import tempfile
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from rich.console import Console

from cache_router.errors import ConfigurationError
from cache_router.settings import Settings
from engine_workers.event_endpoints import socket_folder
from engine_workers.fleet import Fleet, FleetPlan, engine_specs, needed_bytes
from engine_workers.hang_watch import HangWatch
from engine_workers.hardware import available_memory_bytes, usable_cores
from engine_workers.health_probe import is_healthy
from engine_workers.ports import any_free_ports, claimed_port, claimed_ports, require_free
from engine_workers.supervisor import EngineSupervisor, SupervisionPolicy
from engine_workers.workspace import Workspace
from radixgate.cache_plan import (
    CachePlan,
    fitting_arena_bytes,
    planned_cache_server,
    reserved_bytes,
)
from radixgate.engine_plan import plan_engines
from radixgate.startup_display import show_startup

_READY_EVERY_S = 0.1
_CACHE_SERVER_READY_S = 120.0
"""Its index of the SSD tier is read from the disk first."""
_answers_pages = partial(is_healthy, path="/metrics")


class RunGateway(Protocol):
    """Serves in front of the given workers until `stop` is set."""

    async def __call__(
        self, settings: Settings, worker_urls: Sequence[str], *, stop: asyncio.Event
    ) -> None:
        """Serve.

        Raises:
            ConfigurationError: The port cannot be listened on.
        """


@dataclass(frozen=True, slots=True)
class ServePlan:
    """All that is decided before anything starts."""

    settings: Settings
    fleet: FleetPlan
    sockets: Path
    """Folder for the event sockets, see `socket_folder`."""
    logs: Path
    """Folder for the engines' logs."""
    cache: CachePlan | None
    """None: no tiers, no cache server, no connector."""
    arena_bytes: int

    @property
    def workers(self) -> list[str]:
        """What the gateway is told of each engine."""
        urls = [f"http://127.0.0.1:{port}" for port in self.fleet.ports]
        return [url if self.cache is None else f"{url},cache={self.cache.url}" for url in urls]


@contextmanager
def planned_serve(
    settings: Settings, workspace: Workspace, vllm_arguments: Sequence[str]
) -> Iterator[ServePlan]:
    """Decide everything, and refuse what cannot work while that costs nothing yet.

    The plan's ports are kept from other radixgates for the length of the block.

    Raises:
        ConfigurationError: The port is taken, a folder cannot be written to, or the engines cannot
            work, see `plan_engines`, or a tier cannot, see `planned_cache_server`.
    """
    if settings.port == 0:
        require_free(settings.host, 0, "RADIXGATE_PORT")
        settings = settings.model_copy(update={"port": any_free_ports(1, settings.host)[0]})
    if "route_headers" not in settings.model_fields_set:
        settings = settings.model_copy(update={"route_headers": True})
    with ExitStack() as stack:
        stack.enter_context(claimed_port(settings.host, settings.port, "RADIXGATE_PORT"))
        has_tiers = bool(settings.tiers.strip())
        num_ports = settings.engines + has_tiers
        ports = stack.enter_context(claimed_ports(num_ports, settings.port + 1))
        sockets = stack.enter_context(socket_folder(workspace.sockets))
        cache = None
        if has_tiers:
            cache_port = settings.cache_server_metrics_port or ports[-1]
            if cache_port != ports[-1]:
                require_free("127.0.0.1", cache_port, "RADIXGATE_CACHE_SERVER_METRICS_PORT")
            cache = stack.enter_context(
                planned_cache_server(settings, workspace, sockets, cache_port)
            )
        fleet = plan_engines(
            settings,
            workspace,
            ports[: settings.engines],
            vllm_arguments,
            cache_socket=None if cache is None else cache.socket,
            reserved_bytes=0 if cache is None else reserved_bytes(settings),
        )
        arena_bytes = fitting_arena_bytes(settings, available_memory_bytes() - needed_bytes(fleet))
        logs = settings.engine_log_dir or workspace.logs
        _require_writable(logs)
        yield ServePlan(settings, fleet, sockets, logs, cache, arena_bytes)


def _require_writable(logs: Path) -> None:
    try:
        logs.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=logs).close()
    except OSError as error:
        raise ConfigurationError(
            "RADIXGATE_ENGINE_LOG_DIR",
            f"logs cannot be written to {logs} ({error.strerror}); name another folder",
        ) from error


async def serve(plan: ServePlan, run_gateway: RunGateway) -> None:
    """Start the engines, then the gateway; end everything at SIGINT or SIGTERM.

    Args:
        plan: From `planned_serve`.
        run_gateway: `gateway.server.run_gateway`.

    Raises:
        RadixgateError: Alone or in a group: an engine or the gateway could not be started.
    """
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    began_at = time.monotonic()
    fleet = Fleet(
        engine_specs(plan.fleet, usable_cores(), plan.sockets),
        log_folder=plan.logs,
        environment=os.environ,
        policy=SupervisionPolicy(ready_timeout_s=plan.settings.engine_ready_timeout_s),
    )
    model = plan.fleet.model.served_name
    print(f"starting {len(fleet.engines)} engines for {model}; logs in {plan.logs}", flush=True)
    async with asyncio.TaskGroup() as tasks:
        running = []
        if plan.cache is not None:
            running += await _start_cache_server(plan, plan.cache, tasks, stop)
        if not stop.is_set():
            running.append(tasks.create_task(fleet.run(), name="engines"))
            await _unless(stop, show_startup(fleet.engines, Console()))
        if not stop.is_set():
            announcing = tasks.create_task(_announce(plan, began_at), name="announcement")
            await run_gateway(plan.settings, plan.workers, stop=stop)
            announcing.cancel()
        print("stopping ...", flush=True)
        for task in running:
            task.cancel()


async def _start_cache_server(
    plan: ServePlan, cache: CachePlan, tasks: asyncio.TaskGroup, stop: asyncio.Event
) -> list[asyncio.Task[None]]:
    """Start it and wait until it answers, or until `stop` is set.

    Returns:
        What supervises it, to be cancelled at the end.
    """
    server = EngineSupervisor(
        "cache server",
        cache.command(os.environ, plan.arena_bytes),
        plan.logs / "cache-server.log",
        SupervisionPolicy(ready_timeout_s=_CACHE_SERVER_READY_S),
        probe=_answers_pages,
    )
    running = [tasks.create_task(server.run(), name="cache server")]
    await _unless(stop, server.wait_ready())
    watch = HangWatch(server, _answers_pages)
    running.append(tasks.create_task(watch.run(), name="cache server: watch"))
    if not stop.is_set():
        print(
            f"cache server: ready; tiers {cache.tiers}, {plan.arena_bytes / 1024**3:.1f} GiB of "
            f"memory at most, socket {cache.socket}",
            flush=True,
        )
    return running


async def _unless(stop: asyncio.Event, work: Coroutine[None, None, None]) -> None:
    """Do the work to its end, or until `stop` is set."""
    working = asyncio.create_task(work)
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            await working
    finally:
        working.cancel()
        stopping.cancel()


async def _announce(plan: ServePlan, began_at: float) -> None:
    """Say how to use it, once the gateway has seen an engine and a request can succeed."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(plan.settings.host, plan.settings.host)
    port = plan.settings.port
    # Only an HTTP answer tells when the gateway has found the engines: there is no event to await.
    while not await is_healthy(host, port, path="/ready"):  # noqa: ASYNC110 - see above
        await asyncio.sleep(_READY_EVERY_S)
    base = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
    model = plan.fleet.model.served_name
    question = {"role": "user", "content": "What is the capital of France?"}
    body = json.dumps({"model": model, "messages": [question], "temperature": 0})
    tiers = "" if plan.cache is None else f" and tiers {plan.cache.tiers}"
    print(
        f"ready after {time.monotonic() - began_at:.0f} s: {base} serves {model} from "
        f"{len(plan.fleet.ports)} engines{tiers}; Ctrl-C ends it. Try:\n"
        f"curl {base}/chat/completions -H 'Content-Type: application/json' -d {shlex.quote(body)}",
        flush=True,
    )
