from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cache_router.errors import TokenizerError
from gateway.tokenizing.library_classes import own_class, own_class_name
from gateway.tokenizing.tokenizer_files import TokenizerFiles


def files(model_type: str | None, class_name: str | None, **model: Any) -> TokenizerFiles:
    return TokenizerFiles(
        Path("m"), {}, {"tokenizer_class": class_name}, {"model_type": model_type, **model}, {}
    )


@pytest.mark.parametrize(
    ("model_type", "configured", "expected"),
    [
        ("llama", "PreTrainedTokenizerFast", None),
        ("llama", "TokenizersBackend", None),
        ("llama", None, None),
        ("llama", "GPT2TokenizerFast", "GPT2Tokenizer"),
        ("mistral", "LlamaTokenizer", None),
        ("qwen2", "PreTrainedTokenizerFast", "Qwen2Tokenizer"),
        ("qwen3", "Qwen2TokenizerFast", "Qwen2Tokenizer"),
        (None, "GPT2Tokenizer", "GPT2Tokenizer"),
    ],
)
def test_the_class_follows_from_model_type_and_configuration(
    model_type: str | None, configured: str | None, expected: str | None
) -> None:
    assert own_class_name(files(model_type, configured)) == expected


def test_the_model_s_configuration_may_name_the_class_as_well() -> None:
    assert own_class_name(files("x", None, tokenizer_class="GPT2Tokenizer")) == "GPT2Tokenizer"


def test_without_any_name_nothing_is_guessed() -> None:
    with pytest.raises(TokenizerError, match="names no tokenizer_class"):
        own_class_name(files("new_model", None))


def test_what_an_unknown_class_builds_is_not_guessed() -> None:
    with pytest.raises(TokenizerError, match="NewTokenizer"):
        own_class("NewTokenizer", {})


def test_a_prefix_space_is_built_in_where_it_is_configured() -> None:
    with_space = own_class("GPT2Tokenizer", {"add_prefix_space": True}).pre_tokenizer
    without = own_class("GPT2Tokenizer", {}).pre_tokenizer
    assert with_space.pre_tokenize_str("a")[0][0] == "Ġa"
    assert without.pre_tokenize_str("a")[0][0] == "a"
