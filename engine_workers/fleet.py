"""Several engines of one model on this machine: who gets which cores, GPU, port and memory."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cache_router.errors import ConfigurationError
from engine_workers.engine_runtime import EngineRuntime
from engine_workers.event_endpoints import socket_endpoints
from engine_workers.hardware import share_cores
from engine_workers.launch import EngineSpec, engine_command
from engine_workers.model_folder import ModelSource
from engine_workers.supervisor import EngineSupervisor, SupervisionPolicy

# Measured with vLLM 0.32 on the CPU: its three processes hold 2.1 GiB apart from weights and KV
# cache, in float32. The rest is for activations and a request's own buffers.
_ENGINE_BASE_BYTES = 2_400 * 1024**2
_BYTES_PER_PARAMETER = 4


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """What is the same for all engines."""

    model: ModelSource
    runtime: EngineRuntime
    ports: Sequence[int]
    """One an engine."""
    kv_cache_bytes: int
    max_model_len: int | None = None
    tool_call_parser: str | None = None
    chat_template: Path | None = None
    cache_socket: Path | None = None
    api_key: str | None = field(default=None, repr=False)
    extra_arguments: tuple[str, ...] = ()
    extra_environment: Mapping[str, str] = field(default_factory=dict)


def engine_specs(plan: FleetPlan, cores: list[int], sockets: Path) -> list[EngineSpec]:
    """Divide the machine.

    Args:
        plan: What is the same for all.
        cores: Logical CPUs to compute on, see `usable_cores`.
        sockets: Folder for the event sockets, see `socket_folder`.
    """
    num_engines = len(plan.ports)
    num_gpus = plan.runtime.num_gpus
    shares = share_cores(cores, num_engines) if num_gpus == 0 else [()] * num_engines
    return [
        EngineSpec(
            model=plan.model,
            runtime=plan.runtime,
            port=port,
            events=socket_endpoints(sockets, port),
            kv_cache_bytes=plan.kv_cache_bytes,
            cpus=shares[i],
            gpu=i % num_gpus if num_gpus else None,
            engines_on_gpu=len(range(i % num_gpus, num_engines, num_gpus)) if num_gpus else 1,
            max_model_len=plan.max_model_len,
            tool_call_parser=plan.tool_call_parser,
            chat_template=plan.chat_template,
            cache_socket=plan.cache_socket,
            api_key=plan.api_key,
            extra_arguments=plan.extra_arguments,
            extra_environment=plan.extra_environment,
        )
        for i, port in enumerate(plan.ports)
    ]


def needed_bytes(plan: FleetPlan) -> int:
    """Memory that all engines of a CPU take; a GPU's is vLLM's to check, so it counts as 0.

    A model that is not here yet counts without its weights.
    """
    if plan.runtime.num_gpus:
        return 0
    return len(plan.ports) * _engine_bytes(plan)


def check_memory(plan: FleetPlan, available_bytes: int, reserved_bytes: int = 0) -> None:
    """Refuse what would end in the out-of-memory killer, before anything is started.

    Args:
        plan: The engines.
        available_bytes: What new processes can take.
        reserved_bytes: What of it the cache server will take.

    Raises:
        ConfigurationError: Engines and cache server need more than is available.
    """
    if needed_bytes(plan) + reserved_bytes <= available_bytes:
        return
    if not needed_bytes(plan):
        raise ConfigurationError(
            "RADIXGATE_ARENA_BYTES",
            f"too little memory: the cache server needs {_gib(reserved_bytes)}, and "
            f"{_gib(available_bytes)} are free",
        )
    engine_bytes = _engine_bytes(plan)
    num_engines = len(plan.ports)
    fitting = max(available_bytes - reserved_bytes, 0) // engine_bytes
    advice = (
        f"start fewer (ENGINES={fitting})"
        if fitting
        else "free some, or lower RADIXGATE_ENGINE_KV_CACHE_BYTES"
    )
    beside = ""
    if reserved_bytes:
        beside = f", {_gib(reserved_bytes)} of them for the cache server"
        advice += ", or lower RADIXGATE_ARENA_BYTES, or do without tiers (TIERS=)"
    raise ConfigurationError(
        "RADIXGATE_ENGINES",
        f"too little memory: {num_engines} engines of {_gib(engine_bytes)} need "
        f"{_gib(num_engines * engine_bytes)}, and {_gib(available_bytes)} are free{beside}; "
        f"{advice}",
    )


def _engine_bytes(plan: FleetPlan) -> int:
    weights_bytes = _BYTES_PER_PARAMETER * (plan.model.num_parameters or 0)
    return _ENGINE_BASE_BYTES + weights_bytes + plan.kv_cache_bytes


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 1024**3:.1f} GiB"


class Fleet:
    """Supervised engines, numbered from 0."""

    def __init__(
        self,
        specs: Sequence[EngineSpec],
        *,
        log_folder: Path,
        environment: Mapping[str, str],
        policy: SupervisionPolicy,
    ) -> None:
        self.engines = [
            EngineSupervisor(
                f"engine {i}",
                engine_command(spec, environment),
                log_folder / f"engine-{i}.log",
                policy,
            )
            for i, spec in enumerate(specs)
        ]

    @property
    def urls(self) -> list[str]:
        """Base URLs of the engines."""
        return [engine.command.url for engine in self.engines]

    async def run(self) -> None:
        """Supervise all until cancelled, then stop all at once.

        Raises:
            EngineError: In a group: an engine could not be started; the others were stopped.
        """
        async with asyncio.TaskGroup() as tasks:
            for engine in self.engines:
                tasks.create_task(engine.run(), name=engine.name)

    async def wait_ready(self) -> None:
        """Wait until each engine has been ready once; needs `run` beside it in a task group."""
        for engine in self.engines:
            await engine.wait_ready()
