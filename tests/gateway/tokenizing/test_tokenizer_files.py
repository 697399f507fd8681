from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cache_router.errors import TokenizerError
from gateway.tokenizing.tokenizer_files import find_model_folder, read_tokenizer_files
from tests.gateway.tokenizing.model_folders import byte_level, train, write_folder

TOKENIZER = train(byte_level())
PLAIN = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}


def test_a_folder_is_found_as_it_is(tmp_path: Path) -> None:
    assert find_model_folder(str(tmp_path), None) == tmp_path
    assert find_model_folder(str(tmp_path / "none"), tmp_path) is None


def test_a_hub_id_is_found_in_the_cache_at_its_main_revision(tmp_path: Path) -> None:
    repository = tmp_path / "models--owner--name"
    for revision in ("abc", "def"):
        (repository / "snapshots" / revision).mkdir(parents=True)
    assert find_model_folder("owner/name", tmp_path) is None
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("def\n")
    assert find_model_folder("owner/name", tmp_path) == repository / "snapshots" / "def"
    assert find_model_folder("owner/name", None) is None


def test_the_only_revision_in_the_cache_is_taken(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    assert find_model_folder("name", tmp_path) == snapshot


def test_no_id_or_reference_leads_out_of_the_cache(tmp_path: Path) -> None:
    cache = tmp_path / "hub"
    (cache / "models--a" / "refs").mkdir(parents=True)
    (tmp_path / "secret").mkdir()
    (cache / "models--a" / "refs" / "main").write_text("../../../secret")
    (cache / "models--a" / "snapshots").mkdir()
    assert find_model_folder("a", cache) is None
    for root in ("../secret", "a/../../secret", "", "a/b/c", "."):
        assert find_model_folder(root, cache) in (None, Path(root))


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json"):
        read_tokenizer_files(tmp_path, None)
    folder = write_folder(tmp_path / "m", TOKENIZER, template=None)
    with pytest.raises(TokenizerError, match="no Jinja chat template"):
        read_tokenizer_files(folder, None)
    with pytest.raises(TokenizerError, match="cannot be read"):
        read_tokenizer_files(folder, tmp_path / "missing.jinja")


def test_a_given_template_replaces_those_of_the_folder(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", TOKENIZER, {"chat_template": "configured"})
    given = tmp_path / "given.jinja"
    given.write_text("given")
    assert read_tokenizer_files(folder, given).templates == {"default": "given"}


def test_template_files_win_over_the_configuration(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", TOKENIZER, {"chat_template": "configured"}, "file")
    assert read_tokenizer_files(folder, None).templates == {"default": "file"}
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    assert read_tokenizer_files(folder, None).templates == {"default": "file", "tool_use": "tools"}


def test_configured_templates_may_have_names(tmp_path: Path) -> None:
    listed = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    folder = write_folder(tmp_path / "m", TOKENIZER, {"chat_template": listed}, template=None)
    assert read_tokenizer_files(folder, None).templates == {"default": "a", "tool_use": "b"}


def test_special_tokens_are_read_in_every_saved_form(tmp_path: Path) -> None:
    saved = {"__type": "AddedToken", "content": "<|im_end|>", **PLAIN}
    config = {
        "eos_token": saved,
        "image_token": "<|im_start|>",
        "pad_token": None,
        "add_bos_token": True,
        "extra_special_tokens": {"audio_token": "<|endoftext|>"},
    }
    files = read_tokenizer_files(write_folder(tmp_path / "m", TOKENIZER, config), None)
    assert files.special_tokens == {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "image_token": "<|im_start|>",
        "audio_token": "<|endoftext|>",
    }


def test_the_special_tokens_map_counts_only_in_older_folders(tmp_path: Path) -> None:
    map_file = {"bos_token": {"content": "<|im_end|>", **PLAIN}}
    old = write_folder(tmp_path / "old", TOKENIZER, special_tokens_map=map_file)
    assert read_tokenizer_files(old, None).special_tokens["bos_token"] == "<|im_end|>"
    decoder: dict[str, Any] = {"added_tokens_decoder": {}}
    new = write_folder(tmp_path / "new", TOKENIZER, decoder, special_tokens_map=map_file)
    assert read_tokenizer_files(new, None).special_tokens["bos_token"] == "<|im_start|>"


@pytest.mark.parametrize(
    "name",
    ["tekken.json", "tokenizer.model.v3", "sentence_bert_config.json", "processor_config.json"],
)
def test_files_that_may_overrule_the_tokenizer_are_refused(tmp_path: Path, name: str) -> None:
    folder = write_folder(tmp_path / "m", TOKENIZER)
    (folder / name).write_text("{}")
    with pytest.raises(TokenizerError, match=name):
        read_tokenizer_files(folder, None)


def test_a_processor_does_not_matter_where_a_template_is_given(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", TOKENIZER, preprocessor_config={})
    assert read_tokenizer_files(folder, folder / "chat_template.jinja").templates


def test_tokens_of_an_older_file_that_the_tokenizer_lacks_are_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", TOKENIZER, added_tokens={"<|im_end|>": 2})
    read_tokenizer_files(folder, None)
    (folder / "added_tokens.json").write_text(json.dumps({"<new>": 999}))
    with pytest.raises(TokenizerError, match=r"added_tokens\.json"):
        read_tokenizer_files(folder, None)


@pytest.mark.parametrize(
    "content", ["[1]", "not json", "[" * 200_000, '{"chat_template": {"a": 1}}']
)
def test_malformed_configuration_is_refused(tmp_path: Path, content: str) -> None:
    folder = write_folder(tmp_path / "m", TOKENIZER, template=None)
    (folder / "tokenizer_config.json").write_text(content)
    with pytest.raises(TokenizerError):
        read_tokenizer_files(folder, None)


@pytest.mark.parametrize("root", ["x" * 5000, "/" + "y/" * 3000, "nul\0byte", ""])
def test_a_root_that_is_no_path_is_no_folder(root: str, tmp_path: Path) -> None:
    assert find_model_folder(root or "no/such", tmp_path) is None
