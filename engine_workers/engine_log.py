"""The file that an engine writes into: nobody else's, bounded, and what it ends with."""

from __future__ import annotations

import fcntl
import itertools
import os
import shutil
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedWriter
from pathlib import Path

from cache_router.errors import EngineError

MAX_LOG_BYTES = 16 * 1024**2
"""Size beyond which `bound_log` starts a log anew; as much again is kept of the old one."""

_TAIL_BYTES = 65536


@contextmanager
def own_log(preferred: Path) -> Iterator[Path]:
    """An empty log file that no other process uses, for the length of a block.

    Args:
        preferred: Used if it is free; else its name with a number is, `engine-0.2.log` for example:
            two `make serve` in one checkout must not write into each other's logs.

    Raises:
        EngineError: It cannot be written.
    """
    with _open_own(preferred) as log:
        yield Path(log.name)


def _open_own(preferred: Path) -> BufferedWriter:
    try:
        preferred.parent.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(1):
            file = preferred if number == 1 else preferred.with_suffix(f".{number}.log")
            log = file.open("ab")
            try:
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                log.close()
            else:
                log.truncate(0)
                return log
    except OSError as error:
        raise EngineError(f"the log {preferred} cannot be written: {error.strerror}") from error
    raise AssertionError("count ends never")


def bound_log(log_file: Path) -> None:
    """Move what is in a log that has grown too large to `NAME.old`, replacing what is there.

    The file itself stays, because the engine has it open; what it writes meanwhile may be lost.

    Raises:
        OSError: It cannot be read or copied.
    """
    if log_file.exists() and log_file.stat().st_size > MAX_LOG_BYTES:
        shutil.copyfile(log_file, log_file.with_name(f"{log_file.name}.old"))
        os.truncate(log_file, 0)


def last_lines(log_file: Path, num_lines: int) -> str:
    """The end of a log.

    Raises:
        OSError: It cannot be read.
    """
    with log_file.open("rb") as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
        lines = deque(log.read().decode(errors="replace").splitlines(), maxlen=num_lines)
    return "\n".join(lines)
