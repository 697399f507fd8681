from __future__ import annotations

import sys
from pathlib import Path

import pytest

from engine_workers.pip_run import PipOutcome, PipRun

Reports = list[tuple[float, str]]


def run(folder: Path, script: str, num_requirements: int = 2) -> tuple[PipOutcome, Reports, PipRun]:
    """Run a script in pip's place."""
    python = folder / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    site_packages = folder / "site-packages"
    site_packages.mkdir()
    reports: Reports = []

    def report(share: float, detail: str) -> None:
        reports.append((share, detail))
        if detail.startswith("installing"):  # as pip would, a moment later
            (site_packages / "x-1.dist-info").mkdir(exist_ok=True)

    pip = PipRun(
        python,
        ["install"],
        num_requirements=num_requirements,
        site_packages=site_packages,
        log_file=folder / "logs" / "pip.log",
        on_progress=report,
    )
    return pip.run(), reports, pip


def test_success_has_no_problem(tmp_path: Path) -> None:
    outcome, _, pip = run(tmp_path, "echo Successfully installed x-1")
    assert outcome == PipOutcome(True, "", not_found=False)
    assert not pip.install_began


def test_collecting_is_the_first_half_and_installing_the_second(tmp_path: Path) -> None:
    script = """
        echo 'Ignoring w: markers do not match'
        echo 'Collecting x==1 (from -r lock)'
        echo '  Downloading x-1-py3-none-any.whl (20 kB)'
        echo 'Collecting y==2'
        echo 'Installing collected packages: x, y'
        echo next"""
    _, reports, pip = run(tmp_path, script, num_requirements=3)
    assert pip.install_began
    shares = [share for share, _ in reports]
    assert shares == sorted(shares)
    assert (0.25, "collecting x==1") in reports
    assert (0.25, "downloading x-1-py3-none-any.whl (20 kB)") in reports
    assert (0.5, "collecting y==2") in reports
    assert reports[-1] == (0.75, "installing, 1 of 2 packages")


@pytest.mark.parametrize(
    ("errors", "problem", "not_found"),
    [
        (
            ["Could not find a version", "No matching distribution found for x==9"],
            "No matching distribution found for x==9",
            True,
        ),
        (["Cannot install x==9", "ResolutionImpossible: for help"], "Cannot install x==9", True),
        (["[Errno 28] No space left on device"], "[Errno 28] No space left on device", False),
        ([], "pip gave no reason", False),
    ],
)
def test_a_failure_has_pips_own_reason(
    tmp_path: Path, errors: list[str], problem: str, not_found: bool
) -> None:
    lines = "\n".join(f"echo 'ERROR: {error}' >&2" for error in errors)
    outcome, _, _ = run(tmp_path, f"{lines}\nexit 1")
    assert not outcome.succeeded
    assert (outcome.problem, outcome.not_found) == (problem, not_found)


def test_the_log_has_all_of_the_output(tmp_path: Path) -> None:
    run(tmp_path, "echo one; echo two >&2; printf three")
    assert (tmp_path / "logs" / "pip.log").read_text() == "one\ntwo\nthree"


def interrupted(folder: Path, script: str) -> PipRun:
    """Interrupt a script in pip's place when it has written its first line."""

    def interrupt(_share: float, detail: str) -> None:
        if detail != "starting pip":
            raise KeyboardInterrupt

    python = folder / "python"
    python.write_text(f"#!{sys.executable}\nimport signal, sys\n{script}\nsignal.pause()\n")
    python.chmod(0o755)
    pip = PipRun(
        python,
        [],
        num_requirements=1,
        site_packages=None,
        log_file=folder / "log",
        on_progress=interrupt,
    )
    # It could not return while pip runs: leaving the process' context waits for it.
    with pytest.raises(KeyboardInterrupt):
        pip.run()
    return pip


def test_pip_is_ended_when_the_run_is_interrupted(tmp_path: Path) -> None:
    pip = interrupted(tmp_path, "print('Collecting x', flush=True)")
    assert not pip.install_began


def test_what_pip_began_as_it_was_interrupted_is_noticed(tmp_path: Path) -> None:
    begin = "lambda *_: sys.exit(print('Installing collected packages: x', flush=True))"
    pip = interrupted(tmp_path, f"signal.signal(15, {begin})\nprint('Collecting x', flush=True)")
    assert pip.install_began
