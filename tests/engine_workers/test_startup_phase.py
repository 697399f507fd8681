from __future__ import annotations

from pathlib import Path

import pytest

from engine_workers.startup_phase import NUM_PHASES, startup_phase


def test_without_a_log_the_engine_is_in_its_first_phase(tmp_path: Path) -> None:
    assert startup_phase(tmp_path / "none", 0) == (0, "importing vLLM")


@pytest.mark.parametrize(
    ("log", "phase"),
    [
        ("", "importing vLLM"),
        ("INFO non-default args: {}\n", "reading the configuration"),
        ("non-default args\nStarting to load model x...\n", "loading the weights"),
        ("Loading weights took 1.2 seconds\n", "making the KV cache"),
        ("Loading weights took 1 s\ninit engine (profile) took 2 s\n", "starting the HTTP server"),
    ],
)
def test_the_last_mark_in_the_log_decides(tmp_path: Path, log: str, phase: str) -> None:
    log_file = tmp_path / "log"
    log_file.write_text(log)
    number, name = startup_phase(log_file, 0)
    assert name == phase
    assert 0 <= number < NUM_PHASES


def test_what_another_life_wrote_does_not_count(tmp_path: Path) -> None:
    log_file = tmp_path / "log"
    log_file.write_text("Loading weights took 1 s\n")
    begin = log_file.stat().st_size
    assert startup_phase(log_file, begin) == (0, "importing vLLM")
