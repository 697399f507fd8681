from __future__ import annotations

import io

from engine_workers.progress import StepProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_pipe_gets_lines_and_not_too_many() -> None:
    output, clock = io.StringIO(), Clock()
    progress = StepProgress(output, 2, clock)
    progress.begin("packages")
    for i in range(1000):
        progress.update(i / 1000, f"package {i}")
    progress.end()
    lines = output.getvalue().splitlines()
    assert len(lines) == 11
    assert "\r" not in output.getvalue()
    assert lines[-1] == "[1/2] packages: done (0 s)"


def test_a_pipe_gets_a_sign_of_life_when_nothing_moves() -> None:
    output, clock = io.StringIO(), Clock()
    progress = StepProgress(output, 1, clock)
    progress.begin("torch")
    for _ in range(30):
        clock.now_s += 1
        progress.update(0.0, "downloading")
    assert output.getvalue().count("downloading") == 3


def test_a_terminal_gets_one_line_that_is_redrawn() -> None:
    output, clock = Terminal(), Clock()
    progress = StepProgress(output, 3, clock)
    progress.begin("packages")
    clock.now_s = 5
    progress.update(0.5, "half")
    assert output.getvalue().endswith(
        "\r[1/3] packages [############------------]   5 s  half\x1b[K"
    )
    progress.end()
    assert output.getvalue().count("\n") == 1


def test_steps_are_numbered() -> None:
    output = io.StringIO()
    progress = StepProgress(output, 2, Clock())
    for title in ("one", "two"):
        progress.begin(title)
        progress.end()
    assert output.getvalue().splitlines()[-1] == "[2/2] two: done (0 s)"
