"""Small model folders made on the spot: a byte-level tokenizer, its configuration, a template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CORPUS = (
    "The quick brown fox jumps over the lazy dog, it's 12345 o'clock.",
    "Hello world\n\nhow are you? user assistant system tool naïve café 日本 😀",
)


def byte_level(add_prefix_space: bool = False) -> pre_tokenizers.PreTokenizer:
    """The pre-tokenizer of GPT-2."""
    return pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)


def digits_then_byte_level() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level()])


def words_then_bytes(words: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def train(
    pre_tokenizer: pre_tokenizers.PreTokenizer,
    normalizer: normalizers.Normalizer | None = None,
    added: Sequence[AddedToken] = (),
    adds_bos: bool = False,
) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        _CORPUS,
        BpeTrainer(
            vocab_size=400,
            special_tokens=list(SPECIALS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.add_tokens(list(added))
    if adds_bos:
        tokenizer.post_processor = TemplateProcessing(
            single="<|im_start|> $A <|im_end|>",
            pair="$A $B",
            special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)],
        )
    return tokenizer


def write_folder(
    folder: Path,
    tokenizer: Tokenizer,
    settings: dict[str, Any] | None = None,
    template: str | None = CHATML,
    **files: dict[str, Any],
) -> Path:
    """Write a model folder; `settings` go into tokenizer_config.json, `files` are other ones."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    defaults = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|im_start|>"}
    for name, content in {"tokenizer_config": {**defaults, **(settings or {})}, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder
