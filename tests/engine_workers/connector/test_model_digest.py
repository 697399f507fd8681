from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine_workers.connector.model_digest import model_digest

SIZE = 40 * 1024 * 1024


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "README.md").write_text("about")
    with (tmp_path / "model.safetensors").open("wb") as weights:
        weights.truncate(SIZE)
    return tmp_path


def test_a_copy_of_a_model_is_the_same_model(folder: Path) -> None:
    before = model_digest(folder, "{}")
    (folder / "README.md").write_text("something else")
    os.utime(folder / "model.safetensors", (0, 0))
    assert model_digest(folder, "{}") == before


def test_weights_of_equal_names_and_sizes_are_told_apart(folder: Path) -> None:
    before = model_digest(folder, "{}")
    with (folder / "model.safetensors").open("r+b") as weights:
        for position in range(0, SIZE, 1024 * 1024):  # as another training changes all tensors
            weights.seek(position)
            weights.write(b"\1" * 512 * 1024)
    assert model_digest(folder, "{}") != before


@pytest.mark.parametrize("position", [0, SIZE - 1])
def test_the_ends_of_a_file_are_looked_at(folder: Path, position: int) -> None:
    before = model_digest(folder, "{}")
    with (folder / "model.safetensors").open("r+b") as weights:
        weights.seek(position)
        weights.write(b"\1")
    assert model_digest(folder, "{}") != before


def test_configuration_and_its_overrides_count(folder: Path) -> None:
    before = model_digest(folder, "{}")
    assert model_digest(folder, '{"rope_theta": 2}') != before
    (folder / "config.json").write_text('{"a": 1}')
    assert model_digest(folder, "{}") != before


def test_an_empty_file_of_weights_is_no_problem(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    assert model_digest(tmp_path, "{}")


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        model_digest(tmp_path / "none", "{}")
