from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers

from gateway.tokenizing.text_cuts import TextCuts
from tests.gateway.tokenizing.model_folders import (
    LLAMA3_WORDS,
    QWEN2_WORDS,
    SPECIALS,
    byte_level,
    digits_then_byte_level,
    train,
    words_then_bytes,
)

NFC = normalizers.NFC()
ODD_TOKENS = (
    AddedToken("<a", normalized=False),
    AddedToken("<a>", normalized=False),
    AddedToken("<a>b", normalized=False),
    AddedToken("x<|im", normalized=False),
    AddedToken("##", normalized=False),
    AddedToken("é!", normalized=True),
    AddedToken("[L]", normalized=False, lstrip=True),
)
TOKENIZERS = {
    "gpt2": train(byte_level()),
    "gpt2 with a prefix space": train(byte_level(add_prefix_space=True)),
    "digits": train(digits_then_byte_level()),
    "qwen2": train(words_then_bytes(QWEN2_WORDS), NFC),
    "llama3": train(words_then_bytes(LLAMA3_WORDS)),
    "odd tokens": train(byte_level(), NFC, ODD_TOKENS),
    "odd tokens, nfd": train(words_then_bytes(LLAMA3_WORDS), normalizers.NFD(), ODD_TOKENS),
    "right stripping": train(byte_level(), None, [AddedToken("[R]", rstrip=True)]),
    "whole words": train(byte_level(), None, [AddedToken("[W]", single_word=True)]),
    "spaces inside": train(byte_level(), None, [AddedToken("the end", normalized=False)]),
    "metaspace, always": train(pre_tokenizers.Metaspace(prepend_scheme="always")),
    "metaspace, first": train(pre_tokenizers.Metaspace(prepend_scheme="first")),
    "prepended": train(byte_level(), normalizers.Prepend("_")),
    "unknown words": train(words_then_bytes(r"\w+ \w+|\s+|[^\s\w]+")),
    "lower case": train(byte_level(), normalizers.Lowercase()),
}
FRAGMENTS = (
    *SPECIALS,
    *(token.content for token in ODD_TOKENS),
    "[R]",
    "[W]",
    "the end",
    "<|im_",
    "_start|>",
    "x",
    "a b",
    " ",
    "  ",
    "\n",
    "\r\n",
    "\t ",
    "'s ",
    "it's",
    "12",
    "345 6",
    "a\u0301",
    " \u0301",
    "\u212a k",
    "\u00a0",
    "\u3000",
    "日本",
    "😀",
    ".",
    "?!",
    "-",
    "Hello World",
)
TEXT = st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=6)), max_size=40).map(
    "".join
)


def cuts_of(tokenizer: Tokenizer, min_segment_chars: int = 1) -> TextCuts:
    return TextCuts(json.loads(tokenizer.to_str()), min_segment_chars)


def encode(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=TEXT)
@settings(max_examples=80, deadline=None)
def test_segments_encoded_alone_give_the_tokens_of_the_whole(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    segments = list(cuts_of(tokenizer).segments(text))
    assert "".join(segments) == text
    ids = [token for segment in segments for token in encode(tokenizer)(segment)]
    assert ids == encode(tokenizer)(text)


@given(text=TEXT, more=TEXT)
@settings(max_examples=200, deadline=None)
def test_texts_that_begin_alike_begin_with_the_same_segments(text: str, more: str) -> None:
    cuts = cuts_of(TOKENIZERS["odd tokens"], 8)
    *closed, _ = cuts.segments(text)
    assert list(cuts.segments(text + more))[: len(closed)] == closed


def test_words_and_special_tokens_are_cut_behind_the_minimum_length() -> None:
    cuts = cuts_of(TOKENIZERS["gpt2"], 4)
    assert list(cuts.segments("one two three")) == ["one two", " three"]
    assert list(cuts.segments("日本語日本<|im_end|>日本")) == ["日本語日本<|im_end|>", "日本"]
    assert list(cuts.segments("")) == [""]


@pytest.mark.parametrize("name", ["whole words", "metaspace, first"])
def test_nothing_is_cut_where_context_matters(name: str) -> None:
    text = "word <|im_end|> " * 9
    assert list(cuts_of(TOKENIZERS[name]).segments(text)) == [text]


@pytest.mark.parametrize(
    "name", ["right stripping", "spaces inside", "metaspace, always", "unknown words", "lower case"]
)
def test_only_special_tokens_are_cut_behind_where_words_may_run_on(name: str) -> None:
    segments = list(cuts_of(TOKENIZERS[name]).segments("a b c <|im_end|> a b c"))
    assert segments == ["a b c <|im_end|>", " a b c"]


def test_tokens_that_others_may_overlap_are_not_cut_behind() -> None:
    cuts = cuts_of(TOKENIZERS["odd tokens"])
    for text in ("日<a>日", "日<a日", "日##日", "日x<|im日"):
        assert list(cuts.segments(text)) == [text]
