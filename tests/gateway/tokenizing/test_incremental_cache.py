from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from cache_router.types import TokenIds
from gateway.tokenizing.incremental_cache import IncrementalEncoder, SegmentCache
from gateway.tokenizing.text_cuts import TextCuts
from tests.gateway.tokenizing.model_folders import byte_level, train

WORDS = st.sampled_from(
    (
        "word",
        "<|im_start|>user\n",
        "<|im_end|>\n",
        "it's",
        "x1",
        "日本",
        "😀",
        "\n\n",
        "don't",
        "  ",
    )
)
TEXT = st.lists(st.one_of(WORDS, st.text(max_size=8)), max_size=60).map(" ".join)


class CountingEncoder:
    """Encodes with a tokenizer and remembers what it was asked for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.asked: list[str] = []

    def __call__(self, texts: list[str]) -> Sequence[TokenIds]:
        self.asked += texts
        return [self.whole(text) for text in texts]

    def whole(self, text: str) -> TokenIds:
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        return np.array(ids, dtype=np.uint32)


def encoder_of(
    tokenizer: Tokenizer, cache: SegmentCache, min_segment_chars: int = 16
) -> tuple[IncrementalEncoder, CountingEncoder]:
    counting = CountingEncoder(tokenizer)
    cuts = TextCuts(json.loads(tokenizer.to_str()), min_segment_chars)
    return IncrementalEncoder(counting, cuts, cache), counting


@pytest.fixture(scope="module")
def smollm2(smollm2_folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(smollm2_folder / "tokenizer.json"))


@given(turns=st.lists(TEXT, min_size=1, max_size=5), max_bytes=st.sampled_from([2_000, 1_000_000]))
@settings(max_examples=80, deadline=None)
def test_a_growing_text_encodes_like_a_whole_one(
    smollm2: Tokenizer, turns: list[str], max_bytes: int
) -> None:
    encoder, counting = encoder_of(smollm2, SegmentCache(max_bytes))
    text = ""
    for turn in turns:
        text += turn
        assert np.array_equal(encoder.encode(text), counting.whole(text))


def test_only_what_is_new_is_encoded() -> None:
    encoder, counting = encoder_of(train(byte_level()), SegmentCache(1_000_000))
    first = "one two three four five six seven eight"
    encoder.encode(first)
    counting.asked.clear()
    encoder.encode(first + " nine ten")
    assert sum(map(len, counting.asked)) < len(first)
    assert first.startswith("one two three four")
    assert not any(text.startswith("one") for text in counting.asked)


def test_a_segment_that_occurs_twice_in_a_text_is_encoded_once() -> None:
    encoder, counting = encoder_of(train(byte_level()), SegmentCache(1_000_000))
    text = "0123456789abcdef<|im_end|>" * 3
    assert np.array_equal(encoder.encode(text), counting.whole(text))
    assert counting.asked.count("0123456789abcdef<|im_end|>") == 2


def test_stats_count_segments_and_tokens() -> None:
    cache = SegmentCache(1_000_000)
    encoder, _ = encoder_of(train(byte_level()), cache)
    text = "0123456789abcdef<|im_end|>" + "tail"
    first = encoder.encode(text)
    encoder.encode(text)
    stats = cache.stats()
    assert (stats.hits, stats.misses, stats.num_segments, stats.evictions) == (1, 1, 1, 0)
    tail_tokens = 2 * len(first) - stats.tokens_reused - stats.tokens_encoded
    assert tail_tokens == 0
    assert stats.tokens_reused > 0


def test_the_least_recently_used_segments_make_room() -> None:
    cache = SegmentCache(max_bytes=3_000)
    ids = np.arange(10, dtype=np.uint32)
    for number in range(50):
        cache.keep(0, [f"segment {number}"], [ids])
        assert cache.find(0, ["segment 0"])[0] is not None
        assert cache.stats().used_bytes <= 3_000
    assert cache.stats().evictions > 0
    assert cache.find(0, ["segment 1", "segment 49"])[0] is None
    assert cache.find(0, ["segment 49"])[0] is not None


def test_a_segment_larger_than_the_budget_is_not_kept() -> None:
    cache = SegmentCache(max_bytes=1_000)
    cache.keep(0, ["x" * 2_000], [np.zeros(1, dtype=np.uint32)])
    assert cache.stats().num_segments == 0


def test_keeping_a_segment_again_counts_its_bytes_once() -> None:
    cache = SegmentCache(max_bytes=10_000)
    ids = np.zeros(4, dtype=np.uint32)
    cache.keep(0, ["same"], [ids])
    used = cache.stats().used_bytes
    cache.keep(0, ["same"], [ids])
    assert cache.stats().used_bytes == used


def test_tokenizers_that_share_a_cache_do_not_share_ids() -> None:
    cache = SegmentCache(1_000_000)
    plain, _ = encoder_of(train(byte_level()), cache)
    prefixing, counting = encoder_of(train(byte_level(add_prefix_space=True)), cache)
    text = "0123456789abcdef<|im_end|>more"
    plain.encode(text)
    assert np.array_equal(prefixing.encode(text), counting.whole(text))


def test_threads_may_share_an_encoder() -> None:
    cache = SegmentCache(20_000)
    encoder, counting = encoder_of(train(byte_level()), cache)
    texts = [f"turn {number} of a talk about things " * 9 for number in range(20)]
    expected = [counting.whole(text) for text in texts]
    wrong: list[int] = []
    start = threading.Barrier(4)

    def work() -> None:
        start.wait()
        for _ in range(5):
            wrong.extend(
                number
                for number, text in enumerate(texts)
                if not np.array_equal(encoder.encode(text), expected[number])
            )

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert cache.stats().used_bytes <= 20_000
