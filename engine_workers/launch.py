"""The command line and the environment of one vLLM engine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from engine_workers.connector.connector_settings import transfer_config
from engine_workers.end_with_parent import LAUNCHED_VARIABLE
from engine_workers.engine_runtime import EngineRuntime
from engine_workers.event_endpoints import EventEndpoints
from engine_workers.model_folder import ModelSource

_CPU_BLOCK_SIZE = 32
_CPU_MAX_NUM_BATCHED_TOKENS = 512
_GPU_MEMORY_SHARE = 0.9

# vLLM lets these win over the flags that are given below, and a key that only the engine knows
# would lock the gateway out.
_OVERRIDING_VARIABLES = ("VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_API_KEY")


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Everything that is decided about one engine before it starts."""

    model: ModelSource
    runtime: EngineRuntime
    port: int
    events: EventEndpoints
    kv_cache_bytes: int
    """Bytes of KV cache on a CPU; a GPU's follows from the memory it has."""
    host: str = "127.0.0.1"
    cpus: tuple[int, ...] = ()
    """Logical CPUs that compute for this engine and no other; empty leaves it to vLLM."""
    gpu: int | None = None
    """Which GPU, None for all that are visible."""
    engines_on_gpu: int = 1
    """How many engines, this one included, divide that GPU's memory among them."""
    max_model_len: int | None = None
    """Longest sequence in tokens; None: the model's, or less if the KV cache holds less."""
    tool_call_parser: str | None = None
    chat_template: Path | None = None
    cache_socket: Path | None = None
    """Socket of the node's cache server; None: the engine has no tiers."""
    api_key: str | None = field(default=None, repr=False)
    extra_arguments: tuple[str, ...] = ()
    """vLLM flags that come last, so they win."""
    extra_environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineCommand:
    """What to execute, and where it will answer."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)
    host: str
    port: int

    @property
    def url(self) -> str:
        """The worker's base URL."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


def engine_command(spec: EngineSpec, environment: Mapping[str, str]) -> EngineCommand:
    """Build the command of one engine.

    Args:
        spec: What was decided.
        environment: What the engine inherits; variables that would overrule `spec` are left out.
    """
    # The module, not the `vllm` program: that one asks for the version of a distribution named
    # vllm, and the CPU build has another name.
    arguments = [str(spec.runtime.python), "-m", "vllm.entrypoints.openai.api_server"]
    arguments += ["--model", spec.model.argument, "--served-model-name", spec.model.served_name]
    arguments += ["--host", spec.host, "--port", str(spec.port)]
    arguments += ["--kv-events-config", _events_config(spec.events)]
    arguments += ["--enable-prompt-tokens-details"]
    # Health checks come every second; request lines are the gateway's to log.
    arguments += ["--disable-uvicorn-access-log"]
    arguments += ["--max-model-len", str(spec.max_model_len or "auto")]
    if spec.runtime.num_gpus == 0:
        # A prefill step on a CPU cannot be interrupted: small steps let others in between. And
        # bfloat16 gives wrong answers there.
        arguments += ["--dtype", "float32", "--enforce-eager"]
        arguments += ["--block-size", str(_CPU_BLOCK_SIZE)]
        arguments += ["--max-num-batched-tokens", str(_CPU_MAX_NUM_BATCHED_TOKENS)]
        arguments += ["--kv-cache-memory-bytes", str(spec.kv_cache_bytes)]
    else:
        share = _GPU_MEMORY_SHARE / spec.engines_on_gpu
        arguments += ["--gpu-memory-utilization", f"{share:.3f}"]
    if spec.tool_call_parser is not None:
        arguments += ["--enable-auto-tool-choice", "--tool-call-parser", spec.tool_call_parser]
    if spec.chat_template is not None:
        arguments += ["--chat-template", str(spec.chat_template)]
    if spec.cache_socket is not None:
        arguments += ["--kv-transfer-config", transfer_config(spec.cache_socket)]
    arguments += spec.extra_arguments
    return EngineCommand(
        arguments=tuple(arguments),
        environment=_environment(spec, environment),
        host=spec.host,
        port=spec.port,
    )


def _events_config(events: EventEndpoints) -> str:
    return json.dumps(
        {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": events.events,
            "replay_endpoint": events.replay,
        }
    )


def _environment(spec: EngineSpec, inherited: Mapping[str, str]) -> dict[str, str]:
    environment = {
        name: value
        for name, value in inherited.items()
        if name not in _OVERRIDING_VARIABLES and not name.startswith("RADIXGATE_")
    }
    environment |= {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", LAUNCHED_VARIABLE: "1"}
    if spec.model.is_local:
        environment["HF_HUB_OFFLINE"] = "1"
    if spec.cpus:
        environment["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, spec.cpus))
    if spec.gpu is not None:
        environment["CUDA_VISIBLE_DEVICES"] = str(spec.gpu)
    if spec.api_key is not None:
        environment["VLLM_API_KEY"] = spec.api_key
    return environment | dict(spec.extra_environment)
