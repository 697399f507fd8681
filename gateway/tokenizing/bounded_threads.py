"""A few threads for work that must not hold up the event loop, with a bound on what waits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from cache_router.errors import OverloadedError, TokenizerError

T = TypeVar("T")
P = ParamSpec("P")


class BoundedThreads:
    """Runs functions on threads of its own and hands their results to the loop that asked."""

    def __init__(self, num_threads: int, max_queued: int) -> None:
        """Start at most `num_threads`; at most `max_queued` calls may wait or run."""
        self.num_refused = 0
        """Calls that found no place."""
        self._max_queued = max_queued
        self._room = threading.BoundedSemaphore(max_queued)
        self._threads = ThreadPoolExecutor(num_threads, "tokenizer")

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `work` on one of the threads; what it raises is raised here.

        Raises:
            OverloadedError: Too much waits already.
            TokenizerError: The threads have been stopped.
        """
        if not self._room.acquire(blocking=False):
            self.num_refused += 1
            raise OverloadedError(self._max_queued, retry_after_s=1)
        try:
            future = self._threads.submit(work, *args, **kwargs)
        except RuntimeError as error:
            self._room.release()
            raise TokenizerError("the tokenizer threads have been stopped") from error
        # The place is taken until the thread is done, even if nobody waits for it any more.
        future.add_done_callback(lambda _: self._room.release())
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Stop taking calls; what a thread has begun ends by itself."""
        self._threads.shutdown(wait=False, cancel_futures=True)
