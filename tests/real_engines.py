"""Two real vLLM engines for the whole test session, driven from tests of any event loop."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from engine_workers.engine_runtime import EngineRuntime
from engine_workers.event_endpoints import socket_folder
from engine_workers.fleet import Fleet, FleetPlan, check_memory, engine_specs
from engine_workers.hardware import available_memory_bytes, usable_cores
from engine_workers.model_folder import ModelSource
from engine_workers.ports import any_free_ports
from engine_workers.supervisor import SupervisionPolicy

_READY_TIMEOUT_S = 280.0
# SmolLM2: keys and values, layers, KV heads, head size, bytes of a float32.
_KV_BYTES_PER_TOKEN = 2 * 30 * 3 * 64 * 4


@dataclass(frozen=True, slots=True)
class RunningEngines:
    """What tests may know of the engines, and the one thing that they may do to them."""

    urls: tuple[str, ...]
    model: str
    """The served name."""
    model_folder: Path
    max_model_len: int
    kv_cache_tokens: int
    """About how many tokens one engine's KV cache holds."""
    restart: Callable[[int], None]
    """Kill the engine of this number as a crash would, and return when its successor is ready."""


@contextmanager
def running_engines(
    model: ModelSource,
    runtime: EngineRuntime,
    workspace_sockets: Path,
    log_folder: Path,
    *,
    num_engines: int = 2,
    chat_template: Path | None = None,
    cache_socket: Path | None = None,
) -> Iterator[RunningEngines]:
    """Start the engines, and stop them at the end; the product's own supervisor does both."""
    max_model_len = 2048
    kv_cache_bytes = 1024**3
    plan = FleetPlan(
        model=model,
        runtime=runtime,
        ports=any_free_ports(num_engines),
        kv_cache_bytes=kv_cache_bytes,
        max_model_len=max_model_len,
        tool_call_parser="hermes",
        chat_template=chat_template,
        cache_socket=cache_socket,
        extra_environment={"VLLM_SERVER_DEV_MODE": "1"},
    )
    check_memory(plan, available_memory_bytes())
    with socket_folder(workspace_sockets) as sockets:
        fleet = Fleet(
            engine_specs(plan, usable_cores(), sockets),
            log_folder=log_folder,
            environment=os.environ,
            policy=SupervisionPolicy(ready_timeout_s=_READY_TIMEOUT_S, first_pause_s=0.1),
        )
        with _FleetThread(fleet) as thread:
            yield RunningEngines(
                urls=tuple(fleet.urls),
                model=model.served_name,
                model_folder=Path(model.argument),
                max_model_len=max_model_len,
                kv_cache_tokens=kv_cache_bytes // _KV_BYTES_PER_TOKEN,
                restart=thread.restart,
            )


class _FleetThread:
    """An event loop of its own: the supervisors live longer than any test's loop."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engines")

    def __enter__(self) -> _FleetThread:
        self._thread.start()
        self._supervision = asyncio.run_coroutine_threadsafe(self._fleet.run(), self._loop)
        try:
            self._call(self._all_ready())
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._supervision.cancel()
        # The future above is done as soon as it is cancelled; the engines end a little later.
        self._call(self._all_done())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def restart(self, number: int) -> None:
        self._call(self._restart(number))

    def _call(self, work: Coroutine[None, None, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(_READY_TIMEOUT_S)

    async def _restart(self, number: int) -> None:
        engine = self._fleet.engines[number]
        life = engine.status.life
        engine.kill()
        await engine.wait_ready(life + 1)

    async def _all_ready(self) -> None:
        ready = asyncio.create_task(self._fleet.wait_ready())
        failed = asyncio.wrap_future(self._supervision)
        await asyncio.wait({ready, failed}, return_when=asyncio.FIRST_COMPLETED)
        if failed.done():
            ready.cancel()
            await failed  # raises with the end of the engine's log

    async def _all_done(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*others, return_exceptions=True)
