"""What tests of every package may use: the real model, and two real engines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cache_router.settings import Settings
from engine_workers.engine_runtime import load_runtime
from engine_workers.model_store import default_model
from engine_workers.workspace import Workspace
from tests.real_engines import RunningEngines, running_engines


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """The converted default model, which `make test` made."""
    return Path(default_model(Workspace.current()).argument)


@pytest.fixture(scope="session")
def engines() -> Iterator[RunningEngines]:
    """Two real engines, started by the first test that asks and stopped after the last one."""
    workspace = Workspace.current()
    with running_engines(
        default_model(workspace),
        load_runtime(workspace, Settings().engine_python),
        workspace.sockets,
        workspace.logs / "tests",
    ) as running:
        yield running
