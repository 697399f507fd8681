"""From settings to engines: decide everything, and refuse what cannot work before it costs time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cache_router.errors import ConfigurationError
from cache_router.settings import Settings
from engine_workers.engine_runtime import load_runtime
from engine_workers.fleet import FleetPlan, check_memory
from engine_workers.hardware import available_memory_bytes, require_cpu_engine_support
from engine_workers.model_folder import resolve_model
from engine_workers.model_store import default_model
from engine_workers.workspace import Workspace


def plan_engines(
    settings: Settings,
    workspace: Workspace,
    ports: Sequence[int],
    vllm_arguments: Sequence[str],
    *,
    cache_socket: Path | None = None,
    reserved_bytes: int = 0,
) -> FleetPlan:
    """Plan one engine a port.

    Args:
        settings: Model, limits, which Python.
        workspace: Where the default model and the engine environment are.
        ports: Free ports.
        vllm_arguments: Flags that vLLM gets last.
        cache_socket: Socket of the cache server beside the engines, if there is one.
        reserved_bytes: Memory that is kept for others, the cache server above all.

    Raises:
        ConfigurationError: A broken model folder, a missing template, no engine environment, an
            unsupported CPU, too little memory.
    """
    template = settings.chat_template
    if template is not None and not template.is_file():
        raise ConfigurationError("RADIXGATE_CHAT_TEMPLATE", f"there is no file {template}")
    model = resolve_model(settings.model) if settings.model else default_model(workspace)
    runtime = load_runtime(workspace, settings.engine_python)
    if runtime.num_gpus == 0:
        require_cpu_engine_support()
    plan = FleetPlan(
        model=model,
        runtime=runtime,
        ports=ports,
        kv_cache_bytes=settings.engine_kv_cache_bytes,
        max_model_len=settings.engine_max_model_len,
        tool_call_parser=settings.engine_tool_call_parser,
        chat_template=None if template is None else template.resolve(),
        cache_socket=cache_socket,
        api_key=settings.worker_api_key,
        extra_arguments=tuple(vllm_arguments),
    )
    check_memory(plan, available_memory_bytes(), reserved_bytes)
    return plan
