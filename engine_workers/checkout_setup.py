"""The steps from a fresh clone to something that can serve; each is done once.

Standard library only, because it runs before anything is installed.
"""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engine_workers.engine_runtime import EngineRuntime, existing_runtime, save_runtime
from engine_workers.environments import Environment, InstallStep
from engine_workers.hardware import require_cpu_engine_support
from engine_workers.model_folder import resolve_model
from engine_workers.model_store import NUM_STEPS, has_default_model, make_default_model
from engine_workers.progress import StepProgress
from engine_workers.workspace import Workspace

_PYTORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def set_up(*, with_tests: bool, with_engine: bool, model: str) -> None:
    """Install what is missing or out of date; a second run finds nothing to do.

    Args:
        with_tests: Install also what lint and tests need.
        with_engine: Install also vLLM, and make the default model if that is what is served.
        model: What will be served, empty for the default.

    Raises:
        ConfigurationError: The model is none, or something cannot be installed or does not work on
            this machine.
        OSError: The checkout cannot be written to.
    """
    if model:  # said now rather than after minutes of downloads
        resolve_model(model)
    workspace = Workspace.current()
    workspace.state.mkdir(parents=True, exist_ok=True)
    with only_one(workspace.state / "bootstrap.lock"):
        environments = [gateway_environment(workspace, with_tests=with_tests)]
        runtime: EngineRuntime | None = None
        # The one place that reads this variable without the settings model, which needs pydantic.
        named = os.environ.get("RADIXGATE_ENGINE_PYTHON")
        if with_engine:
            runtime = existing_runtime(Path(named) if named else None)
            if runtime is None:
                require_cpu_engine_support()
                environments.append(engine_environment(workspace))
                runtime = EngineRuntime(environments[-1].python, num_gpus=0)
        needs_model = with_engine and not model and not has_default_model(workspace)

        pending = [
            (environment, step) for environment in environments for step in environment.pending()
        ]
        num_steps = len(pending) + (NUM_STEPS if needs_model else 0)
        progress = StepProgress(sys.stderr, num_steps)
        for environment, step in pending:
            environment.install(step, progress)
        if runtime is not None:
            if not named:  # a named one counts for as long as it is named, and no longer
                save_runtime(workspace, runtime)
            if needs_model:
                make_default_model(workspace, runtime.python, progress)


def gateway_environment(workspace: Workspace, *, with_tests: bool) -> Environment:
    """`.venv`: the gateway and the command line, and on request what the tests need."""
    lock = workspace.requirements / "gateway.txt"
    packages = InstallStep("gateway environment", lock, ("-r", str(lock)))
    if with_tests:
        larger = workspace.requirements / "dev.txt"
        packages = InstallStep("tests' environment", larger, ("-r", str(larger)), covers=(lock,))
    steps = [packages, _checkout_itself(workspace, "radixgate into the gateway environment")]
    return Environment(workspace.gateway_environment, steps, workspace.logs)


def engine_environment(workspace: Workspace) -> Environment:
    """`.venv-engine`: vLLM for the CPU."""
    lock = workspace.requirements / "engine-cpu.txt"
    torch = workspace.requirements / "engine-cpu-torch.txt"
    steps = [
        InstallStep("engine environment: vLLM", lock, ("-r", str(lock))),
        InstallStep(
            "engine environment: torch",
            torch,
            ("-r", str(torch)),
            fallback_index=_PYTORCH_CPU_INDEX,
        ),
        _checkout_itself(workspace, "radixgate into the engine environment"),
    ]
    return Environment(workspace.engine_environment, steps, workspace.logs)


def _checkout_itself(workspace: Workspace, title: str) -> InstallStep:
    arguments = ("--no-build-isolation", "--editable", str(workspace.root))
    return InstallStep(title, workspace.root / "pyproject.toml", arguments)


@contextmanager
def only_one(lock_file: Path) -> Iterator[None]:
    """Hold a lock that ends with the process; a second holder waits and says so."""
    with lock_file.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.stderr.write("another set-up is at work here, waiting for it to finish ...\n")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
