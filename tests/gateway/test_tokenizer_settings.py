from __future__ import annotations

from pathlib import Path

import pytest

from cache_router.errors import ConfigurationError
from cache_router.settings import Settings
from gateway.tokenizer_settings import check_tokenizer_settings


def test_nothing_configured_is_fine(tmp_path: Path) -> None:
    check_tokenizer_settings(Settings(hub_cache=tmp_path))


def test_a_usable_folder_and_template_are_fine(smollm2_folder: Path, tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    check_tokenizer_settings(Settings(tokenizer=smollm2_folder, chat_template=template))


@pytest.mark.parametrize("content", [None, "{% for %}", b"\xff\xfe"])
def test_a_template_that_cannot_be_used_is_named(
    tmp_path: Path, content: str | bytes | None
) -> None:
    template = tmp_path / "t.jinja"
    if content is not None:
        template.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ConfigurationError, match=r"RADIXGATE_CHAT_TEMPLATE: .*t\.jinja"):
        check_tokenizer_settings(Settings(chat_template=template))


@pytest.mark.parametrize("name", ["no/such-model", "/no/such/folder"])
def test_a_tokenizer_that_is_nowhere_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"RADIXGATE_TOKENIZER: {name}"):
        check_tokenizer_settings(Settings(tokenizer=name, hub_cache=tmp_path))


def test_a_folder_without_a_tokenizer_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigurationError, match="RADIXGATE_TOKENIZER"):
        check_tokenizer_settings(Settings(tokenizer=tmp_path))
