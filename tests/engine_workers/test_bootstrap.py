from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from engine_workers.workspace import Workspace


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A fresh clone, in a folder whose name has a space."""
    root = tmp_path / "my checkout"
    for package in ("cache_router", "engine_workers"):
        shutil.copytree(Workspace.current().root / package, root / package)
    shutil.copytree(Workspace.current().requirements, root / "requirements")
    (root / "pyproject.toml").write_text("")
    return root


def refused(checkout: Path, *arguments: str) -> str:
    """Run the bootstrap, which must refuse with status 2 and one line."""
    ended = subprocess.run(
        [sys.executable, "-m", "engine_workers.bootstrap", *arguments],
        cwd=checkout,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.count("\n") == 1
    return ended.stderr


def test_a_broken_model_is_refused_before_anything_is_installed(checkout: Path) -> None:
    (checkout / "broken").mkdir()
    line = refused(checkout, "--model", "./broken")
    assert line.startswith("radixgate: RADIXGATE_MODEL: ")
    assert not (checkout / ".radixgate").exists()
    assert not (checkout / ".venv").exists()


def test_a_taken_port_is_refused_before_anything_is_installed(checkout: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = refused(checkout, "--port", str(port))
    assert line.startswith("radixgate: RADIXGATE_PORT: ")
    assert str(port) in line
    assert not (checkout / ".venv").exists()


def test_a_checkout_that_cannot_be_written_to_is_refused(checkout: Path) -> None:
    # A mode would not keep root out; a file where a folder has to be does.
    (checkout / ".radixgate").write_bytes(b"")
    line = refused(checkout)
    assert line.startswith(f"radixgate: {checkout / '.radixgate'}: ")
    assert "must be able to write here" in line
