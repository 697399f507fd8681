from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cache_router.errors import ConfigurationError
from engine_workers.engine_runtime import (
    EngineRuntime,
    existing_runtime,
    load_runtime,
    save_runtime,
)
from engine_workers.workspace import Workspace


def python_with_vllm(folder: Path) -> Path:
    """A Python that finds a package named vllm, which is all that is asked of it."""
    package = folder / "packages" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')\n")
    program = folder / "python"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={package.parent} exec {sys.executable} "$@"\n')
    program.chmod(0o755)
    return program


def test_a_named_python_with_vllm_is_used(tmp_path: Path) -> None:
    python = python_with_vllm(tmp_path)
    runtime = existing_runtime(python)
    assert runtime is not None
    assert runtime.python == python


def test_a_named_python_without_vllm_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"RADIXGATE_ENGINE_PYTHON: .* import vllm"):
        existing_runtime(Path(sys.executable))


def test_a_named_python_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="is not a program"):
        existing_runtime(tmp_path / "python")


def test_the_saved_choice_is_loaded(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    runtime = EngineRuntime(Path(sys.executable), num_gpus=3)
    save_runtime(workspace, runtime)
    assert load_runtime(workspace, None) == runtime


def test_a_named_python_wins_over_the_saved_choice(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    save_runtime(workspace, EngineRuntime(Path(sys.executable), num_gpus=0))
    python = python_with_vllm(tmp_path)
    assert load_runtime(workspace, python).python == python


def test_a_saved_choice_that_is_gone_says_what_to_do(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    save_runtime(workspace, EngineRuntime(tmp_path / "gone", num_gpus=0))
    with pytest.raises(ConfigurationError, match=r"gone does not exist; run `make serve`"):
        load_runtime(workspace, None)


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"python": 1, "num_gpus": 0}'])
def test_a_damaged_choice_is_refused(tmp_path: Path, content: str) -> None:
    workspace = Workspace(tmp_path)
    workspace.state.mkdir()
    workspace.runtime_file.write_text(content)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        load_runtime(workspace, None)


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\nprintf 'GPU 0: one\\nGPU 1: two\\n'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


@pytest.mark.usefixtures("two_gpus")
def test_where_gpus_and_vllm_are_that_vllm_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert existing_runtime(None) == EngineRuntime(Path(sys.executable), num_gpus=2)


@pytest.mark.usefixtures("two_gpus")
def test_gpus_without_vllm_get_an_engine_installed() -> None:
    assert existing_runtime(None) is None
