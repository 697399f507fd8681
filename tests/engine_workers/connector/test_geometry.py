from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from engine_workers.connector.geometry import (
    EngineFacts,
    KvTensor,
    UnsupportedEngineError,
    block_layout,
    cpu_flags,
    isa_tag,
    namespace_of,
)

FACTS = EngineFacts(
    vllm_version="0.32.0",
    revision="",
    weight_quantization="",
    dtype="float32",
    kv_dtype="auto as float32",
    layer_names=("0", "1"),
    kv_heads=3,
    head_size=64,
    block_size=32,
    layer_block_bytes=3 * 32 * 128 * 4,
    attention_isa="vec",
    tp_size=1,
    hash_algorithm="sha256",
    hash_seed="",
)
BLOCK = 3 * 32 * 128 * 4
TENSOR = KvTensor(4096, (10, 3, 32, 128), (BLOCK, 32 * 128 * 4, 128 * 4, 4), 4)


def test_each_layers_blocks_are_found_in_the_engines_order() -> None:
    second = replace(TENSOR, address=8192)
    layout = block_layout(FACTS, {"1": second, "0": TENSOR, "of a drafter": TENSOR}, 10)
    assert [layer.address for layer in layout.layers] == [4096, 8192]
    assert layout.payload_bytes == 2 * BLOCK == FACTS.block_bytes
    assert layout.holds([0, 9])
    assert not layout.holds([10])
    assert not layout.holds([-1])


def test_blocks_may_lie_apart_and_their_inner_dimensions_in_any_order() -> None:
    apart = replace(TENSOR, stride_bytes=(2 * BLOCK, *TENSOR.stride_bytes[1:]))
    turned = replace(TENSOR, shape=(10, 32, 3, 128), stride_bytes=(BLOCK, 512, 16384, 4))
    layout = block_layout(FACTS, {"0": apart, "1": turned}, 10)
    assert [layer.stride_bytes for layer in layout.layers] == [2 * BLOCK, BLOCK]


@pytest.mark.parametrize(
    ("tensor", "problem"),
    [
        (replace(TENSOR, stride_bytes=(BLOCK, 99999, 512, 4)), "blocks of 0 bytes"),
        (replace(TENSOR, stride_bytes=(4, 163840, 5120, 40)), "blocks of 0 bytes"),
        (replace(TENSOR, shape=(10, 2, 32, 128)), "blocks of 32768 bytes"),
        (replace(TENSOR, shape=(9, 3, 32, 128)), "9 blocks"),
        (None, "no KV tensor"),
    ],
)
def test_what_is_no_row_of_whole_blocks_is_refused(tensor: KvTensor | None, problem: str) -> None:
    tensors = {"0": TENSOR} | ({"1": tensor} if tensor is not None else {})
    with pytest.raises(UnsupportedEngineError, match=problem):
        block_layout(FACTS, tensors, 10)


def test_whatever_changes_bytes_changes_the_namespace() -> None:
    base = namespace_of(FACTS, "m", 0, "")
    others = [
        namespace_of(FACTS, "another", 0, ""),
        namespace_of(FACTS, "m", 1, ""),
        namespace_of(FACTS, "m", 0, "tenant"),
        namespace_of(replace(FACTS, vllm_version="0.33.0"), "m", 0, ""),
        namespace_of(replace(FACTS, dtype="float16"), "m", 0, ""),
        namespace_of(replace(FACTS, kv_dtype="fp8"), "m", 0, ""),
        namespace_of(replace(FACTS, layer_names=("0",)), "m", 0, ""),
        namespace_of(replace(FACTS, attention_isa="amx"), "m", 0, ""),
        namespace_of(replace(FACTS, block_size=64), "m", 0, ""),
        namespace_of(replace(FACTS, tp_size=2), "m", 0, ""),
        namespace_of(replace(FACTS, hash_algorithm="sha256_cbor"), "m", 0, ""),
        namespace_of(replace(FACTS, hash_seed="7"), "m", 0, ""),
    ]
    fingerprints = {namespace.fingerprint for namespace in [base, *others]}
    assert len(fingerprints) == len(others) + 1


def test_the_instruction_set_is_named_with_the_width_of_its_vectors() -> None:
    assert isa_tag("vec", "x86_64", ["sse2", "avx2", "avx512f"]) == "x86_64/avx512f/vec"
    assert isa_tag("vec", "x86_64", ["sse2", "avx2"]) == "x86_64/avx2/vec"
    assert isa_tag("neon", "aarch64", ["asimd"]) == "aarch64/base/neon"


def test_the_machines_instruction_sets_are_read_where_the_kernel_lists_them(
    tmp_path: Path,
) -> None:
    listing = tmp_path / "cpuinfo"
    listing.write_text("processor : 0\nmodel name : x\nflags\t\t: fpu avx2\n\nprocessor : 1\n")
    assert cpu_flags(listing) == {"fpu", "avx2"}
    listing.write_text("processor : 0\nFeatures\t: fp asimd\n")
    assert cpu_flags(listing) == {"fp", "asimd"}
    listing.write_text("processor : 0\n")
    assert cpu_flags(listing) == frozenset()
