"""One model's tokenizer and chat template: the token ids that its engine will compute, or an error.

Exact for vLLM 0.32 with its default settings. Settings of the engine that a request does not show
(default template arguments, another content format) are what the parity check is for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from cache_router.errors import TokenizerError
from cache_router.types import TokenIds
from gateway.tokenizing.chat_messages import build_conversation
from gateway.tokenizing.chat_template import ChatTemplate
from gateway.tokenizing.incremental_cache import IncrementalEncoder, SegmentCache
from gateway.tokenizing.prompts import read_prompts, truncated
from gateway.tokenizing.request_fields import (
    Body,
    ChatFields,
    Truncation,
    read_chat_fields,
    read_completion_fields,
)
from gateway.tokenizing.text_cuts import TextCuts
from gateway.tokenizing.tokenizer_class import resolve_special_tokens
from gateway.tokenizing.tokenizer_files import TokenizerFiles, read_tokenizer_files

_KEEP_ALL = Truncation()


@dataclass(frozen=True, slots=True)
class _Surroundings:
    """Ids that the post-processor puts around a prompt when special tokens are added."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.before) + len(self.after)


class ModelTokenizer:
    """Encodes requests for one model; any number of threads may use it."""

    def __init__(
        self,
        files: TokenizerFiles,
        tokenizer: Tokenizer,
        templates: Mapping[str, ChatTemplate],
        cache: SegmentCache,
    ) -> None:
        """Use `load` instead."""
        self.folder = files.folder
        self._tokenizer = tokenizer
        self._special_tokens = resolve_special_tokens(files, tokenizer)
        self._templates = templates
        self._surroundings = _read_surroundings(files.backend.get("post_processor"))
        _check_surroundings(self._surroundings, tokenizer)
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self._max_token_chars = max(map(len, vocabulary), default=0)
        self._cleans_up_spaces = bool(files.config.get("clean_up_tokenization_spaces")) and (
            files.backend["model"].get("type") != "BPE"
        )
        self._encoder = IncrementalEncoder(self._encode_texts, TextCuts(files.backend), cache)

    @classmethod
    def load(
        cls, folder: Path, chat_template: Path | None, cache: SegmentCache | None = None
    ) -> ModelTokenizer:
        """Load the tokenizer of the model in `folder`.

        Args:
            folder: A Hugging Face model folder; its weights are not needed.
            chat_template: The Jinja file that the engine was given, None if it was given none.
            cache: Where token ids of text segments are kept; None keeps a few of its own.

        Raises:
            TokenizerError: `tokenizer.json` or a Jinja template is missing or malformed, or the
                engine would tokenize with something else than what they say.
        """
        files = read_tokenizer_files(folder, chat_template)
        templates = {name: ChatTemplate(source) for name, source in files.templates.items()}
        path = folder / "tokenizer.json"
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:
            # The library raises nothing more specific.
            raise TokenizerError(f"{path} is not a tokenizer: {error}") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return cls(files, tokenizer, templates, cache or SegmentCache(4 * 1024 * 1024))

    @property
    def reads_clock(self) -> bool:
        """Whether a prompt may hold the date, so that two renderings may differ."""
        return any(template.reads_clock for template in self._templates.values())

    def render_chat(self, body: Body) -> str:
        """Write the prompt of a chat request.

        Raises:
            TokenizerError: As `encode_chat`.
        """
        return self._render(body, read_chat_fields(body))

    def encode_chat(self, body: Body) -> TokenIds:
        """Encode the prompt of a chat request: ids of shape (num_tokens,).

        Raises:
            TokenizerError: Something in it changes its ids in a way that is not rebuilt here: what
                is not text, a template of its own, a value that the engine would refuse.
        """
        fields = read_chat_fields(body)
        prompt = self._render(body, fields)
        return self._encode_text(prompt, fields.add_special_tokens, fields.truncation)

    def encode_completion_body(self, body: Body) -> list[TokenIds]:
        """Encode the prompts of a completion request, in order.

        Raises:
            TokenizerError: As `encode_completion`, or a field changes the prompts in another way.
        """
        fields = read_completion_fields(body)
        return self.encode_completion(
            body.get("prompt"), fields.add_special_tokens, fields.truncation
        )

    def encode_completion(
        self, prompt: object, add_special_tokens: bool = True, truncation: Truncation = _KEEP_ALL
    ) -> list[TokenIds]:
        """Encode a text, a list of texts, a list of token ids, or a list of such lists.

        Raises:
            TokenizerError: `prompt` is none of these, or empty.
        """
        return [
            self._encode_text(item, add_special_tokens, truncation)
            if isinstance(item, str)
            else truncated(item, truncation)
            for item in read_prompts(prompt)
        ]

    def decode(self, token_ids: Sequence[int] | TokenIds) -> str:
        """Write the text of `token_ids`, special tokens included.

        Raises:
            TokenizerError: There are ids that the vocabulary has not, or the engine edits the text.
        """
        if self._cleans_up_spaces:
            raise TokenizerError("the engine cleans up spaces when it decodes")
        ids = [int(token_id) for token_id in token_ids]
        try:
            return self._tokenizer.decode(ids, skip_special_tokens=False)
        except OverflowError as error:
            raise TokenizerError("a token id is out of range") from error

    def _render(self, body: Body, fields: ChatFields) -> str:
        template = self._template(has_tools=fields.tools is not None)
        messages = build_conversation(
            body.get("messages"),
            template.content_format,
            knows_developer=template.knows_developer,
        )
        variables: dict[str, Any] = {
            **self._special_tokens,
            **{k: v for k, v in fields.template_variables.items() if k in template.variables},
        }
        if fields.continue_final_message:
            return template.render_open_ended(
                messages, tools=fields.tools, documents=fields.documents, variables=variables
            )
        return template.render(
            messages,
            tools=fields.tools,
            documents=fields.documents,
            add_generation_prompt=fields.add_generation_prompt,
            variables=variables,
        )

    def _template(self, *, has_tools: bool) -> ChatTemplate:
        template = self._templates.get("tool_use") if has_tools else None
        template = template or self._templates.get("default")
        if template is None:
            raise TokenizerError("none of the model's chat templates is the default")
        return template

    def _encode_text(self, text: str, add_special_tokens: bool, truncation: Truncation) -> TokenIds:
        around = self._surroundings if add_special_tokens else _Surroundings()
        content = self._encoder.encode(text)
        if truncation.num_tokens is not None and truncation.side is None:
            # The tokenizer itself truncates, and what is added around counts but is never cut.
            room = truncation.num_tokens - len(around)
            if room < 1:
                raise TokenizerError("truncation leaves nothing of the prompt")
            content = content[-room:]
        if len(around):
            content = np.concatenate(
                [
                    np.array(around.before, dtype=np.uint32),
                    content,
                    np.array(around.after, dtype=np.uint32),
                ]
            )
        if truncation.num_tokens is not None and truncation.side is not None:
            # Of a text that is longer than any context could be, the engine drops characters
            # before it encodes. Its context is at least what the request wants to keep.
            if len(text) > truncation.num_tokens * self._max_token_chars:
                raise TokenizerError("the engine may cut the text before it encodes it")
            content = truncated(content, truncation)
        return content

    def _encode_texts(self, texts: list[str]) -> list[TokenIds]:
        try:
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except (TypeError, UnicodeEncodeError) as error:
            # Half a surrogate pair is a str, but no text.
            raise TokenizerError("the prompt is not valid Unicode") from error
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]


