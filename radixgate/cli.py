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
    from radixgate.commands import run_command

    try:
        run_command()
    except KeyboardInterrupt:
        sys.exit(0)
    except (RadixgateError, BaseExceptionGroup) as error:
        fail(error)


def _end_cleanly(_number: int, _frame: FrameType | None) -> NoReturn:
    sys.exit(0)


def fail(error: BaseException) -> NoReturn:
    """Tell the one error that matters most, and end.

    Tasks that fail together come in groups. Not `except*`: an exit from one of its branches would
    be put into a group again, and end as a traceback.

    Raises:
        BaseException: `error` itself, if it is not ours alone: a bug keeps its traceback.
    """
    leaves = _leaves(error)
    for leaf in leaves:
        if not isinstance(leaf, RadixgateError):
            raise error
    told = next((leaf for leaf in leaves if isinstance(leaf, ConfigurationError)), leaves[0])
    sys.stderr.write(f"radixgate: {told}\n")
    sys.exit(2 if isinstance(told, ConfigurationError) else 1)


def _leaves(error: BaseException) -> list[BaseException]:
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for member in error.exceptions for leaf in _leaves(member)]
