"""The `radixgate` program: signals, errors and exit codes; the commands are in `commands.py`."""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import NoReturn

from cache_router.errors import ConfigurationError, RadixgateError


def main() -> None:
    """Run the command line.

    Exit status: 0 after a clean end, by a signal too; 2 for a configuration that cannot work,
    after one line that names the setting; 1 for anything else.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end_cleanly)
    # Only now, because this takes a while, and Ctrl-C may come during it.
    from radixgate.commands import app

    try:
        app(prog_name="radixgate")
    except* ConfigurationError as group:
        _fail(group, 2)
    except* RadixgateError as group:
        _fail(group, 1)
    except* KeyboardInterrupt:
        sys.exit(0)


def _end_cleanly(_number: int, _frame: FrameType | None) -> NoReturn:
    sys.exit(0)


def _fail(group: BaseExceptionGroup[RadixgateError], status: int) -> NoReturn:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    sys.stderr.write(f"radixgate: {error}\n")
    sys.exit(status)