def _read_surroundings(post_processor: Any) -> _Surroundings:
    """Read what a post-processor puts around one text.

    Raises:
        TokenizerError: It is of a kind that is not rebuilt here.
    """
    if post_processor is None or post_processor.get("type") == "ByteLevel":
        return _Surroundings()
    if post_processor.get("type") == "Sequence":
        around = _Surroundings()
        for step in post_processor.get("processors") or []:
            inner = _read_surroundings(step)
            if len(around) and len(inner):
                raise TokenizerError("tokenizer.json's post-processor wraps the prompt twice")
            around = inner if len(inner) else around
        return around
    if post_processor.get("type") != "TemplateProcessing":
        raise TokenizerError(f"tokenizer.json post-processes with {post_processor.get('type')}")
    before: list[int] = []
    after: list[int] = []
    num_texts = 0
    for piece in post_processor.get("single") or []:
        if "Sequence" in piece:
            num_texts += 1
            continue
        name = piece["SpecialToken"]["id"]
        (after if num_texts else before).extend(post_processor["special_tokens"][name]["ids"])
    if num_texts != 1:
        raise TokenizerError("tokenizer.json's post-processor repeats the prompt")
    return _Surroundings(tuple(before), tuple(after))


def _check_surroundings(around: _Surroundings, tokenizer: Tokenizer) -> None:
    """Try the post-processor once, and refuse it if it does anything else than was read."""
    bare = tokenizer.encode("a", add_special_tokens=False).ids
    if tokenizer.encode("a").ids != [*around.before, *bare, *around.after]:
        raise TokenizerError("tokenizer.json's post-processor does more than wrap the prompt")
