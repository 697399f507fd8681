"""What an engine's configuration says of its blocks, and which engines and requests are served.

Nothing is imported from vLLM here: its objects are only read, by the names that the contract test
looks for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine_workers.connector.geometry import EngineFacts, UnsupportedEngineError

_HASHES = ("sha256", "sha256_cbor")
_SPEC = "FullAttentionSpec"


@dataclass(frozen=True, slots=True)
class EngineBuild:
    """What the installed vLLM is, apart from how it was configured."""

    vllm_version: str
    is_cpu: bool
    attention_isa: Callable[[Any, int, int, str], str]
    """Names the kernels' way to pack keys, by dtype, block size, head size and KV dtype."""
    hash_seed: Callable[[str], str]
    """The seed of a hash algorithm's chain."""


def supported_facts(vllm_config: Any, kv_cache_config: Any, build: EngineBuild) -> EngineFacts:
    """Read the facts off vLLM's configuration.

    Raises:
        UnsupportedEngineError: The engine is of a kind that is not served.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    parallel, groups = vllm_config.parallel_config, kv_cache_config.kv_cache_groups
    speculative = vllm_config.speculative_config
    if not build.is_cpu:
        raise UnsupportedEngineError("its KV cache is in device memory")
    if len(groups) != 1 or type(groups[0].kv_cache_spec).__name__ != _SPEC:
        raise UnsupportedEngineError("its KV cache is not one group of full attention")
    spec = groups[0].kv_cache_spec
    if kv_cache_config.hash_block_size not in (None, spec.block_size):
        raise UnsupportedEngineError("it hashes blocks of another size than it stores")
    if parallel.pipeline_parallel_size * parallel.decode_context_parallel_size != 1:
        raise UnsupportedEngineError("its layers or tokens are divided among devices")
    if speculative is not None and speculative.method != "ngram":
        raise UnsupportedEngineError("it drafts tokens with layers of their own")
    if not cache.enable_prefix_caching or cache.prefix_caching_hash_algo not in _HASHES:
        raise UnsupportedEngineError(f"prefix caching has to be on, by one of {_HASHES}")
    if vllm_config.load_config.load_format == "dummy":
        raise UnsupportedEngineError("its weights are made up")
    return EngineFacts(
        vllm_version=build.vllm_version,
        revision=model.revision or "",
        weight_quantization=model.quantization or "",
        dtype=str(model.dtype),
        kv_dtype=f"{cache.cache_dtype} as {spec.dtype}",
        layer_names=tuple(groups[0].layer_names),
        kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        block_size=spec.block_size,
        layer_block_bytes=spec.page_size_bytes,
        attention_isa=build.attention_isa(
            model.dtype, spec.block_size, spec.head_size, cache.cache_dtype
        ),
        tp_size=parallel.tensor_parallel_size,
        hash_algorithm=cache.prefix_caching_hash_algo,
        hash_seed=build.hash_seed(cache.prefix_caching_hash_algo),
    )


def is_served(request: Any) -> bool:
    """Whether a request's blocks are what their hashes say, on any engine and at any time.

    An adapter is hashed by its name and path, which another training may have; embeddings given in
    place of tokens leave nothing to check; a streaming prompt changes after it was looked up.
    """
    return (
        request.lora_request is None
        and request.prompt_embeds is None
        and not request.resumable
        and not request.skip_reading_prefix_cache
    )
