"""What an engine's blocks look like, and the namespace that follows from it."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from engine_workers.blocks.namespace import Namespace
from engine_workers.connector.block_layout import BlockLayout, LayerMemory

_CPU_INFO = Path("/proc/cpuinfo")
_VECTOR_EXTENSIONS = ("avx512f", "avx2")


class UnsupportedEngineError(Exception):
    """The engine's KV cache is of a kind that cannot be moved in whole blocks from here."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What an engine says of its KV cache; scheduler and workers say the same."""

    vllm_version: str
    revision: str
    weight_quantization: str
    dtype: str
    kv_dtype: str
    layer_names: tuple[str, ...]
    kv_heads: int
    """Of one rank."""
    head_size: int
    block_size: int
    layer_block_bytes: int
    """Bytes of one block in one layer."""
    attention_isa: str
    """vLLM's name of the kernels' way to pack keys."""
    tp_size: int
    hash_algorithm: str
    hash_seed: str

    @property
    def block_bytes(self) -> int:
        """Bytes of one block's payload, all layers."""
        return self.layer_block_bytes * len(self.layer_names)


@dataclass(frozen=True, slots=True)
class KvTensor:
    """One layer's KV tensor as the engine registered it."""

    address: int
    shape: tuple[int, ...]
    """The first dimension counts blocks."""
    stride_bytes: tuple[int, ...]
    item_bytes: int


def namespace_of(facts: EngineFacts, model: str, tp_rank: int, tenant_salt: str) -> Namespace:
    """Put everything that changes a block's bytes into its namespace.

    Args:
        facts: The engine.
        model: Digest of the model, see `model_digest`.
        tp_rank: Whose part of the blocks.
        tenant_salt: What separates deployments.
    """
    return Namespace(
        model=model,
        revision=facts.revision,
        weight_quantization=facts.weight_quantization,
        dtype=facts.dtype,
        kv_dtype=facts.kv_dtype,
        num_layers=len(facts.layer_names),
        kv_heads=facts.kv_heads,
        head_size=facts.head_size,
        block_size=facts.block_size,
        layout=f"vllm {facts.vllm_version}, layer by layer, {facts.layer_block_bytes} bytes each",
        isa=isa_tag(facts.attention_isa, platform.machine(), cpu_flags(_CPU_INFO)),
        tp_size=facts.tp_size,
        tp_rank=tp_rank,
        hash_algorithm=facts.hash_algorithm,
        hash_seed=facts.hash_seed,
        tenant_salt=tenant_salt,
    )


def isa_tag(attention_isa: str, machine: str, flags: Iterable[str]) -> str:
    """Name what kernels make of a block on this machine.

    Kernels of one name are compiled for several widths of vectors, so that is part of it.
    """
    present = set(flags)
    widest = next((name for name in _VECTOR_EXTENSIONS if name in present), "base")
    return f"{machine}/{widest}/{attention_isa}"


def cpu_flags(cpu_info: Path) -> frozenset[str]:
    """Instruction sets of this machine, as the kernel lists them; empty where it lists none.

    Raises:
        OSError: The list cannot be read.
    """
    for line in cpu_info.read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def block_layout(
    facts: EngineFacts, tensors: Mapping[str, KvTensor], num_blocks: int
) -> BlockLayout:
    """Find each layer's blocks in the registered tensors.

    Args:
        facts: What the engine says.
        tensors: What it registered, by layer name.
        num_blocks: Blocks that the engine allocates from.

    Raises:
        UnsupportedEngineError: A tensor is missing, or is not a row of contiguous blocks of the
            size that the engine says.
    """
    layers: list[LayerMemory] = []
    for name in facts.layer_names:
        tensor = tensors.get(name)
        if tensor is None:
            raise UnsupportedEngineError(f"layer {name} has no KV tensor of its own")
        if tensor.shape[0] < num_blocks:
            raise UnsupportedEngineError(f"layer {name} has {tensor.shape[0]} blocks")
        block_bytes = _contiguous_bytes(tensor)
        if block_bytes != facts.layer_block_bytes:
            raise UnsupportedEngineError(f"layer {name} has blocks of {block_bytes} bytes")
        layers.append(LayerMemory(tensor.address, tensor.stride_bytes[0], block_bytes))
    return BlockLayout(tuple(layers), num_blocks)


def _contiguous_bytes(tensor: KvTensor) -> int:
    """Bytes of one block, 0 if they are not in one piece. The order of dimensions is free."""
    inner = sorted(zip(tensor.stride_bytes[1:], tensor.shape[1:], strict=True))
    expected = tensor.item_bytes
    for stride, length in inner:
        if length != 1 and stride != expected:
            return 0
        expected *= length
    return expected if tensor.stride_bytes[0] >= expected else 0
