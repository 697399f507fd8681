"""Blocking work of a tier, off the event loop, with an end that can be relied on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from cache_router.errors import TierError

ResultT = TypeVar("ResultT")


class WorkerThreads:
    """A tier's own few threads, so that a slow disk holds up nothing else.

    Args:
        tier: Whose they are.
        num_threads: How many; further work waits its turn.
    """

    def __init__(self, tier: str, num_threads: int) -> None:
        self._tier = tier
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix=f"tier-{tier}")
        self._is_closed = False

    async def run(self, work: Callable[[], ResultT]) -> ResultT:
        """Run `work` on a thread and return what it returns or raise what it raises.

        A caller that is cancelled gets its cancellation only when the work has ended: until then
        the work reads or writes memory that the caller would use again.

        Raises:
            TierError: `close` was called.
        """
        if self._is_closed:
            raise TierError(self._tier, "closed")
        ended = asyncio.wrap_future(self._executor.submit(work))
        cancellation: asyncio.CancelledError | None = None
        while not ended.done():
            try:
                await asyncio.wait([ended])
            except asyncio.CancelledError as cancelled:
                cancellation = cancelled
        if cancellation is not None:
            # Nobody is left to be told; reading it keeps asyncio from reporting it as unseen.
            ended.exception()
            raise cancellation
        return ended.result()

    async def run_all(self, works: Iterable[Callable[[], ResultT]]) -> list[ResultT]:
        """Run all of them, as many at once as there are threads; when one fails, after the last.

        Raises:
            TierError: `close` was called.
        """
        results = await asyncio.gather(*(self.run(work) for work in works), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return [result for result in results if not isinstance(result, BaseException)]

    async def close(self) -> None:
        """Do all the work that was accepted, and end the threads."""
        self._is_closed = True
        await asyncio.to_thread(self._executor.shutdown)
