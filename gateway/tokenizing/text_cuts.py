"""Where a text may be cut so that its parts, encoded alone, give the tokens of the whole.

Two kinds of places are exact for the tokenizers accepted here, whatever stands around them:

- *Behind an added token* that no other can overlap. Added tokens are found in the raw text, from
  the left, before anything else looks at it, and what lies between two of them is encoded by
  itself. So if every occurrence of the token is a match, nothing looks across its end.
- *Between an ASCII letter or digit and a space.* No alternative of the known word patterns matches
  a letter or digit with a space behind it, and none looks back; so all of them end a word there,
  the same one whether a space follows or the text ends. No Unicode normal form joins the two.

Where a tokenizer is built in a way for which this does not hold, there are no such places.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

MIN_SEGMENT_CHARS = 1024
"""Segments are at least this long: shorter ones would cost more to look up than to encode."""

# Pre-tokenizers that treat each part of a text alone, wherever in the text it stands.
_CONTEXT_FREE = frozenset(
    {"ByteLevel", "Digits", "Metaspace", "Punctuation", "Split", "Whitespace", "WhitespaceSplit"}
)
# Patterns of words, for which the second kind of place was checked alternative by alternative.
_KNOWN_WORDS = frozenset(
    {
        # Qwen2 and Qwen3
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
        # Llama 3
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        # Qwen3.5
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
        r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    }
)
_WORD_END = r"[A-Za-z0-9](?= )"


class TextCuts:
    """The places of one tokenizer, as a rule that any text can be walked with."""

    def __init__(
        self, backend: Mapping[str, Any], min_segment_chars: int = MIN_SEGMENT_CHARS
    ) -> None:
        """Derive the rule from `backend`, the content of a `tokenizer.json`."""
        self._min_segment_chars = min_segment_chars
        tokens: list[Mapping[str, Any]] = backend.get("added_tokens") or []
        pre_tokenizers = _flattened(backend.get("pre_tokenizer"), "pretokenizers")
        alternatives: list[str] = []
        if not any(token.get("single_word") for token in tokens) and all(
            _is_context_free(step) for step in pre_tokenizers
        ):
            alternatives += [re.escape(text) for text in _isolated(tokens)]
            if (
                _words_end_before_spaces(pre_tokenizers)
                and _keeps_word_ends(backend.get("normalizer"))
                and not any(token.get("rstrip") for token in tokens)
                and not any(_has_word_end(token["content"]) for token in tokens)
            ):
                alternatives.append(_WORD_END)
        self._places = re.compile("|".join(alternatives)) if alternatives else None

    def segments(self, text: str) -> Iterator[str]:
        """Cut `text` at the first place behind each run of `min_segment_chars` characters.

        Of what lies behind a segment only the next character is looked at, so texts that begin
        alike begin with the same segments. The last one ends where the text ends, cut or not.
        """
        start = 0
        while self._places is not None:
            place = self._places.search(text, start + self._min_segment_chars)
            if place is None or place.end() == len(text):
                break
            yield text[start : place.end()]
            start = place.end()
        yield text[start:]


def _isolated(tokens: Sequence[Mapping[str, Any]]) -> list[str]:
    """Pick added tokens whose every occurrence is a match that no other can overlap."""
    # Those found in normalized text come second, within what the others leave.
    rivals = [token["content"] for token in tokens if not token.get("normalized")]
    beginnings = {text[:end] for text in rivals for end in range(1, len(text))}
    endings = {text[start:] for text in rivals for start in range(1, len(text))}
    everything = "\0".join(rivals)
    isolated: list[str] = []
    for token in tokens:
        text: str = token["content"]
        if token.get("normalized") or token.get("lstrip") or token.get("rstrip"):
            continue
        overlaps = any(text[start:] in beginnings for start in range(len(text))) or any(
            text[:end] in endings for end in range(1, len(text) + 1)
        )
        # A longer token may hold this one. The other way round the longer one is found first.
        is_inside = everything.count(text) > 1
        if text and text.strip() == text and not overlaps and not is_inside:
            isolated.append(text)
    return isolated


def _flattened(step: Any, children: str) -> list[Mapping[str, Any]]:
    if step is None:
        return []
    if step.get("type") == "Sequence":
        return [leaf for child in step.get(children) or [] for leaf in _flattened(child, children)]
    return [step]


def _is_context_free(step: Mapping[str, Any]) -> bool:
    if step.get("type") == "Metaspace":
        # The scheme `first` asks whether a part stands at the start of the text.
        return step.get("prepend_scheme") in ("always", "never")
    return step.get("type") in _CONTEXT_FREE


def _words_end_before_spaces(pre_tokenizers: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the last step is byte-level and a known pattern of words stands before or in it."""
    if not pre_tokenizers or pre_tokenizers[-1].get("type") != "ByteLevel":
        return False
    *first_steps, byte_level = pre_tokenizers
    has_words = byte_level.get("use_regex", True)
    for step in first_steps:
        if step.get("type") == "Split":
            pattern = step.get("pattern") or {}
            if pattern.get("Regex") not in _KNOWN_WORDS or step.get("behavior") != "Isolated":
                return False
            if step.get("invert"):
                return False
            has_words = True
        elif step.get("type") != "Digits":
            return False
    return bool(has_words)


def _keeps_word_ends(normalizer: Any) -> bool:
    return all(step.get("type") in ("NFC", "NFD") for step in _flattened(normalizer, "normalizers"))


def _has_word_end(token: str) -> bool:
    # Tokens are normalized before they are compared with normalized text.
    return re.search(_WORD_END, unicodedata.normalize("NFC", token)) is not None
