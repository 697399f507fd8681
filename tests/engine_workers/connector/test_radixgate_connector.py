"""What the installed vLLM asks of a connector, held against what we have: see `vllm_contract`."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cache_router.settings import Settings
from engine_workers.engine_runtime import load_runtime
from engine_workers.workspace import Workspace

pytestmark = pytest.mark.engines

SCRIPT = Path(__file__).with_name("vllm_contract.py")

LEFT_TO_THE_BASE_CLASS = {
    "bind_connector_metadata",
    "bind_kv_cache_manager",
    "build_kv_connector_stats",
    "build_prom_metrics",
    "clear_connector_metadata",
    "finish_forward",
    "get_block_ids_with_load_errors",
    "get_finished",
    "get_finished_count",
    "get_handshake_metadata",
    "get_kv_connector_kv_cache_events",
    "get_kv_connector_stats",
    "get_loaded_kv_cache_group_ids",
    "get_mem_pool_context",
    "get_required_kvcache_layout",
    "handle_preemptions",
    "has_connector_metadata",
    "has_pending_block_frees",
    "register_finished_partial_tail",
    "requires_piecewise_for_cudagraph",
    "reset_capture_state",
    "role",
    "set_host_xfer_buffer_ops",
    "set_xfer_handshake_metadata",
    "set_xfer_handshake_metadata_pp_aware",
    "supports_divergent_local_hybrid_hits",
    "take_events",
}
"""Looked at, and right as they are; a name that is in neither list is a new hook to look at."""

FIELDS = {
    "CacheConfig": {"cache_dtype", "enable_prefix_caching", "prefix_caching_hash_algo"},
    "FullAttentionSpec": {"block_size", "num_kv_heads", "head_size", "dtype"},
    "KVCacheConfig": {"num_blocks", "kv_cache_groups", "hash_block_size"},
    "KVConnectorOutput": {"finished_recving", "failed_recving", "kv_connector_worker_meta"},
    "KVConnectorTransferResults": {"finished_sending", "finished_recving", "failed_recving"},
    "KVTransferConfig": {"engine_id", "kv_load_failure_policy", "kv_connector_extra_config"},
    "LoadConfig": {"load_format"},
    "ModelConfig": {"model", "revision", "quantization", "dtype", "hf_config"},
    "ParallelConfig": {
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "decode_context_parallel_size",
    },
    "SchedulerOutput": {
        "num_scheduled_tokens",
        "scheduled_spec_decode_tokens",
        "preempted_req_ids",
        "kv_connector_block_state",
    },
    "SpeculativeConfig": {"method"},
    "VllmConfig": {
        "cache_config",
        "kv_transfer_config",
        "load_config",
        "model_config",
        "parallel_config",
        "speculative_config",
    },
}


@pytest.fixture(scope="module")
def installed() -> dict[str, Any]:
    python = load_runtime(Workspace.current(), Settings().engine_python).python
    root = Path(__file__).parents[3]
    run = subprocess.run(
        [str(python), str(SCRIPT)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert run.returncode == 0, run.stderr[-2000:]
    answer: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return answer


def test_nothing_that_vllm_requires_is_missing(installed: dict[str, Any]) -> None:
    assert installed["missing"] == []
    assert installed["hma_members"] == ["request_finished_all_groups"]


def test_every_hook_of_the_base_class_is_implemented_or_was_looked_at(
    installed: dict[str, Any],
) -> None:
    ours = installed["overridden"].keys() - {"request_finished_all_groups"}
    assert set(installed["members"]) == ours | LEFT_TO_THE_BASE_CLASS
    assert not ours & LEFT_TO_THE_BASE_CLASS


def test_our_methods_take_what_vllm_passes(installed: dict[str, Any]) -> None:
    assert installed["constructor"] == ["self", "vllm_config", "role", "kv_cache_config"]
    different = {name: pair for name, pair in installed["overridden"].items() if pair[0] != pair[1]}
    assert different == {}


@pytest.mark.parametrize("kind", sorted(FIELDS))
def test_vllms_own_objects_have_what_is_read_of_them(installed: dict[str, Any], kind: str) -> None:
    assert FIELDS[kind] - set(installed["fields"][kind]) == set()


def test_a_request_has_what_is_read_of_it(installed: dict[str, Any]) -> None:
    read = {"request_id", "num_tokens", "block_hashes", "lora_request", "prompt_embeds"}
    assert (read | {"resumable"}) - set(installed["request"]) == set()


def test_the_connector_is_found_by_its_short_name_and_by_its_module(
    installed: dict[str, Any],
) -> None:
    assert installed["registered"] == ["RadixgateConnector", "RadixgateConnector"]


def test_beside_other_connectors_the_hybrid_cache_manager_stays_on(
    installed: dict[str, Any],
) -> None:
    assert installed["supports_hma_as_a_child"] is True
