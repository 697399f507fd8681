"""What an engine is doing while it starts, read from its log."""

from __future__ import annotations

from pathlib import Path

# In the order in which vLLM gets there.
_PHASES = (
    ("importing vLLM", ""),
    ("reading the configuration", "non-default args"),
    ("starting processes", "Initializing a V1 LLM engine"),
    ("loading the weights", "Starting to load model"),
    ("making the KV cache", "Loading weights took"),
    ("starting the HTTP server", "init engine ("),
)
NUM_PHASES = len(_PHASES)
"""How many phases `startup_phase` knows."""

_MAX_LOG_BYTES = 256 * 1024


def startup_phase(log_file: Path, begin: int) -> tuple[int, str]:
    """The last phase that the log shows.

    Args:
        log_file: May be missing.
        begin: Bytes that other lives of the engine have written.

    Returns:
        Its number, from 0, and what it is called.
    """
    try:
        with log_file.open("rb") as log:
            log.seek(begin)
            text = log.read(_MAX_LOG_BYTES).decode(errors="replace")
    except FileNotFoundError:
        text = ""
    reached = [i for i, (_, mark) in enumerate(_PHASES) if mark in text]
    return reached[-1], _PHASES[reached[-1]][0]
