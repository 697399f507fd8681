"""Which blocks to save in a step: full, confirmed, and not known to be stored already."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine_workers.connector.engine_request import (
    EngineRequest,
    EngineView,
    ScheduledRequest,
)
from engine_workers.connector.plan import SaveBlock, SaveChain

_MAX_KNOWN = 256 * 1024
_MAX_BLOCKS_A_STEP = 64

_NULL_BLOCK = 0
"""vLLM's placeholder for a block that a request does not hold; its content means nothing."""


@dataclass(slots=True)
class _Progress:
    next_block: int = 0
    """First block that was not looked at yet."""
    first_computed: int = 0
    """Blocks from here on were computed for this request, since it last began to run."""


class SavePlanner:
    """Goes through each request's blocks once.

    What a request computed is always offered. What it found in the engine's own cache is offered
    too, unless the server is known to have it: after the server's restart that brings its blocks
    back.

    Args:
        block_size: Tokens in a block.
        engine: Says what is in a block's hash beside tokens and parent.
    """

    def __init__(self, block_size: int, engine: EngineView) -> None:
        self._block_size = block_size
        self._engine = engine
        self._progress: dict[str, _Progress] = {}
        self._known: OrderedDict[bytes, None] = OrderedDict()

    def plan(
        self, running: Sequence[tuple[EngineRequest, ScheduledRequest]]
    ) -> tuple[SaveChain, ...]:
        """Return what becomes full in this step, by request; not more than a step can bear."""
        chains: list[SaveChain] = []
        budget = _MAX_BLOCKS_A_STEP
        for request, scheduled in running:
            blocks = self._blocks_of(request, scheduled, budget)
            budget -= len(blocks)
            if blocks:
                chains.append(SaveChain(request.request_id, tuple(blocks)))
        return tuple(chains)

    def on_stored(self, block_hashes: Iterable[bytes]) -> None:
        """The server has these blocks of every rank: they were saved, or loaded."""
        for block_hash in block_hashes:
            self._known[block_hash] = None
            self._known.move_to_end(block_hash)
        while len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)

    def on_server_lost(self) -> None:
        """Nothing is known of the next server."""
        self._known.clear()

    def on_ended(self, request_id: str) -> None:
        """It finished, or lost its blocks and begins again."""
        self._progress.pop(request_id, None)

    def _blocks_of(
        self, request: EngineRequest, scheduled: ScheduledRequest, budget: int
    ) -> list[SaveBlock]:
        progress = self._progress.get(request.request_id)
        if progress is None:
            progress = self._progress[request.request_id] = _Progress(
                first_computed=request.num_computed_tokens // self._block_size
            )
        num_confirmed = min(request.num_computed_tokens + scheduled.num_tokens, request.num_tokens)
        end = min(
            num_confirmed // self._block_size,
            len(request.block_hashes),
            len(scheduled.block_ids),
        )
        blocks: list[SaveBlock] = []
        while progress.next_block < end and len(blocks) < budget:
            number = progress.next_block
            progress.next_block += 1
            if self._is_wanted(request, scheduled, number, progress.first_computed):
                blocks.append(self._save_block(request, scheduled, number))
        return blocks

    def _is_wanted(
        self,
        request: EngineRequest,
        scheduled: ScheduledRequest,
        number: int,
        first_computed: int,
    ) -> bool:
        if scheduled.block_ids[number] == _NULL_BLOCK:
            return False
        return number >= first_computed or request.block_hashes[number] not in self._known

    def _save_block(
        self, request: EngineRequest, scheduled: ScheduledRequest, number: int
    ) -> SaveBlock:
        start = number * self._block_size
        return SaveBlock(
            block_id=scheduled.block_ids[number],
            block_hash=request.block_hashes[number],
            parent_hash=request.block_hashes[number - 1] if number else None,
            token_ids=tuple(request.all_token_ids[start : start + self._block_size]),
            extra_keys=self._engine.extra_keys(request, number),
        )
