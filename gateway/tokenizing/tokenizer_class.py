"""What the engine's tokenizer library makes of a model folder: `tokenizer.json` itself, or not.

The library takes `tokenizer.json` as it is for its general class. For classes named after a model
it takes the vocabulary only and builds the rest from its own code, so a file that says something
else is overruled there. And it adds tokens that only `tokenizer_config.json` knows. A folder is
accepted where all this leads to the very tokenizer that the file describes; else it is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

from cache_router.errors import TokenizerError
from gateway.tokenizing.tokenizer_files import TokenizerFiles, added_tokens

# Names under which configurations ask for the general class.
_GENERAL_CLASSES = frozenset(
    {"TokenizersBackend", "PreTrainedTokenizer", "PythonBackend", "BloomTokenizer"}
)
# Model types whose tokenizers get the general class, whatever class their configuration names.
_GENERAL_MODEL_TYPES = frozenset(
    {
        "deepseek_v2",
        "deepseek_v3",
        "ernie4_5",
        "ernie4_5_moe",
        "glm4",
        "glm4_moe",
        "glm4_moe_lite",
        "granite",
        "granitemoe",
        "granitemoehybrid",
        "internlm2",
        "jamba",
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
# Architectures that the engine renders with code of its own instead of a chat template.
_CODE_RENDERED = frozenset(
    {
        "DeepseekV32ForCausalLM",
        "DeepseekV41ForCausalLM",
        "DeepseekV4ForCausalLM",
        "DeepseekV4ForConditionalGeneration",
        "GptOssForCausalLM",
        "InklingForCausalLM",
        "InklingForConditionalGeneration",
        "KimiK3ForConditionalGeneration",
        "MoonshotKimiaForCausalLM",
    }
)
# Settings that change what is encoded, in ways that are not rebuilt here.
_REFUSED_SETTINGS = (
    "auto_map",
    "fast_tokenizer_files",
    "fix_mistral_regex",
    "init_inputs",
    "split_special_tokens",
)
_TOKEN_FLAGS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
_PLAIN_SPECIAL = (False, False, False, False, True)

_QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN3_5_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _OwnClass:
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


def resolve_special_tokens(files: TokenizerFiles, tokenizer: Tokenizer) -> dict[str, str]:
    """Check that the engine encodes exactly as `tokenizer` does, `files`' `tokenizer.json` loaded.

    Returns:
        Texts of the named special tokens, as a chat template may read them.

    Raises:
        TokenizerError: It does not, or that cannot be told.
    """
    architectures = files.model_config.get("architectures") or []
    if not _CODE_RENDERED.isdisjoint(architectures):
        raise TokenizerError(f"the engine renders {architectures[0]} without a chat template")
    if files.model_config.get("is_encoder_decoder"):
        raise TokenizerError("the model has an encoder, which gets a prompt of its own")
    for setting in _REFUSED_SETTINGS:
        if files.config.get(setting):
            raise TokenizerError(f"tokenizer_config.json sets `{setting}`")
    tokens = added_tokens(files.backend)
    _check_configured_tokens(files.config.get("added_tokens_decoder"), tokens)
    special_tokens = files.special_tokens
    class_name = _class_name(files)
    if class_name is not None:
        own_class = _own_class(class_name, files.config)
        special_tokens = {
            **{
                name: text
                for name, text in own_class.default_tokens.items()
                # A token that is configured as null is configured.
                if name not in files.config
            },
            **special_tokens,
        }
        _check_pipeline(own_class, class_name, tokenizer, files)
        _check_rebuilt_tokens(files, tokens, special_tokens)
    known = {token.get("content") for token in tokens}
    for text in [*special_tokens.values(), *files.unnamed_special_tokens]:
        if text not in known:
            raise TokenizerError(f"the special token {text!r} is none of tokenizer.json's")
    return special_tokens


def _class_name(files: TokenizerFiles) -> str | None:
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


def _own_class(class_name: str, config: Mapping[str, Any]) -> _OwnClass:
    prefix_space = bool(config.get("add_prefix_space"))
    end_of_text = "<|endoftext|>"
    ends = {"unk_token": end_of_text, "eos_token": end_of_text}
    if class_name == "GPT2Tokenizer":
        return _OwnClass(
            None,
            pre_tokenizers.ByteLevel(add_prefix_space=prefix_space),
            {**ends, "bos_token": end_of_text},
        )
    if class_name in ("Qwen2Tokenizer", "Qwen3_5Tokenizer"):
        words = _QWEN2_WORDS if class_name == "Qwen2Tokenizer" else _QWEN3_5_WORDS
        return _OwnClass(
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
        return _OwnClass(
            normalizers.NFC(),
            pre_tokenizers.ByteLevel(
                add_prefix_space=prefix_space, trim_offsets=config.get("trim_offsets", True)
            ),
            {**ends, "bos_token": end_of_text, "pad_token": "<|padding|>"},
            adds_nothing=True,
        )
    if class_name == "GemmaTokenizer":
        return _OwnClass(
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


def _check_pipeline(
    own_class: _OwnClass, class_name: str, tokenizer: Tokenizer, files: TokenizerFiles
) -> None:
    model = files.backend.get("model")
    if not isinstance(model, dict) or model.get("type") != "BPE":
        raise TokenizerError(f"{class_name} makes another kind of model than tokenizer.json has")
    expected = {
        "unk_token": own_class.unk_token,
        "fuse_unk": own_class.fuse_unk,
        "byte_fallback": own_class.byte_fallback,
        "dropout": None,
        "ignore_merges": False,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
    }
    # Absent, null, empty and false all mean that it is off.
    differing = [
        key for key, value in expected.items() if (model.get(key) or None) != (value or None)
    ]
    if _state(tokenizer.normalizer) != _state(own_class.normalizer):
        differing.append("normalizer")
    if _state(tokenizer.pre_tokenizer) != _state(own_class.pre_tokenizer):
        differing.append("pre_tokenizer")
    if own_class.adds_nothing and tokenizer.num_special_tokens_to_add(is_pair=False):
        differing.append("post_processor")
    if differing:
        raise TokenizerError(f"{class_name} overrules tokenizer.json: {', '.join(differing)}")


def _state(component: Any) -> bytes | None:
    return None if component is None else component.__getstate__()


def _check_configured_tokens(configured: object, tokens: Sequence[Mapping[str, Any]]) -> None:
    """Refuse tokens that only the configuration has: the library would add or change them."""
    if configured is None:
        return
    known = {_signature(token.get("id"), token) for token in tokens}
    if not isinstance(configured, dict) or not all(
        token_id.isdecimal() and isinstance(token, dict) for token_id, token in configured.items()
    ):
        raise TokenizerError("tokenizer_config.json: `added_tokens_decoder` is malformed")
    for token_id, token in configured.items():
        if _signature(int(token_id), token) not in known:
            raise TokenizerError(
                f"tokenizer_config.json describes token {token_id} unlike tokenizer.json"
            )


def _check_rebuilt_tokens(
    files: TokenizerFiles,
    tokens: Sequence[Mapping[str, Any]],
    special_tokens: Mapping[str, str],
) -> None:
    """Refuse added tokens that a rebuild loses, or gives another id or other flags."""
    configured = files.config.get("added_tokens_decoder")
    if configured is not None and len(configured) != len(tokens):
        raise TokenizerError("tokenizer.json has added tokens that tokenizer_config.json has not")
    vocabulary = files.backend["model"].get("vocab")
    if not isinstance(vocabulary, dict):
        raise TokenizerError("tokenizer.json: `vocab` is malformed")
    appended = sorted(token["id"] for token in tokens if token.get("content") not in vocabulary)
    if appended != list(range(len(vocabulary), len(vocabulary) + len(appended))):
        raise TokenizerError("the ids of tokenizer.json's added tokens have gaps")
    names = {*special_tokens.values(), *files.unnamed_special_tokens}
    for token in tokens:
        if token.get("content") in names and _signature(0, token)[2:] != _PLAIN_SPECIAL:
            raise TokenizerError(f"the special token {token.get('content')!r} has flags of its own")


def _signature(token_id: object, token: Mapping[str, Any]) -> tuple[object, ...]:
    flags = [token.get(flag) or False for flag in _TOKEN_FLAGS]
    return (token_id, *flags)
