"""How far a step is, for people who wait: a bar on a terminal, plain lines elsewhere.

Standard library only, because it runs before anything is installed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

_BAR_WIDTH = 24
_REDRAW_S = 0.1
_LINE_EVERY_S = 10.0


class StepProgress:
    """Steps that follow each other; one is shown at a time.

    Args:
        stream: Where to write; a terminal gets a bar that is redrawn in place.
        num_steps: How many steps `begin` will be called for.
        clock: Monotonic seconds.
    """

    def __init__(
        self, stream: TextIO, num_steps: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = stream
        self._num_steps = num_steps
        self._clock = clock
        self._in_place = stream.isatty()
        self._step = 0
        self._title = ""
        self._began_at = self._written_at = clock()
        self._tenths_written = 0

    def begin(self, title: str) -> None:
        """Start the next step."""
        self._step += 1
        self._title = title
        self._began_at = self._clock()
        self._tenths_written = 0
        self._write_now(f"{self._label()} ...")

    def update(self, share_done: float, detail: str) -> None:
        """Say how far the step is; cheap enough to call on every line of output.

        Args:
            share_done: 0 to 1.
            detail: What is going on, a few words.
        """
        now = self._clock()
        tenths = int(share_done * 10)
        if self._in_place:
            if now - self._written_at < _REDRAW_S:
                return
        elif tenths <= self._tenths_written and now - self._written_at < _LINE_EVERY_S:
            return
        self._tenths_written = tenths
        filled = round(min(max(share_done, 0.0), 1.0) * _BAR_WIDTH)
        bar = "#" * filled + "-" * (_BAR_WIDTH - filled)
        self._write_now(f"{self._label()} [{bar}] {self._elapsed_s():3.0f} s  {detail}")

    def note(self, text: str) -> None:
        """Show something that must not be missed."""
        self._write_now(f"{self._label()}: {text}")

    def end(self, note: str = "done") -> None:
        """Finish the step and leave one line behind."""
        self._write_now(f"{self._label()}: {note} ({self._elapsed_s():.0f} s)")
        if self._in_place:
            self._stream.write("\n")
            self._stream.flush()

    def break_line(self) -> None:
        """Leave the bar as it is, so that an error message starts on a line of its own."""
        if self._in_place and self._step:
            self._stream.write("\n")
            self._stream.flush()

    def _label(self) -> str:
        return f"[{self._step}/{self._num_steps}] {self._title}"

    def _elapsed_s(self) -> float:
        return self._clock() - self._began_at

    def _write_now(self, line: str) -> None:
        self._written_at = self._clock()
        # "\r" goes back to the line's start and "\x1b[K" clears what a longer text left there.
        self._stream.write(f"\r{line[:110]}\x1b[K" if self._in_place else f"{line}\n")
        self._stream.flush()
