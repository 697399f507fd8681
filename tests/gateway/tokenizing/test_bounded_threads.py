from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from cache_router.errors import OverloadedError, TokenizerError
from gateway.tokenizing.bounded_threads import BoundedThreads


@pytest.fixture
def threads() -> Iterator[BoundedThreads]:
    threads = BoundedThreads(num_threads=1, max_queued=2)
    yield threads
    threads.close()


async def test_results_and_errors_come_back_to_the_loop(threads: BoundedThreads) -> None:
    assert await threads.run(pow, 2, 10) == 1024
    assert await threads.run(threading.get_ident) != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        await threads.run(divmod, 1, 0)


async def test_a_call_beyond_the_bound_is_refused_and_counted(threads: BoundedThreads) -> None:
    gate = threading.Event()
    tasks = [asyncio.create_task(threads.run(gate.wait)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError):
        await threads.run(int)
    assert threads.num_refused == 1
    gate.set()
    assert await asyncio.gather(*tasks) == [True, True]
    assert await threads.run(int) == 0


async def test_a_running_call_keeps_its_place_when_nobody_waits_for_it_any_more(
    threads: BoundedThreads,
) -> None:
    begun, gate = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        gate.wait()

    running = asyncio.create_task(threads.run(work))
    await asyncio.to_thread(begun.wait)
    queued = asyncio.create_task(threads.run(int))
    await asyncio.sleep(0)
    for task in (running, queued):
        task.cancel()
    await asyncio.gather(running, queued, return_exceptions=True)
    # The queued call has left, the running one cannot.
    waiting = asyncio.create_task(threads.run(int))
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError):
        await threads.run(int)
    gate.set()
    assert await waiting == 0


async def test_stopped_threads_refuse(threads: BoundedThreads) -> None:
    threads.close()
    with pytest.raises(TokenizerError, match="stopped"):
        await threads.run(int)
