"""An engine without a model: numpy memory, both sides of the connector, a real connection."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import msgspec
import numpy as np

from engine_workers.cache_wire import PROTOCOL_VERSION, Hello
from engine_workers.connector.block_layout import BlockLayout, LayerMemory
from engine_workers.connector.client import CacheServerClient, ClientTimes
from engine_workers.connector.connector_settings import ConnectorSettings
from engine_workers.connector.engine_request import ScheduledRequest
from engine_workers.connector.plan import StepPlan
from engine_workers.connector.scheduler_side import SchedulerSide
from engine_workers.connector.worker_side import WorkerSide
from tests.engine_workers.connector.fakes import BLOCK_SIZE, NAMESPACE, FakeView, Request

NUM_BLOCKS = 64
LAYER_BLOCK_BYTES = 6_000
NUM_LAYERS = 3
TIMES = ClientTimes(welcome_s=1.0, silence_s=1.0, first_pause_s=0.02, longest_pause_s=0.1)


def until(condition: Callable[[], object]) -> None:
    """Wait for another thread or process; the test's time limit ends it if it never happens."""
    while not condition():
        time.sleep(0.001)


def layout_of(memory: np.ndarray[tuple[int, int, int], np.dtype[np.uint8]]) -> BlockLayout:
    """Layers of contiguous blocks, with a gap behind each block."""
    return BlockLayout(
        tuple(
            LayerMemory(layer.ctypes.data, layer.strides[0], LAYER_BLOCK_BYTES) for layer in memory
        ),
        memory.shape[1],
    )


class NumpyEngine:
    """Runs requests one after the other, as an engine's scheduler and worker do.

    Its memory has shape (NUM_LAYERS, NUM_BLOCKS, LAYER_BLOCK_BYTES + gap).
    """

    def __init__(
        self, socket: Path, name: str = "engine", ring_slots: int = 8, model: str = "tiny"
    ) -> None:
        self.memory = np.zeros((NUM_LAYERS, NUM_BLOCKS, LAYER_BLOCK_BYTES + 96), np.uint8)
        self.layout = layout_of(self.memory)
        self._next_block = 1
        self.failed: frozenset[str] = frozenset()
        settings = ConnectorSettings(socket=str(socket), lookup_deadline_s=0.5)
        namespace = msgspec.structs.replace(NAMESPACE, model=model)

        def client(role: str, slots: int) -> CacheServerClient:
            payload_bytes = self.layout.payload_bytes
            # The server takes an engine's id for one namespace.
            engine_id = f"{name} of {model}"
            hello = Hello(PROTOCOL_VERSION, engine_id, role, namespace, payload_bytes, slots)
            made = CacheServerClient(socket, lambda: hello, TIMES)
            made.start()
            return made

        self.clients = [client("scheduler", 0), client("worker", ring_slots)]
        self.scheduler = SchedulerSide([self.clients[0]], BLOCK_SIZE, settings, FakeView())
        self.worker = WorkerSide(self.clients[1], self.layout, 0)

    def __enter__(self) -> NumpyEngine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with ExitStack() as stack:
            for client in self.clients:
                stack.callback(client.close, 5.0)
            self.worker.close(5.0)

    def bytes_of(self, block_ids: Sequence[int]) -> bytes:
        return self.memory[:, list(block_ids), :LAYER_BLOCK_BYTES].tobytes()

    def step(self, *scheduled: ScheduledRequest) -> None:
        plan = self.scheduler.plan_step(scheduled, ())
        self._work(plan)

    def compute(self, item: Request, content: int) -> list[int]:
        """Fill the request's blocks with noise of that seed, and save them."""
        block_ids = self._allocate(item)
        noise = np.random.default_rng(content)
        for block_id in block_ids:
            self.memory[:, block_id] = noise.integers(0, 256, self.memory[:, 0].shape, np.uint8)
        self.scheduler.on_new_request(item)
        self.step(ScheduledRequest(item.request_id, item.num_tokens, block_ids))
        self.scheduler.on_finished(item.request_id)
        return block_ids

    def load(self, item: Request) -> list[int]:
        """Load what the server has of the request: the blocks it is in now, none for a miss."""
        self.failed = frozenset()
        self.scheduler.on_new_request(item)
        promised: list[int | None] = [None]

        def is_decided() -> bool:
            promised[0] = self.scheduler.num_new_tokens(item.request_id, 0)
            return promised[0] is not None

        until(is_decided)
        num_tokens = promised[0] or 0
        block_ids = self._allocate(item)
        self.scheduler.on_allocated(item.request_id, block_ids, num_tokens)
        if num_tokens:
            self.step()
            until(lambda: self._is_over(item.request_id))
        self.scheduler.on_finished(item.request_id)
        return block_ids[: num_tokens // BLOCK_SIZE] if not self.failed else []

    def _is_over(self, request_id: str) -> bool:
        results = self.worker.take_results()
        self.failed = results.failed
        committed = self.worker.take_committed()
        self.scheduler.on_step_done(results.finished, results.failed, committed)
        return request_id in results.finished

    def _allocate(self, item: Request) -> list[int]:
        count = -(-item.num_tokens // BLOCK_SIZE)
        first, self._next_block = self._next_block, self._next_block + count
        return list(range(first, first + count))

    def _work(self, plan: StepPlan) -> None:
        self.worker.start_loads(plan.loads)
        self.worker.save(plan.saves, plan.ended)
