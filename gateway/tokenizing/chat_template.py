"""A model's Jinja chat template, rendered as the engine's tokenizer library renders it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cache_router.errors import TokenizerError
from gateway.tokenizing.content_format import ContentFormat, detect_content_format

Message = dict[str, Any]
"""One message as a chat template sees it: `role`, `content` and what else its role may carry."""

MAX_RENDERED_CHARS = 64 * 1024 * 1024
"""A template that writes more than this is stopped: no engine has a context that would hold it."""

# The library marks where the final message ends with this text, then cuts the prompt there. A
# template that looks at a message's content sees the mark, so it must be this very text.
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
# What strftime writes for these changes while the request travels, so no two clocks agree on it.
_TIME_OF_DAY = re.compile(r"%[-_0^#]?[HIMSpfXcsTRrZzklN+]")


class ChatTemplate:
    """A compiled template; rendering shares no state, so any number of threads may do it."""

    def __init__(self, source: str, now: Callable[[], datetime] = datetime.now) -> None:
        """Compile `source`; `now` is what the template reads as the date.

        Raises:
            TokenizerError: Not a template that the engine's Jinja could compile.
        """
        self.source = source
        environment = _environment(now)
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise TokenizerError(f"the chat template does not compile: {error}") from error
        self.variables = frozenset(meta.find_undeclared_variables(tree))
        """Names that the template reads from outside; the engine passes no other extra argument."""
        self.content_format: ContentFormat = detect_content_format(tree)
        self.knows_developer = '"developer"' in source or "'developer'" in source
        """Whether the engine leaves developer messages as they are."""
        self.reads_clock = "strftime_now" in source

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        documents: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """Write the prompt of a conversation that the model is to answer.

        Raises:
            TokenizerError: The template refused the messages, or wrote too much.
        """
        pieces: list[str] = []
        num_chars = 0
        try:
            for piece in self._template.generate(
                messages=messages,
                tools=tools,
                documents=documents,
                add_generation_prompt=add_generation_prompt,
                **variables,
            ):
                pieces.append(piece)
                num_chars += len(piece)
                if num_chars > MAX_RENDERED_CHARS:
                    break
        except TokenizerError:
            raise
        except Exception as error:
            # A template may raise anything that Python can; its message may quote the prompt.
            raise TokenizerError(
                f"the chat template refused the messages ({type(error).__name__})"
            ) from error
        if num_chars > MAX_RENDERED_CHARS:
            raise TokenizerError(f"the prompt has more than {MAX_RENDERED_CHARS} characters")
        return "".join(pieces)

    def render_open_ended(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        documents: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> str:
        """Write the prompt up to where the final message's text ends: the model continues it.

        Raises:
            TokenizerError: As `render`, or the final message's text is not in what was written.
        """
        final_message, final_text = _mark_final_text(messages[-1])
        if "content" not in self.source:
            raise TokenizerError("the chat template does not write a message's content")
        prompt = self.render(
            [*messages[:-1], final_message],
            tools=tools,
            documents=documents,
            add_generation_prompt=False,
            variables=variables,
        )
        tag = _CONTINUE_TAG.strip()
        if tag not in prompt or final_text.strip() not in prompt:
            raise TokenizerError("the chat template does not write the final message as it is")
        end = prompt.rindex(tag)
        if prompt.startswith(_CONTINUE_TAG, end):
            return prompt[:end]
        # The template trims what it writes, so it would have trimmed the text itself as well.
        return prompt[:end].rstrip()


def _mark_final_text(message: Message) -> tuple[Message, str]:
    """Copy `message` with the mark behind its last text; return that text without it as well."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": content + _CONTINUE_TAG}, content
    parts: list[Message] = [dict(part) for part in content or []]
    for part in reversed(parts):
        if "text" in part:
            text: str = part["text"]
            part["text"] = text + _CONTINUE_TAG
            return {**message, "content": parts}, text
    raise TokenizerError("the final message has no text that could be continued")


class _Generation(Extension):
    """`{% generation %}` marks what the model wrote; in a prompt it stands for its content."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it as a plain class attribute

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_content")
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _content(self, caller: Macro) -> str:
        return str(caller())


def _environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )

    def strftime_now(date_format: str) -> str:
        if _TIME_OF_DAY.search(date_format):
            raise TokenizerError("the chat template writes the time of day")
        return now().strftime(date_format)

    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML; the positions of these arguments are the library's.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)
