"""Run a program that is told to stop when whoever started it is gone, even by SIGKILL.

    python -m engine_workers.until_parent_ends PROGRAM [ARGUMENT ...]

`make serve` uses it: if make is killed, the engines must not go on without it. The program replaces
this process, and the kernel keeps the order.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Become the program.

    Raises:
        OSError: It cannot be executed.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
