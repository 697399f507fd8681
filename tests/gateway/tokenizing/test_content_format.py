from __future__ import annotations

import pytest

from gateway.tokenizing.chat_template import ChatTemplate


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{% for c in m.content %}{{ c.text }}{% endfor %}{% endfor %}",
        "{% for m in messages %}{% for c in m['content'] %}x{% endfor %}{% endfor %}",
        "{% for m in messages[1:] %}{% for c in m.content | reverse %}x{% endfor %}{% endfor %}",
        "{% set all = messages %}{% set rest = all[1:] %}"
        "{% for m in rest %}{% for c in m.content %}x{% endfor %}{% endfor %}",
        "{% macro show(parts) %}{% for p in parts %}x{% endfor %}{% endmacro %}"
        "{% for m in messages %}{{ show(m.content) }}{% endfor %}",
        "{% macro show(role, parts) %}{% for p in parts %}x{% endfor %}{% endmacro %}"
        "{% for m in messages %}{{ show('a', parts=m.content) }}{% endfor %}",
        "{% for m in messages %}{% set content = m.content %}"
        "{% for c in content %}x{% endfor %}{% endfor %}",
    ],
)
def test_a_loop_over_content_means_parts(source: str) -> None:
    assert ChatTemplate(source).content_format == "openai"


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{% for c in m.tool_calls %}x{% endfor %}{% endfor %}",
        "{% for m in others %}{% for c in m.content %}x{% endfor %}{% endfor %}",
        "{% macro show(content) %}{% for c in content %}x{% endfor %}{% endmacro %}{{ show(1) }}",
    ],
)
def test_other_loops_do_not_mean_parts(source: str) -> None:
    assert ChatTemplate(source).content_format == "string"


def test_the_search_gives_up_where_messages_are_unpacked_like_the_engine_s() -> None:
    source = (
        "{% set ns = namespace() %}{% set ns.all = messages %}"
        "{% for m in messages %}{% for c in m.content %}x{% endfor %}{% endfor %}"
    )
    assert ChatTemplate(source).content_format == "string"


def test_assignments_in_a_circle_end() -> None:
    source = "{% set a = messages %}{% set b = a %}{% set a = b %}{{ a }}"
    assert ChatTemplate(source).content_format == "string"
