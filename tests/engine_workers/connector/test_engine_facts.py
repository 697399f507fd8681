from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from engine_workers.connector.engine_facts import EngineBuild, is_served, supported_facts
from engine_workers.connector.geometry import UnsupportedEngineError

BUILD = EngineBuild(
    vllm_version="0.32.0",
    is_cpu=True,
    attention_isa=lambda dtype, block_size, head_size, kv_dtype: "vec",
    hash_seed=lambda algorithm: "seed",
)


@dataclass
class FullAttentionSpec:
    block_size: int = 32
    num_kv_heads: int = 3
    head_size: int = 64
    dtype: str = "float32"
    page_size_bytes: int = 49152


class MLAAttentionSpec(FullAttentionSpec):
    """A kind of its own, although it inherits."""


def vllm_config() -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(revision=None, quantization=None, dtype="float32"),
        cache_config=SimpleNamespace(
            enable_prefix_caching=True, prefix_caching_hash_algo="sha256", cache_dtype="auto"
        ),
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=1, decode_context_parallel_size=1, tensor_parallel_size=2
        ),
        speculative_config=None,
        load_config=SimpleNamespace(load_format="auto"),
    )


def group(spec: Any) -> Any:
    return SimpleNamespace(kv_cache_spec=spec, layer_names=["0", "1"])


def kv_cache_config(*specs: Any) -> Any:
    return SimpleNamespace(kv_cache_groups=[group(spec) for spec in specs], hash_block_size=32)


def test_an_engine_of_one_group_of_full_attention_is_served() -> None:
    facts = supported_facts(vllm_config(), kv_cache_config(FullAttentionSpec()), BUILD)
    assert (facts.block_bytes, facts.tp_size, facts.hash_seed) == (2 * 49152, 2, "seed")


def engine(**changes: Any) -> Any:
    config = vllm_config()
    for name, value in changes.items():
        section, _, field = name.partition("__")
        if field:
            setattr(getattr(config, section), field, value)
        else:
            setattr(config, section, value)
    return config


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (engine(parallel_config__pipeline_parallel_size=2), "divided among devices"),
        (engine(parallel_config__decode_context_parallel_size=2), "divided among devices"),
        (engine(speculative_config=SimpleNamespace(method="eagle3")), "drafts tokens"),
        (engine(cache_config__enable_prefix_caching=False), "prefix caching has to be on"),
        (engine(cache_config__prefix_caching_hash_algo="xxhash"), "prefix caching has to be on"),
        (engine(load_config__load_format="dummy"), "made up"),
    ],
)
def test_what_could_be_wrong_is_refused_with_its_reason(config: Any, problem: str) -> None:
    with pytest.raises(UnsupportedEngineError, match=problem):
        supported_facts(config, kv_cache_config(FullAttentionSpec()), BUILD)


@pytest.mark.parametrize(
    "specs", [(), (FullAttentionSpec(), FullAttentionSpec()), (MLAAttentionSpec(),)]
)
def test_other_kinds_of_kv_cache_are_refused(specs: tuple[Any, ...]) -> None:
    with pytest.raises(UnsupportedEngineError, match="one group of full attention"):
        supported_facts(vllm_config(), kv_cache_config(*specs), BUILD)


def test_hashes_of_another_size_than_blocks_are_refused() -> None:
    with pytest.raises(UnsupportedEngineError, match="another size"):
        supported_facts(vllm_config(), kv_cache_config(FullAttentionSpec(block_size=64)), BUILD)


def test_memory_of_a_device_is_refused() -> None:
    with pytest.raises(UnsupportedEngineError, match="device memory"):
        supported_facts(
            vllm_config(), kv_cache_config(FullAttentionSpec()), replace(BUILD, is_cpu=False)
        )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lora_request", object()),
        ("prompt_embeds", object()),
        ("resumable", True),
        ("skip_reading_prefix_cache", True),
    ],
)
def test_requests_whose_hashes_do_not_say_all_are_left_alone(field: str, value: object) -> None:
    plain = {
        "lora_request": None,
        "prompt_embeds": None,
        "resumable": False,
        "skip_reading_prefix_cache": False,
    }
    assert is_served(SimpleNamespace(**plain))
    assert not is_served(SimpleNamespace(**(plain | {field: value})))
