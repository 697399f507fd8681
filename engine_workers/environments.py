"""Virtual environments that hold exactly what a lock file says, made again only when it changed.

Standard library only, because it runs before anything is installed.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cache_router.errors import ConfigurationError
from engine_workers.pip_run import PipOutcome, PipRun
from engine_workers.progress import StepProgress

_STAMP = "radixgate-installed.json"
_UNFINISHED = "radixgate-unfinished"


@dataclass(frozen=True, slots=True)
class InstallStep:
    """One run of pip, and the file whose content decides whether it is needed."""

    title: str
    source: Path
    arguments: tuple[str, ...]
    """What follows `pip install --no-deps`."""
    covers: tuple[Path, ...] = ()
    """Smaller lock files whose packages are all in `source`, with the same pins."""
    fallback_index: str | None = None
    """Package index to ask where the configured ones do not have what is wanted."""


class Environment:
    """One virtual environment and the steps that fill it.

    What is installed is remembered in a stamp inside the environment, as a hash of each step's
    source. A step that was cut off while it wrote packages leaves a mark; the next run then starts
    from an empty environment, because a half-written package looks installed to pip.
    """

    def __init__(self, folder: Path, steps: Sequence[InstallStep], log_folder: Path) -> None:
        self.folder = folder
        self._steps = tuple(steps)
        self._log_folder = log_folder

    @property
    def python(self) -> Path:
        """The environment's interpreter."""
        return self.folder / "bin" / "python"

    def pending(self) -> list[InstallStep]:
        """Steps whose source is not what was installed last; reads a few small files only."""
        if self._must_be_made():
            return list(self._steps)
        stamp = self._read_stamp()
        return [step for step in self._steps if stamp.get(step.source.name) != _digest(step.source)]

    def install(self, step: InstallStep, progress: StepProgress) -> None:
        """Do one pending step.

        Raises:
            ConfigurationError: pip failed; names the requirements, the reason and the log.
        """
        self._make_if_needed()
        progress.begin(step.title)
        log_file = self._log_folder / f"pip-{self.folder.name.lstrip('.')}-{step.source.stem}.log"
        outcome = self._pip(step, (), log_file, progress)
        if outcome.not_found and step.fallback_index:
            progress.note(f"not on the configured index, asking {step.fallback_index}")
            extra = ("--index-url", step.fallback_index)
            log_file = log_file.with_name(f"{log_file.stem}-fallback.log")
            outcome = self._pip(step, extra, log_file, progress)
        if not outcome.succeeded:
            progress.break_line()
            raise ConfigurationError(
                step.source.name,
                f"pip could not install it ({outcome.problem[:300]}); check the network, the disk "
                f"space and the package index that pip is configured with, then run the same "
                f"command again; full log: {log_file}",
            )
        self._stamp(step)
        progress.end()

    def _pip(
        self, step: InstallStep, extra: Sequence[str], log_file: Path, progress: StepProgress
    ) -> PipOutcome:
        arguments = ["install", "--no-deps", "--no-input", "--progress-bar", "off"]
        run = PipRun(
            self.python,
            [*arguments, *step.arguments, *extra],
            num_requirements=_count_requirements(step.source),
            site_packages=_site_packages(self.folder),
            log_file=log_file,
            on_progress=progress.update,
        )
        unfinished = self.folder / _UNFINISHED
        unfinished.touch()
        try:
            outcome = run.run()
        except BaseException:
            # Ctrl-C during a download is no reason to install everything else again.
            if not run.install_began:
                unfinished.unlink()
            raise
        if outcome.succeeded or not run.install_began:
            unfinished.unlink()
        return outcome

    def _must_be_made(self) -> bool:
        # The interpreter is a link: it dangles after the Python it points to was removed. And
        # an environment cannot be moved, since its scripts name its folder.
        if not self.python.exists() or (self.folder / _UNFINISHED).exists():
            return True
        made_at = self._read_stamp().get("folder")
        return made_at is not None and made_at != str(self.folder)

    def _make_if_needed(self) -> None:
        if not self._must_be_made():
            return
        made = subprocess.run(
            [sys.executable, "-m", "venv", "--clear", str(self.folder)],
            capture_output=True,
            text=True,
            check=False,
        )
        if made.returncode != 0:
            reason = " ".join((made.stdout + made.stderr).split())[-300:]
            raise ConfigurationError(
                self.folder.name,
                f"`{sys.executable} -m venv` failed ({reason}); on Debian and Ubuntu install "
                "python3-venv, then run the same command again",
            )

    def _read_stamp(self) -> dict[str, str]:
        try:
            stamp = json.loads((self.folder / _STAMP).read_text())
        except (FileNotFoundError, ValueError):
            return {}
        return stamp if isinstance(stamp, dict) else {}

    def _stamp(self, step: InstallStep) -> None:
        stamp = self._read_stamp() | {"folder": str(self.folder)}
        stamp |= {source.name: _digest(source) for source in (step.source, *step.covers)}
        partial = self.folder / f"{_STAMP}.partial"
        partial.write_text(json.dumps(stamp, indent=1))
        partial.replace(self.folder / _STAMP)


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _count_requirements(file: Path) -> int:
    if file.suffix != ".txt":
        return 1
    lines = file.read_text().splitlines()
    return sum(1 for line in lines if line.strip() and not line.startswith("#"))


def _site_packages(folder: Path) -> Path:
    names = {"base": str(folder), "platbase": str(folder)}
    return Path(sysconfig.get_path("purelib", "venv", vars=names))
