from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from cache_router.errors import TokenizerError
from gateway.tokenizing import chat_template
from gateway.tokenizing.chat_template import ChatTemplate
from tests.gateway.tokenizing.model_folders import CHATML

USER = {"role": "user", "content": "Hi"}


def render(source: str, *messages: dict[str, Any], **variables: Any) -> str:
    template = ChatTemplate(source, now=lambda: datetime(2024, 7, 26))
    return template.render(
        messages or (USER,),
        tools=variables.pop("tools", None),
        documents=None,
        add_generation_prompt=False,
        variables=variables,
    )


def continue_final(source: str, content: object) -> str:
    return ChatTemplate(source).render_open_ended(
        [USER, {"role": "assistant", "content": content}],
        tools=None,
        documents=None,
        variables={},
    )


def test_blocks_leave_no_blank_lines_or_indentation() -> None:
    source = (
        "{% for m in messages %}\n  {% if true %}\n{{ m.content }}!\n  {% endif %}\n{% endfor %}\n"
    )
    assert render(source) == "Hi!\n"


def test_tojson_escapes_neither_html_nor_unicode() -> None:
    assert render("{{ x | tojson }}", x={"a": "<&é'"}) == '{"a": "<&é\'"}'
    assert render("{{ x | tojson(indent=1) }}", x=[1]) == "[\n 1\n]"
    assert render("{{ x | tojson(sort_keys=true) }}", x={"b": 1, "a": 2}) == '{"a": 2, "b": 1}'


def test_loops_can_be_broken_and_generation_blocks_are_transparent() -> None:
    assert (
        render("{% for i in range(9) %}{% if i > 1 %}{% break %}{% endif %}{{ i }}{% endfor %}")
        == "01"
    )
    assert render("a{% generation %}b{{ 1 }}{% endgeneration %}c") == "ab1c"


def test_the_date_comes_from_the_given_clock() -> None:
    assert render("{{ strftime_now('%d %b %Y') }}") == "26 Jul 2024"
    assert ChatTemplate("{{ strftime_now('%Y') }}").reads_clock
    assert not ChatTemplate(CHATML).reads_clock


@pytest.mark.parametrize("date_format", ["%H:%M", "%c", "%Y %-I", "%s", "%T"])
def test_the_time_of_day_is_refused_since_no_two_clocks_agree(date_format: str) -> None:
    with pytest.raises(TokenizerError, match="time of day"):
        render("{{ strftime_now(f) }}", f=date_format)


def test_a_template_that_raises_is_a_refusal_that_quotes_no_prompt() -> None:
    with pytest.raises(TokenizerError) as refusal:
        render("{{ raise_exception(messages[0].content) }}", {"role": "u", "content": "secret"})
    assert "secret" not in str(refusal.value)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].__class__.__mro__[1].__subclasses__()[0] }}",
        "{{ messages.append(1) }}",
        "{{ undefined_name.attribute }}",
        "{{ 1 // 0 }}",
    ],
)
def test_escapes_from_the_sandbox_and_errors_are_refusals(source: str) -> None:
    with pytest.raises(TokenizerError):
        ChatTemplate(source).render(
            [USER], tools=None, documents=None, add_generation_prompt=False, variables={}
        )


def test_a_template_that_does_not_compile_is_refused_at_once() -> None:
    with pytest.raises(TokenizerError, match="does not compile"):
        ChatTemplate("{% for %}")


def test_output_is_bounded() -> None:
    source = "{% for i in range(90) %}{{ x }}{% endfor %}"
    with pytest.raises(TokenizerError, match="characters"):
        render(source, x="a" * (chat_template.MAX_RENDERED_CHARS // 80))


def test_only_names_read_from_outside_are_variables() -> None:
    template = ChatTemplate("{% set a = 1 %}{{ a }}{{ enable_thinking }}{{ messages }}")
    assert template.variables == {"enable_thinking", "messages"}


def test_a_continued_message_ends_where_its_text_ends() -> None:
    assert continue_final(CHATML, "The capital is ").endswith("assistant\nThe capital is ")
    assert continue_final(CHATML, "").endswith("<|im_start|>assistant\n")


def test_a_trimming_template_trims_the_continued_text_too() -> None:
    source = "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}"
    assert continue_final(source, "  is  ") == "[Hi][is"


def test_the_last_text_part_is_continued() -> None:
    source = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endif %}{% endfor %}"
    )
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b "}]
    assert continue_final(source, parts) == "Hi<a><b "
    assert parts[1]["text"] == "b "


def test_values_nested_beyond_recursion_are_a_refusal() -> None:
    nested: list[Any] = []
    for _ in range(5000):
        nested = [nested]
    with pytest.raises(TokenizerError, match="RecursionError"):
        render("{{ x | tojson }}", x=nested)
    message = {"role": "assistant", "content": "x", "extra": nested}
    text = ChatTemplate(CHATML).render_open_ended(
        [message], tools=None, documents=None, variables={}
    )
    assert text.endswith("assistant\nx")


def test_what_cannot_be_continued_is_refused() -> None:
    with pytest.raises(TokenizerError, match="no text"):
        continue_final(CHATML, [])
    with pytest.raises(TokenizerError, match="as it is"):
        continue_final("{% for m in messages %}{{ m.content | upper }}{% endfor %}", "abc")
    with pytest.raises(TokenizerError, match="content"):
        continue_final("{{ messages | tojson }}", "abc")
