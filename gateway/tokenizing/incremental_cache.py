"""A conversation that grows is not tokenized again from its start.

A text is cut into segments at places where cutting is exact (`text_cuts`), and the token ids of
segments are kept. Texts that begin alike begin with the same segments, so of the next turn of a
conversation only what is new is encoded. Since a segment's ids do not depend on what precedes it,
it serves wherever it occurs again; and it is looked up by its very text, never by a hash.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from cache_router.types import TokenIds
from gateway.tokenizing.text_cuts import TextCuts

# What an entry costs besides its text and ids: key, array header, place in the table.
_ENTRY_BYTES = 320

Encode = Callable[[list[str]], Sequence[TokenIds]]
"""Encodes texts, each by itself, without what stands around a prompt."""


@dataclass(frozen=True, slots=True)
class CacheStats:
    """What the cache did so far, and what it holds."""

    hits: int
    """Segments whose ids were known."""
    misses: int
    """Segments that had to be encoded and are kept."""
    tokens_reused: int
    tokens_encoded: int
    """Tokens that were computed, of the unfinished last segments too."""
    evictions: int
    num_segments: int
    used_bytes: int


class SegmentCache:
    """Token ids of text segments for all tokenizers together, least recently used out first.

    Any thread may use it.
    """

    def __init__(self, max_bytes: int) -> None:
        """Hold at most `max_bytes`, texts, ids and bookkeeping together."""
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._entries: OrderedDict[tuple[int, str], TokenIds] = OrderedDict()
        self._used_bytes = 0
        self._hits = 0
        self._misses = 0
        self._evictions = 0
        self._tokens_reused = 0
        self._tokens_encoded = 0

    def stats(self) -> CacheStats:
        """Take all counters at one moment."""
        with self._lock:
            return CacheStats(
                hits=self._hits,
                misses=self._misses,
                tokens_reused=self._tokens_reused,
                tokens_encoded=self._tokens_encoded,
                evictions=self._evictions,
                num_segments=len(self._entries),
                used_bytes=self._used_bytes,
            )

    def find(self, namespace: int, segments: Sequence[str]) -> list[TokenIds | None]:
        """Look up `segments` of a tokenizer, in order; None for an unknown one."""
        with self._lock:
            found = [self._entries.get((namespace, segment)) for segment in segments]
            for segment, ids in zip(segments, found, strict=True):
                if ids is None:
                    self._misses += 1
                else:
                    self._hits += 1
                    self._tokens_reused += len(ids)
                    self._entries.move_to_end((namespace, segment))
        return found

    def keep(self, namespace: int, segments: Sequence[str], encoded: Sequence[TokenIds]) -> None:
        """Remember the ids of `segments`; what would not fit at all is not kept."""
        with self._lock:
            for segment, ids in zip(segments, encoded, strict=True):
                size = _size_of(segment, ids)
                if size > self._max_bytes or (namespace, segment) in self._entries:
                    continue
                self._entries[namespace, segment] = ids
                self._used_bytes += size
            while self._used_bytes > self._max_bytes:
                (_, old_segment), old_ids = self._entries.popitem(last=False)
                self._used_bytes -= _size_of(old_segment, old_ids)
                self._evictions += 1

    def count_encoded(self, num_tokens: int) -> None:
        """Count tokens that had to be computed."""
        with self._lock:
            self._tokens_encoded += num_tokens


class IncrementalEncoder:
    """Encodes texts with one tokenizer, and only those segments that the cache does not know."""

    _namespaces = itertools.count()

    def __init__(self, encode: Encode, cuts: TextCuts, cache: SegmentCache) -> None:
        """Encode with `encode`, cut with `cuts` of the same tokenizer, share `cache`."""
        self._encode = encode
        self._cuts = cuts
        self._cache = cache
        self._namespace = next(self._namespaces)

    def encode(self, text: str) -> TokenIds:
        """Give the ids that `encode` gives for the whole of `text`."""
        *closed, tail = self._cuts.segments(text)
        known = self._cache.find(self._namespace, closed)
        new = list(
            dict.fromkeys(
                segment for segment, ids in zip(closed, known, strict=True) if ids is None
            )
        )
        # The tail ends where the text ends, in the middle of a word maybe, so it is not kept.
        *encoded, tail_ids = self._encode([*new, tail])
        self._cache.count_encoded(sum(map(len, encoded)) + len(tail_ids))
        self._cache.keep(self._namespace, new, encoded)
        fresh = dict(zip(new, encoded, strict=True))
        parts = [
            fresh[segment] if ids is None else ids
            for segment, ids in zip(closed, known, strict=True)
        ]
        return np.concatenate([*parts, tail_ids]) if parts else tail_ids


def _size_of(segment: str, ids: TokenIds) -> int:
    return sys.getsizeof(segment) + ids.nbytes + _ENTRY_BYTES
