from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cache_router.errors import ConfigurationError
from engine_workers.engine_runtime import EngineRuntime
from engine_workers.fleet import FleetPlan, check_memory, engine_specs
from engine_workers.model_folder import ModelSource

GIB = 1024**3
PLAN = FleetPlan(
    model=ModelSource("/models/Tiny", "Tiny", 250_000_000),
    runtime=EngineRuntime(Path("/python"), num_gpus=0),
    ports=(8101, 8102),
    kv_cache_bytes=2 * GIB,
)
SOCKETS = Path("/run/sockets")


def test_each_engine_gets_its_own_port_cores_and_sockets() -> None:
    first, second = engine_specs(PLAN, [0, 1], SOCKETS)
    assert (first.port, second.port) == (8101, 8102)
    assert (first.cpus, second.cpus) == ((0,), (1,))
    endpoints = {first.events.events, first.events.replay}
    assert not endpoints & {second.events.events, second.events.replay}


@pytest.mark.parametrize(
    ("num_gpus", "num_engines", "gpus", "sharing"),
    [(1, 2, [0, 0], [2, 2]), (2, 2, [0, 1], [1, 1]), (2, 3, [0, 1, 0], [2, 1, 2])],
)
def test_engines_are_spread_over_gpus(
    num_gpus: int, num_engines: int, gpus: list[int], sharing: list[int]
) -> None:
    runtime = EngineRuntime(Path("/python"), num_gpus)
    plan = replace(PLAN, runtime=runtime, ports=tuple(range(num_engines)))
    specs = engine_specs(plan, [0, 1, 2, 3], SOCKETS)
    assert [spec.gpu for spec in specs] == gpus
    assert [spec.engines_on_gpu for spec in specs] == sharing
    assert all(spec.cpus == () for spec in specs)


def test_enough_memory_is_accepted() -> None:
    check_memory(PLAN, 24 * GIB)


def test_too_little_memory_says_how_many_engines_would_fit() -> None:
    with pytest.raises(ConfigurationError, match=r"too little memory: 2 .*\(ENGINES=1\)"):
        check_memory(PLAN, 6 * GIB)


def test_too_little_memory_for_one_engine_says_what_else_to_do() -> None:
    with pytest.raises(ConfigurationError, match="RADIXGATE_ENGINE_KV_CACHE_BYTES"):
        check_memory(PLAN, 3 * GIB)


def test_weights_and_kv_cache_count() -> None:
    larger = replace(PLAN, kv_cache_bytes=9 * GIB)
    with pytest.raises(ConfigurationError):
        check_memory(larger, 20 * GIB)
    heavier = replace(PLAN, model=replace(PLAN.model, num_parameters=2_000_000_000))
    with pytest.raises(ConfigurationError):
        check_memory(heavier, 20 * GIB)


def test_memory_for_the_cache_server_counts() -> None:
    check_memory(PLAN, 14 * GIB, 2 * GIB)
    with pytest.raises(ConfigurationError, match=r"4\.0 GiB of them for the cache .*ARENA_BYTES"):
        check_memory(PLAN, 14 * GIB, 4 * GIB)
    gpu = replace(PLAN, runtime=EngineRuntime(Path("/python"), 1))
    with pytest.raises(ConfigurationError, match="RADIXGATE_ARENA_BYTES"):
        check_memory(gpu, 3 * GIB, 4 * GIB)


def test_a_gpus_memory_is_left_to_vllm() -> None:
    check_memory(replace(PLAN, runtime=EngineRuntime(Path("/python"), 1)), 0)
