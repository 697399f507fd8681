"""One vLLM engine with the right flags, in the foreground."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from dataclasses import replace

from cache_router.errors import EngineError
from cache_router.settings import Settings
from engine_workers.event_endpoints import socket_folder, tcp_endpoints
from engine_workers.fleet import engine_specs
from engine_workers.guarded_process import GuardedProcess
from engine_workers.hardware import usable_cores
from engine_workers.launch import EngineCommand, engine_command
from engine_workers.ports import claimed_port, require_free
from engine_workers.workspace import Workspace
from radixgate.engine_plan import plan_engines

_GRACE_S = 8.0
_ALL_INTERFACES = "0.0.0.0"


async def run_worker(
    settings: Settings,
    workspace: Workspace,
    *,
    port: int,
    events_port: int | None,
    vllm_arguments: Sequence[str],
) -> None:
    """Run an engine until it ends, or until SIGINT or SIGTERM.

    Args:
        settings: Address to listen on, model, limits.
        workspace: Where the default model and the engine environment are.
        port: Where the engine listens.
        events_port: Publish KV events on this TCP port and replay them on the next; None: on Unix
            sockets, for a gateway on the same machine.
        vllm_arguments: Flags that vLLM gets last.

    Raises:
        ConfigurationError: A port is taken, or the engine cannot work, see `plan_engines`.
        EngineError: The engine ended by itself.
    """
    with claimed_port(settings.host, port, "--port"), socket_folder(workspace.sockets) as sockets:
        plan = plan_engines(settings, workspace, [port], vllm_arguments)
        (spec,) = engine_specs(plan, usable_cores(), sockets)
        spec = replace(spec, host=settings.host)
        if events_port is not None:
            for number in (events_port, events_port + 1):
                require_free(_ALL_INTERFACES, number, "--kv-events-port")
            spec = replace(spec, events=tcp_endpoints(events_port))
        await _run_until_told(engine_command(spec, os.environ))


async def _run_until_told(command: EngineCommand) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    process = await GuardedProcess.start(command, log_file=None, grace_s=_GRACE_S)
    ended = asyncio.create_task(process.wait())
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({ended, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        if not ended.done():
            await process.stop()
    status = await ended
    if not stop.is_set():
        raise EngineError(f"the engine ended by itself with status {status}; see its output above")
