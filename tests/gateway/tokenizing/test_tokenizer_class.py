from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers

from cache_router.errors import TokenizerError
from gateway.tokenizing.tokenizer_class import resolve_special_tokens
from gateway.tokenizing.tokenizer_files import read_tokenizer_files
from tests.gateway.tokenizing.model_folders import (
    QWEN2_WORDS,
    byte_level,
    digits_then_byte_level,
    train,
    words_then_bytes,
    write_folder,
)

END_OF_TEXT = "<|endoftext|>"
NFC = normalizers.NFC()


def token(content: str, **flags: bool) -> dict[str, Any]:
    off = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"content": content, **off, "special": True, **flags}


def resolve(
    folder: Path,
    tokenizer: Tokenizer,
    class_name: str | None,
    model: dict[str, Any] | str,
    **config: Any,
) -> dict[str, str]:
    model_config = {"model_type": model} if isinstance(model, str) else model
    settings = {"tokenizer_class": class_name, "bos_token": "<|im_start|>", **config}
    write_folder(folder, tokenizer, settings, config=model_config)
    return resolve_special_tokens(read_tokenizer_files(folder, None), tokenizer)


@pytest.mark.parametrize(
    ("class_name", "model_type"),
    [
        ("PreTrainedTokenizerFast", "llama"),
        ("TokenizersBackend", "qwen3"),
        ("LlamaTokenizerFast", "mistral"),
        ("GPT2Tokenizer", "granite"),
        (None, "llama"),
        (None, "mistral"),
    ],
)
def test_the_general_class_takes_any_tokenizer_file(
    tmp_path: Path, class_name: str | None, model_type: str
) -> None:
    tokenizer = train(pre_tokenizers.Metaspace())
    tokens = resolve(tmp_path, tokenizer, class_name, model_type)
    assert tokens == {"bos_token": "<|im_start|>"}


def test_a_class_of_its_own_is_accepted_where_it_builds_the_same(tmp_path: Path) -> None:
    gpt2 = resolve(tmp_path / "a", train(byte_level()), "GPT2TokenizerFast", "gpt2")
    assert gpt2 == {
        "bos_token": "<|im_start|>",
        "eos_token": END_OF_TEXT,
        "unk_token": END_OF_TEXT,
    }
    qwen = train(words_then_bytes(QWEN2_WORDS), NFC)
    tokens = resolve(tmp_path / "b", qwen, "Qwen2Tokenizer", "qwen3", eos_token=None)
    assert tokens["pad_token"] == END_OF_TEXT
    assert "eos_token" not in tokens


@pytest.mark.parametrize(
    ("tokenizer", "class_name", "overruled"),
    [
        (train(digits_then_byte_level()), "GPT2Tokenizer", "pre_tokenizer"),
        (train(byte_level(), NFC), "GPT2Tokenizer", "normalizer"),
        (train(byte_level(add_prefix_space=True)), "GPT2Tokenizer", "pre_tokenizer"),
        (train(byte_level()), "Qwen2Tokenizer", "normalizer, pre_tokenizer"),
        (train(byte_level(), NFC, adds_bos=True), "GPTNeoXTokenizer", "post_processor"),
        (train(byte_level()), "GemmaTokenizer", "unk_token, fuse_unk, byte_fallback"),
        (train(pre_tokenizers.Metaspace()), "LlamaTokenizer", "not known here"),
    ],
)
def test_a_class_that_builds_something_else_is_refused(
    tmp_path: Path, tokenizer: Tokenizer, class_name: str, overruled: str
) -> None:
    with pytest.raises(TokenizerError, match=overruled):
        resolve(tmp_path, tokenizer, class_name, "llama")


def test_a_model_type_with_a_fixed_class_is_judged_by_that(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="Qwen2Tokenizer overrules"):
        resolve(tmp_path, train(byte_level()), "PreTrainedTokenizerFast", "qwen2")


def test_without_a_class_name_only_known_model_types_are_accepted(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="names no tokenizer_class"):
        resolve(tmp_path, train(byte_level()), None, "qwen3")


@pytest.mark.parametrize(
    "setting",
    [
        {"auto_map": {"AutoTokenizer": ["a", "b"]}},
        {"split_special_tokens": True},
        {"fix_mistral_regex": True},
        {"fast_tokenizer_files": ["tokenizer.4.0.json"]},
        {"init_inputs": ["x"]},
        {"pad_token": "[PAD]"},
        {"pad_token": "The"},
        {"pad_token": {"content": "<|im_end|>"}},
        {"additional_special_tokens": ["<unknown>"]},
        {"added_tokens_decoder": {"0": token(END_OF_TEXT, rstrip=True)}},
        {"added_tokens_decoder": {"7": token(END_OF_TEXT)}},
        {"added_tokens_decoder": {"x": token(END_OF_TEXT)}},
        {"added_tokens_decoder": []},
    ],
)
def test_settings_that_change_what_is_encoded_are_refused(
    tmp_path: Path, setting: dict[str, Any]
) -> None:
    with pytest.raises(TokenizerError):
        resolve(tmp_path, train(byte_level()), "PreTrainedTokenizerFast", "llama", **setting)


def test_a_rebuilt_tokenizer_must_not_lose_or_change_added_tokens(tmp_path: Path) -> None:
    decoder = {str(i): token(text) for i, text in enumerate((END_OF_TEXT, "<|im_start|>"))}
    with pytest.raises(TokenizerError, match="has not"):
        resolve(
            tmp_path / "a", train(byte_level()), "GPT2Tokenizer", "x", added_tokens_decoder=decoder
        )
    stripping = train(byte_level())
    stripping.add_special_tokens([AddedToken("<|im_start|>", lstrip=True)])
    with pytest.raises(TokenizerError, match="flags of its own"):
        resolve(tmp_path / "b", stripping, "GPT2Tokenizer", "x")


@pytest.mark.parametrize(
    "model",
    [
        {"model_type": "llama", "is_encoder_decoder": True},
        {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"]},
    ],
)
def test_models_that_the_engine_renders_in_another_way_are_refused(
    tmp_path: Path, model: dict[str, Any]
) -> None:
    with pytest.raises(TokenizerError):
        resolve(tmp_path, train(byte_level()), "PreTrainedTokenizerFast", model)
