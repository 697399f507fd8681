"""Which Python runs the engines, and on what: chosen by the bootstrap, read by the launcher.

Standard library only, because the bootstrap chooses before anything is installed.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from cache_router.errors import ConfigurationError
from engine_workers.hardware import count_nvidia_gpus
from engine_workers.workspace import Workspace

_FIND_VLLM_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class EngineRuntime:
    """An interpreter that can import vLLM."""

    python: Path
    num_gpus: int
    """NVIDIA GPUs to run on, 0 for the CPU."""


def existing_runtime(engine_python: Path | None) -> EngineRuntime | None:
    """A vLLM that is installed already and should be used, None if one has to be installed.

    An interpreter that was named is used on any hardware. Otherwise the interpreter that runs this
    is, where it has vLLM and the machine an NVIDIA GPU.

    Args:
        engine_python: What `RADIXGATE_ENGINE_PYTHON` says.

    Raises:
        ConfigurationError: The named interpreter does not exist, or has no vLLM.
    """
    num_gpus = count_nvidia_gpus()
    if engine_python is not None:
        found = shutil.which(engine_python)
        if found is None:
            raise ConfigurationError(
                "RADIXGATE_ENGINE_PYTHON",
                f"{engine_python} is not a program; name the Python that vLLM is installed for, "
                "or unset it",
            )
        if not _has_vllm(Path(found)):
            raise ConfigurationError(
                "RADIXGATE_ENGINE_PYTHON",
                f"{found} cannot import vllm; install vLLM for it, or unset the variable to get a "
                "CPU engine installed",
            )
        return EngineRuntime(Path(found), num_gpus)
    if num_gpus and _has_vllm(Path(sys.executable)):
        return EngineRuntime(Path(sys.executable), num_gpus)
    return None


def _has_vllm(python: Path) -> bool:
    # Finding the package is enough, and takes no second; importing it takes ten.
    look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    try:
        found = subprocess.run(
            [str(python), "-c", look],
            capture_output=True,
            timeout=_FIND_VLLM_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return found.returncode == 0


def save_runtime(workspace: Workspace, runtime: EngineRuntime) -> None:
    """Remember the choice for `load_runtime`."""
    workspace.state.mkdir(parents=True, exist_ok=True)
    content = json.dumps({"python": str(runtime.python), "num_gpus": runtime.num_gpus})
    partial = workspace.runtime_file.with_suffix(".partial")
    partial.write_text(content + "\n")
    partial.replace(workspace.runtime_file)


def load_runtime(workspace: Workspace, engine_python: Path | None) -> EngineRuntime:
    """The interpreter to start engines with.

    Raises:
        ConfigurationError: There is none yet, or it is gone.
    """
    if engine_python is not None:
        runtime = existing_runtime(engine_python)
        assert runtime is not None  # a named interpreter is found, or refused with an error
        return runtime
    advice = "run `make serve` in the checkout once, or set RADIXGATE_ENGINE_PYTHON to a Python "
    advice += "that has vLLM"
    try:
        content = json.loads(workspace.runtime_file.read_text())
        runtime = EngineRuntime(Path(content["python"]), int(content["num_gpus"]))
    except FileNotFoundError:
        here = existing_runtime(None)
        if here is not None:
            return here
        raise ConfigurationError(
            "RADIXGATE_ENGINE_PYTHON", f"no vLLM was set up here; {advice}"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            "RADIXGATE_ENGINE_PYTHON",
            f"{workspace.runtime_file} cannot be read ({error}); {advice}",
        ) from error
    if not runtime.python.exists():
        raise ConfigurationError(
            "RADIXGATE_ENGINE_PYTHON", f"{runtime.python} does not exist; {advice}"
        )
    return runtime
