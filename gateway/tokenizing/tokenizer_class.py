"""What the engine's tokenizer library makes of a model folder: `tokenizer.json` itself, or not.

The library takes `tokenizer.json` as it is for its general class. For classes named after a model
it takes the vocabulary only and builds the rest from its own code, so a file that says something
else is overruled there. And it adds tokens that only `tokenizer_config.json` knows. A folder is
accepted where all this leads to the very tokenizer that the file describes; else it is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from cache_router.errors import TokenizerError
from gateway.tokenizing.library_classes import OwnClass, own_class, own_class_name
from gateway.tokenizing.tokenizer_files import TokenizerFiles, added_tokens

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
    class_name = own_class_name(files)
    if class_name is not None:
        built = own_class(class_name, files.config)
        special_tokens = {
            **{
                name: text
                for name, text in built.default_tokens.items()
                # A token that is configured as null is configured.
                if name not in files.config
            },
            **special_tokens,
        }
        _check_pipeline(built, class_name, tokenizer, files)
        _check_rebuilt_tokens(files, tokens, special_tokens)
    known = {token.get("content") for token in tokens}
    for text in [*special_tokens.values(), *files.unnamed_special_tokens]:
        if text not in known:
            raise TokenizerError(f"the special token {text!r} is none of tokenizer.json's")
    return special_tokens


def _check_pipeline(
    built: OwnClass, class_name: str, tokenizer: Tokenizer, files: TokenizerFiles
) -> None:
    model = files.backend.get("model")
    if not isinstance(model, dict) or model.get("type") != "BPE":
        raise TokenizerError(f"{class_name} makes another kind of model than tokenizer.json has")
    expected = {
        "unk_token": built.unk_token,
        "fuse_unk": built.fuse_unk,
        "byte_fallback": built.byte_fallback,
        "dropout": None,
        "ignore_merges": False,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
    }
    # Absent, null, empty and false all mean that it is off.
    differing = [
        key for key, value in expected.items() if (model.get(key) or None) != (value or None)
    ]
    if _state(tokenizer.normalizer) != _state(built.normalizer):
        differing.append("normalizer")
    if _state(tokenizer.pre_tokenizer) != _state(built.pre_tokenizer):
        differing.append("pre_tokenizer")
    if built.adds_nothing and tokenizer.num_special_tokens_to_add(is_pair=False):
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
