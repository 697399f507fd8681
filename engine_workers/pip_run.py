"""Run pip, show how far it is, keep its output in a log, and say what came of it.

Standard library only, because it runs before anything is installed.
"""

from __future__ import annotations

import os
import re
import selectors
import subprocess
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_TICK_S = 0.2
_STOP_S = 10.0
_SIZED_FILE = re.compile(r"^\s*Downloading (?:\S*/)?(?P<file>[^\s/]+) \((?P<size>[^)]+)\)")


@dataclass(frozen=True, slots=True)
class PipOutcome:
    """What came of one run."""

    succeeded: bool
    problem: str
    """pip's own last error line, empty after success."""
    not_found: bool
    """No index that pip is configured with has the asked-for version."""


class PipRun:
    """One run of pip over a requirements file.

    Args:
        python: The environment's interpreter.
        arguments: What follows `pip`.
        num_requirements: How many packages the requirements name.
        site_packages: Where to count what is installed already, None if nothing is installed.
        log_file: Receives the full output; replaced.
        on_progress: Called with the share done (0 to 1) and a few words, several times a second.
    """

    def __init__(
        self,
        python: Path,
        arguments: Sequence[str],
        *,
        num_requirements: int,
        site_packages: Path | None,
        log_file: Path,
        on_progress: Callable[[float, str], None],
    ) -> None:
        self._command = [str(python), "-m", "pip", *arguments]
        self._num_requirements = max(num_requirements, 1)
        self._site_packages = site_packages
        self._log_file = log_file
        self._on_progress = on_progress
        self._unread: deque[bytes] = deque()
        self._num_collected = 0
        self._num_installed_before = 0
        self._num_to_install = 0
        self._current = "starting pip"
        self._problem = ""
        self._not_found = False

    def run(self) -> PipOutcome:
        """Run to the end; pip is ended too if this is interrupted.

        Raises:
            OSError: pip cannot be started, or the log cannot be written.
        """
        self._log_file.parent.mkdir(parents=True, exist_ok=True)
        environment = os.environ | {"PYTHONUNBUFFERED": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        with (
            self._log_file.open("wb") as log,
            subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment,
            ) as process,
        ):
            assert process.stdout is not None
            try:
                for lines in _lines_or_ticks(process.stdout.fileno()):
                    self._unread.extend(lines)
                    self._show_progress()
                    while self._unread:
                        self._read_one(log)
                        self._show_progress()
            except BaseException:
                _end(process)
                self._read_what_is_left(process.stdout.fileno(), log)
                raise
            succeeded = process.wait() == 0
        return PipOutcome(
            succeeded=succeeded,
            problem="" if succeeded else self._problem or "pip gave no reason",
            not_found=self._not_found and not succeeded,
        )

    @property
    def install_began(self) -> bool:
        """Whether packages may be half written; before that, the environment is as it was."""
        return self._num_to_install > 0

    def _read_what_is_left(self, descriptor: int, log: IO[bytes]) -> None:
        # pip may have begun to install after what was read last.
        for lines in _lines_or_ticks(descriptor):
            if not lines:  # something that pip started still holds the pipe
                break
            self._unread.extend(lines)
        while self._unread:
            self._read_one(log)

    def _read_one(self, log: IO[bytes]) -> None:
        line = self._unread.popleft()
        log.write(line)
        self._read_line(line.decode(errors="replace").rstrip())

    def _show_progress(self) -> None:
        self._on_progress(self._share_done(), self._current)

    def _read_line(self, line: str) -> None:
        if line.startswith("Collecting "):
            self._num_collected += 1
            self._current = f"collecting {line.split()[1].split(';')[0]}"
        elif line.startswith("Requirement already satisfied"):
            self._num_collected += 1
        elif line.startswith("Ignoring "):  # its marker excludes this platform
            self._num_requirements = max(self._num_requirements - 1, 1)
        elif match := _SIZED_FILE.match(line):
            self._current = f"downloading {match['file']} ({match['size']})"
        elif line.startswith("Installing collected packages:"):
            self._num_to_install = line.count(",") + 1
            self._num_installed_before = self._count_installed()
        elif line.startswith("ERROR: ResolutionImpossible"):
            # How newer pips put it where their configuration has constraints; no reason in itself,
            # the line before it is.
            self._not_found = True
        elif line.startswith("ERROR:"):
            self._problem = line.removeprefix("ERROR:").strip()
            self._not_found |= self._problem.startswith("No matching distribution found")

    def _share_done(self) -> float:
        # Collecting and installing take about as long as each other: each is half of the bar.
        collected = min(self._num_collected / self._num_requirements, 1.0)
        if self._num_to_install == 0:
            return collected / 2 if self._site_packages else collected
        num_installed = self._count_installed() - self._num_installed_before
        self._current = f"installing, {num_installed} of {self._num_to_install} packages"
        return 0.5 + min(max(num_installed, 0) / self._num_to_install, 1.0) / 2

    def _count_installed(self) -> int:
        if self._site_packages is None:
            return 0
        return sum(1 for _ in self._site_packages.glob("*.dist-info"))


def _lines_or_ticks(descriptor: int) -> Iterator[list[bytes]]:
    """Whole lines as they come, and none whenever nothing came for a moment."""
    pending = b""
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while True:
            if not selector.select(timeout=_TICK_S):
                yield []
                continue
            received = os.read(descriptor, 65536)
            if not received:
                break
            *lines, pending = (pending + received).split(b"\n")
            if lines:
                yield [line + b"\n" for line in lines]
    if pending:
        yield [pending]


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
