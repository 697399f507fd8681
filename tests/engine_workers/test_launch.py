from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from engine_workers.engine_runtime import EngineRuntime
from engine_workers.event_endpoints import socket_endpoints
from engine_workers.launch import EngineSpec, engine_command
from engine_workers.model_folder import ModelSource

LOCAL = ModelSource("/models/Tiny", "Tiny", 1000)
CPU = EngineRuntime(Path("/engine/bin/python"), num_gpus=0)
GPU = EngineRuntime(Path("/engine/bin/python"), num_gpus=1)
SPEC = EngineSpec(
    model=LOCAL,
    runtime=CPU,
    port=8101,
    events=socket_endpoints(Path("/run/sockets"), 8101),
    kv_cache_bytes=12345,
    cpus=(2, 3),
)


def value_of(spec: EngineSpec, flag: str) -> str:
    arguments = engine_command(spec, {}).arguments
    assert arguments.count(flag) == 1, flag
    return arguments[arguments.index(flag) + 1]


def test_the_engines_python_runs_vllms_server_module() -> None:
    arguments = engine_command(SPEC, {}).arguments
    assert arguments[:3] == ("/engine/bin/python", "-m", "vllm.entrypoints.openai.api_server")


def test_model_name_and_address_are_given() -> None:
    assert value_of(SPEC, "--model") == "/models/Tiny"
    assert value_of(SPEC, "--served-model-name") == "Tiny"
    assert value_of(SPEC, "--host") == "127.0.0.1"
    assert value_of(SPEC, "--port") == "8101"
    assert engine_command(SPEC, {}).url == "http://127.0.0.1:8101"


def test_an_ipv6_address_is_bracketed_in_the_url() -> None:
    assert engine_command(replace(SPEC, host="::1"), {}).url == "http://[::1]:8101"


def test_events_are_published_with_a_replay_endpoint() -> None:
    assert json.loads(value_of(SPEC, "--kv-events-config")) == {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "ipc:///run/sockets/engine-8101-events.sock",
        "replay_endpoint": "ipc:///run/sockets/engine-8101-replay.sock",
    }


def test_cached_tokens_are_reported() -> None:
    assert "--enable-prompt-tokens-details" in engine_command(SPEC, {}).arguments


def test_a_cpu_engine_computes_in_float32_in_small_steps_and_blocks_of_32() -> None:
    assert value_of(SPEC, "--dtype") == "float32"
    assert value_of(SPEC, "--block-size") == "32"
    assert value_of(SPEC, "--max-num-batched-tokens") == "512"
    assert value_of(SPEC, "--kv-cache-memory-bytes") == "12345"
    assert "--enforce-eager" in engine_command(SPEC, {}).arguments


def test_a_gpu_engine_keeps_vllms_own_choices() -> None:
    arguments = engine_command(replace(SPEC, runtime=GPU, cpus=()), {}).arguments
    cpu_flags = {"--dtype", "--block-size", "--enforce-eager", "--kv-cache-memory-bytes"}
    assert not cpu_flags & set(arguments)


def test_engines_on_one_gpu_divide_its_memory() -> None:
    alone = replace(SPEC, runtime=GPU, cpus=(), gpu=0)
    assert value_of(alone, "--gpu-memory-utilization") == "0.900"
    shared = replace(alone, engines_on_gpu=2)
    assert value_of(shared, "--gpu-memory-utilization") == "0.450"
    assert engine_command(shared, {}).environment["CUDA_VISIBLE_DEVICES"] == "0"


def test_the_context_length_is_what_fits_unless_it_is_given() -> None:
    assert value_of(SPEC, "--max-model-len") == "auto"
    assert value_of(replace(SPEC, max_model_len=77), "--max-model-len") == "77"


def test_a_tool_call_parser_turns_automatic_tool_choice_on() -> None:
    assert "--enable-auto-tool-choice" not in engine_command(SPEC, {}).arguments
    with_tools = replace(SPEC, tool_call_parser="hermes")
    assert value_of(with_tools, "--tool-call-parser") == "hermes"
    assert "--enable-auto-tool-choice" in engine_command(with_tools, {}).arguments


def test_an_engine_beside_a_cache_server_gets_the_connector_and_recomputes_what_it_loses() -> None:
    assert "--kv-transfer-config" not in engine_command(SPEC, {}).arguments
    with_tiers = replace(SPEC, cache_socket=Path("/run/sockets/cache.sock"))
    assert json.loads(value_of(with_tiers, "--kv-transfer-config")) == {
        "kv_connector": "RadixgateConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"socket": "/run/sockets/cache.sock"},
    }


def test_extra_arguments_come_last_so_that_they_win() -> None:
    spec = replace(SPEC, chat_template=Path("/t.jinja"), extra_arguments=("--dtype", "float16"))
    assert engine_command(spec, {}).arguments[-2:] == ("--dtype", "float16")
    assert value_of(spec, "--chat-template") == "/t.jinja"


def test_the_engine_computes_on_its_own_cores_whatever_the_environment_says() -> None:
    inherited = {"VLLM_CPU_OMP_THREADS_BIND": "auto", "VLLM_CPU_KVCACHE_SPACE": "40", "HOME": "/h"}
    environment = engine_command(SPEC, inherited).environment
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "2,3"
    assert "VLLM_CPU_KVCACHE_SPACE" not in environment
    assert environment["HOME"] == "/h"


def test_telemetry_is_off() -> None:
    environment = engine_command(SPEC, {}).environment
    assert environment["VLLM_NO_USAGE_STATS"] == "1"
    assert environment["DO_NOT_TRACK"] == "1"


def test_only_a_local_model_is_kept_from_the_network() -> None:
    assert engine_command(SPEC, {}).environment["HF_HUB_OFFLINE"] == "1"
    hub = replace(SPEC, model=ModelSource("org/Tiny", "org/Tiny", None))
    assert "HF_HUB_OFFLINE" not in engine_command(hub, {}).environment


def test_our_own_settings_and_keys_do_not_reach_the_engine() -> None:
    inherited = {"RADIXGATE_WORKER_API_KEY": "secret", "VLLM_API_KEY": "other"}
    assert "secret" not in engine_command(SPEC, inherited).environment.values()
    assert "other" not in engine_command(SPEC, inherited).environment.values()


def test_a_key_goes_through_the_environment_and_is_not_printed() -> None:
    spec = replace(SPEC, api_key="secret")
    command = engine_command(spec, {})
    assert command.environment["VLLM_API_KEY"] == "secret"
    assert "secret" not in command.arguments
    assert "secret" not in repr(spec) + repr(command)
