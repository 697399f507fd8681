"""A vLLM plugin: an engine's inner processes end when the one that started them does.

The guardian sees to that already. This is for the case that it is killed together with the
supervisor and the engine's first process, by a `pkill` with a broad pattern: nobody is left then,
and vLLM's scheduler process would go on alone with all of the engine's memory.

Standard library only: it is loaded into every vLLM process of an environment that has radixgate,
and does nothing in those that radixgate did not launch.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from multiprocessing.process import BaseProcess

LAUNCHED_VARIABLE = "RADIXGATE_LAUNCHED"
"""Set in the environment of the engines that we launch."""


def register() -> None:
    """Called by vLLM in each of its processes, more than once in some."""
    parent = multiprocessing.parent_process()
    if parent is None or LAUNCHED_VARIABLE not in os.environ:
        return
    if any(thread.name == __name__ for thread in threading.enumerate()):
        return
    threading.Thread(target=_end_after, args=(parent,), name=__name__, daemon=True).start()


def _end_after(parent: BaseProcess) -> None:
    multiprocessing.connection.wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGKILL)
