"""The tokenizer classes of the engine's library: which one a model gets, and what it builds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, normalizers, pre_tokenizers

from cache_router.errors import TokenizerError
from gateway.tokenizing.tokenizer_files import TokenizerFiles

# Names under which configurations ask for the general class.
_GENERAL_CLASSES = frozenset(
    {"TokenizersBackend", "PreTrainedTokenizer", "PythonBackend", "BloomTokenizer"}
)
# Model types whose tokenizers get the general class, whatever class their configuration names.
_GENERAL_MODEL_TYPES = frozenset(
    {
        "arctic",
        "deepseek_v2",
        "deepseek_v3",
        "ernie4_5",
        "ernie4_5_moe",
        "flex_olmo",
        "glm",
        "glm4",
        "glm4_moe",
        "glm4_moe_lite",
        "gpt_bigcode",
        "granite",
        "granitemoe",
        "granitemoehybrid",
        "granitemoeshared",
        "hyperclovax",
        "internlm2",
        "jamba",
        "kimi_k25",
        "kimi_linear",
        "mimo_v2_flash",
        "minicpm3",
        "minimax_m2",
        "ministral",
        "ministral3",
        "mistral",
        "mistral3",
        "mixtral",
        "nemotron",
        "olmo2",
        "olmo3",
        "olmo_hybrid",
        "persimmon",
        "phi3",
        "phimoe",
        "stablelm",
        "step3p5",
    }
)
# Model types whose class is fixed, whatever class their configuration names.
_FIXED_CLASSES = {
    "hyperclovax_vision_v2": "GPT2Tokenizer",
    "qwen2": "Qwen2Tokenizer",
    "qwen3_5": "Qwen3_5Tokenizer",
    "qwen3_5_moe": "Qwen3_5Tokenizer",
    "qwen3_5_moe_text": "Qwen3_5Tokenizer",
    "qwen4_exp": "Qwen3_5Tokenizer",
}
# Model types that the library maps to no class of their own, so that one without a configured
# class gets the general one.
_UNMAPPED_MODEL_TYPES = frozenset({"llama", "smollm3", "llama4"})

_QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN3_5_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class OwnClass:
    """A class that builds its tokenizer from its own code."""

    normalizer: normalizers.Normalizer | None
    pre_tokenizer: pre_tokenizers.PreTokenizer
    default_tokens: Mapping[str, str]
    """Special tokens that it has where the configuration does not mention them."""
    unk_token: str | None = None
    fuse_unk: bool = False
    byte_fallback: bool = False
    adds_nothing: bool = False
    """Whether it forgets the tokens that `tokenizer.json` puts around a prompt."""


def own_class_name(files: TokenizerFiles) -> str | None:
    """Name the class that the library takes; None is the general one.

    Where it takes either of two, the one with code of its own is named: it has to lead to the
    same tokenizer as the general one to be accepted at all.
    """
    model_type = files.model_config.get("model_type")
    configured = files.config.get("tokenizer_class") or files.model_config.get("tokenizer_class")
    if isinstance(model_type, str):
        if model_type in _GENERAL_MODEL_TYPES:
            return None
        if model_type in _FIXED_CLASSES:
            return _FIXED_CLASSES[model_type]
        if configured is None and model_type in _UNMAPPED_MODEL_TYPES:
            return None
    if not isinstance(configured, str):
        raise TokenizerError("tokenizer_config.json names no tokenizer_class")
    class_name = configured.removesuffix("Fast")
    return None if class_name in _GENERAL_CLASSES else class_name


def own_class(class_name: str, config: Mapping[str, Any]) -> OwnClass:
    """Say what `class_name` builds under a `tokenizer_config.json`.

    Raises:
        TokenizerError: That is not known here.
    """
    prefix_space = bool(config.get("add_prefix_space"))
    end_of_text = "<|endoftext|>"
    ends = {"unk_token": end_of_text, "eos_token": end_of_text}
    if class_name == "GPT2Tokenizer":
        return OwnClass(
            None,
            pre_tokenizers.ByteLevel(add_prefix_space=prefix_space),
            {**ends, "bos_token": end_of_text},
        )
    if class_name in ("Qwen2Tokenizer", "Qwen3_5Tokenizer"):
        words = _QWEN2_WORDS if class_name == "Qwen2Tokenizer" else _QWEN3_5_WORDS
        return OwnClass(
            normalizers.NFC(),
            pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Split(Regex(words), behavior="isolated", invert=False),
                    pre_tokenizers.ByteLevel(add_prefix_space=prefix_space, use_regex=False),
                ]
            ),
            {**ends, "pad_token": end_of_text},
        )
    if class_name == "GPTNeoXTokenizer":
        return OwnClass(
            normalizers.NFC(),
            pre_tokenizers.ByteLevel(
                add_prefix_space=prefix_space, trim_offsets=config.get("trim_offsets", True)
            ),
            {**ends, "bos_token": end_of_text, "pad_token": "<|padding|>"},
            adds_nothing=True,
        )
    if class_name == "GemmaTokenizer":
        return OwnClass(
            normalizers.Replace(" ", "▁"),
            pre_tokenizers.Split(" ", behavior="merged_with_previous", invert=False),
            {
                "unk_token": "<unk>",
                "bos_token": "<bos>",
                "eos_token": "<eos>",
                "pad_token": "<pad>",
                "mask_token": "<mask>",
            },
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    raise TokenizerError(f"what the class {class_name} does to tokenizer.json is not known here")
