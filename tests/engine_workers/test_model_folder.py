from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from cache_router.errors import ConfigurationError
from engine_workers.model_folder import check_model_folder, count_parameters, resolve_model


def write_safetensors(file: Path, shape: list[int]) -> None:
    num_bytes = 4
    for size in shape:
        num_bytes *= size
    header = {
        "__metadata__": {"format": "pt"},
        "weight": {"dtype": "F32", "shape": shape, "data_offsets": [0, num_bytes]},
    }
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + bytes(num_bytes))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tmp_path / "Tiny"
    model.mkdir()
    (model / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (model / "tokenizer.json").write_text("{}")
    write_safetensors(model / "model.safetensors", [3, 5])
    return model


def test_a_whole_folder_is_accepted_and_its_parameters_are_counted(folder: Path) -> None:
    assert check_model_folder(folder) == 15


def test_the_folders_name_is_the_served_name(folder: Path) -> None:
    source = resolve_model(str(folder))
    assert (source.argument, source.served_name) == (str(folder), "Tiny")
    assert source.is_local
    assert source.num_parameters == 15


@pytest.mark.parametrize("end", ["/", "/.", "//"])
def test_how_a_path_ends_does_not_change_the_name(folder: Path, end: str) -> None:
    assert resolve_model(f"{folder}{end}").served_name == "Tiny"


def test_a_link_serves_its_own_name(folder: Path) -> None:
    (folder.parent / "My model").symlink_to(folder)
    source = resolve_model(str(folder.parent / "My model"))
    assert source.served_name == "My model"
    assert Path(source.argument).samefile(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(ConfigurationError, match=name) as caught:
        resolve_model(str(folder))
    assert "\n" not in str(caught.value)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def cut_header(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:20])


def not_safetensors(file: Path) -> None:
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")


def empty(file: Path) -> None:
    file.write_bytes(b"")


def header_of_another_type(file: Path) -> None:
    file.write_bytes(struct.pack("<Q", 2) + b"[]")


def offsets_of_another_type(file: Path) -> None:
    header = b'{"w": {"shape": [1], "data_offsets": [0, "x"]}}'
    file.write_bytes(struct.pack("<Q", len(header)) + header)


def endless_shape(file: Path) -> None:
    header = b'{"w": {"shape": [1e999], "data_offsets": [0, 0]}}'
    file.write_bytes(struct.pack("<Q", len(header)) + header)


def header_without_end(file: Path) -> None:
    header = b"[" * 100_000
    file.write_bytes(struct.pack("<Q", len(header)) + header)


@pytest.mark.parametrize(
    "damage",
    [
        truncate,
        cut_header,
        not_safetensors,
        empty,
        header_of_another_type,
        offsets_of_another_type,
        endless_shape,
        header_without_end,
    ],
)
def test_damaged_weights_are_named(folder: Path, damage: Callable[[Path], None]) -> None:
    damage(folder / "model.safetensors")
    with pytest.raises(ConfigurationError, match=r"model\.safetensors"):
        check_model_folder(folder)


@pytest.mark.parametrize("content", ["", "[]", "{}", "{", '{"architectures": []}'])
def test_a_damaged_config_is_named(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content)
    with pytest.raises(ConfigurationError, match=r"config\.json"):
        check_model_folder(folder)


def test_a_missing_shard_is_named(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigurationError, match=r"b\.safetensors"):
        check_model_folder(folder)
    write_safetensors(folder / "b.safetensors", [2])
    assert check_model_folder(folder) == 17


def test_a_slow_tokenizer_is_enough(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(b"x")
    assert check_model_folder(folder) == 15


def test_weights_of_another_format_are_accepted_but_not_counted(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"x")
    assert check_model_folder(folder) is None


def test_a_file_instead_of_a_folder_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="is a file"):
        resolve_model(str(folder / "config.json"))


@pytest.mark.parametrize("hub_id", ["gpt2", "HuggingFaceTB/SmolLM2-135M-Instruct"])
def test_what_is_no_folder_but_could_be_a_hub_id_goes_to_vllm_as_it_is(hub_id: str) -> None:
    source = resolve_model(hub_id)
    assert (source.argument, source.served_name) == (hub_id, hub_id)
    assert not source.is_local


@pytest.mark.parametrize(
    "model",
    [
        "/no/such/folder",
        "./x",
        "a/b/c",
        "a/b/",
        "~/none",
        "~nobody-of-that-name/x",
        "x" * 300,
        "",
        "a b",
        "-x",
    ],
)
def test_what_can_be_neither_is_refused(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match="RADIXGATE_MODEL"):
        resolve_model(model)


def test_the_converted_default_model_has_its_parameters(smollm2_folder: Path) -> None:
    assert count_parameters(smollm2_folder / "model.safetensors") == 134_515_008
