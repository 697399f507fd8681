from __future__ import annotations

import asyncio
import threading

import pytest

from cache_router.errors import TierError
from engine_workers.tiers.worker_threads import WorkerThreads


def failing() -> None:
    raise OSError(5, "broken")


async def test_work_returns_and_raises_as_if_it_were_called() -> None:
    threads = WorkerThreads("ssd", 2)
    assert await threads.run(lambda: 7) == 7
    with pytest.raises(OSError, match="broken"):
        await threads.run(failing)
    assert await threads.run_all(lambda: 1 for _ in range(5)) == [1] * 5
    await threads.close()


async def test_cancellation_waits_for_the_works_end() -> None:
    threads = WorkerThreads("ssd", 1)
    may_end = threading.Event()
    memory = bytearray(1)

    def work() -> None:
        may_end.wait(20)
        memory[0] = 1

    running = asyncio.create_task(threads.run(work))
    waiting = asyncio.create_task(threads.run(failing))
    await asyncio.sleep(0)
    running.cancel()
    waiting.cancel()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not running.done()
    running.cancel()
    may_end.set()
    for task in (running, waiting):
        with pytest.raises(asyncio.CancelledError):
            await task
    assert memory == b"\1"
    await threads.close()


async def test_all_work_has_ended_when_one_failure_is_told() -> None:
    threads = WorkerThreads("s3", 2)
    done: list[int] = []
    works = [failing, *(lambda number=number: done.append(number) for number in range(8))]
    with pytest.raises(OSError, match="broken"):
        await threads.run_all(works)
    assert sorted(done) == list(range(8))
    await threads.close()


async def test_closing_finishes_what_was_accepted_and_takes_no_more() -> None:
    threads = WorkerThreads("ssd", 1)
    running = [asyncio.create_task(threads.run(lambda: 7)) for _ in range(4)]
    await asyncio.sleep(0)
    await threads.close()
    await threads.close()
    assert await asyncio.gather(*running) == [7] * 4
    with pytest.raises(TierError, match="closed"):
        await threads.run(lambda: 7)
