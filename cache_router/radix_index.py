"""Who holds which block: an index over the block hashes of every worker and tier.

A chained block hash names a whole prefix, so the radix tree needs no nodes: the block after a
prefix is found by its own hash, and the longest prefix is the run of hashes that are present.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar

from cache_router.bit_lanes import LANE, LANE_MASK, RANK, Span, on_any_tier
from cache_router.errors import EventDecodeError
from cache_router.hashing import hash_event_blocks, root_hash
from cache_router.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from cache_router.types import BlockHash, EngineBlockHash, TierId, WorkerId

_Name = TypeVar("_Name")

# A hit in full attention is a leading run, which these groups of a hybrid model do not keep:
# they drop the blocks that have left the window, and their remains say nothing about a prefix.
_WINDOWED_KINDS = frozenset(
    {
        "sliding_window",
        "sliding_window_mla",
        "chunked_local_attention",
        "mamba",
        "encoder_only_attention",
        "cross_attention",
    }
)


class Outcome(StrEnum):
    """What became of one event."""

    APPLIED = "applied"
    ORPHAN = "orphan"
    """It continues a block that this worker is not known to hold. Dropped: as a root of its own
    it would stand for a prefix that it is not."""
    REFUSED = "refused"
    """Its tokens, hashes and block size do not fit together, or not with this worker's."""
    IGNORED = "ignored"
    """It concerns a cache group that holds no prefixes."""


@dataclass(frozen=True, slots=True)
class Applied:
    """The answer to one event."""

    outcome: Outcome
    cleared: tuple[WorkerId, ...] = ()
    """Workers that lost entries because the index was full: what it says of them is no longer
    all there is."""


@dataclass(slots=True)
class _Holder:
    """One worker's blocks on one tier."""

    bit: int
    hash_of: dict[EngineBlockHash, BlockHash] = field(default_factory=dict)
    repeats: dict[EngineBlockHash, int] = field(default_factory=dict)
    """How often a block was stored beyond its first copy."""
    aliases: dict[BlockHash, int] = field(default_factory=dict)
    """How many more engine hashes stand for one block of ours: engines hash what we do not,
    such as an adapter's path."""


@dataclass(slots=True)
class _Worker:
    """One worker's place in the bit sets and its holders."""

    slot: int
    holders: dict[TierId, _Holder] = field(default_factory=dict)
    block_size: int | None = None
    windowed_groups: set[int | None] = field(default_factory=set)
    truncated: bool = False

    def num_blocks(self) -> int:
        return sum(len(holder.hash_of) for holder in self.holders.values())

    def find(self, engine_hash: EngineBlockHash) -> BlockHash | None:
        # A worker names a block the same on every tier, so that an offloaded block may
        # continue one that never left the GPU.
        for holder in self.holders.values():
            if (block_hash := holder.hash_of.get(engine_hash)) is not None:
                return block_hash
        return None


class RadixIndex:
    """Blocks of all workers. Each worker's events must come in order, from one writer."""

    def __init__(self, max_blocks: int) -> None:
        """Make an empty index.

        Args:
            max_blocks: Most (block, worker, tier) entries. A stored event that would pass it
                first clears whoever has the most.
        """
        self._max_blocks = max_blocks
        self._num_blocks = 0
        self._bits_of: dict[BlockHash, int] = {}
        self._workers: dict[WorkerId, _Worker] = {}
        self._worker_of_slot: dict[int, WorkerId] = {}
        self._first_bits = 0  # the lowest bit of every worker's lane

    def apply(self, worker_id: WorkerId, event: KvEvent, model: str) -> Applied:
        """Enter one event of a worker that serves this base model."""
        worker = self._workers.get(worker_id) or self._add_worker(worker_id)
        match event:
            case BlockStored():
                return self._store(worker_id, worker, event, model)
            case BlockRemoved():
                return self._remove(worker, event)
            case AllBlocksCleared():
                self.clear(worker_id)
                return Applied(Outcome.APPLIED)

    def remove_worker(self, worker_id: WorkerId) -> None:
        """Forget a worker; costs only its own blocks."""
        self.clear(worker_id)
        worker = self._workers.pop(worker_id, None)
        if worker is not None:
            del self._worker_of_slot[worker.slot]
            self._first_bits &= ~(1 << worker.slot * LANE)

    def clear(self, worker_id: WorkerId) -> None:
        """Forget all blocks of a worker, on every tier, and nothing else about it."""
        worker = self._workers.get(worker_id)
        if worker is not None:
            for holder in worker.holders.values():
                self._empty(holder)
            worker.truncated = False

    def match(self, hashes: Sequence[BlockHash]) -> dict[WorkerId, int]:
        """How many leading blocks each worker holds, whatever the tier; those with none are out.

        Costs one look-up a block up to the longest run, and one step a worker.
        """
        runs: dict[WorkerId, int] = {}
        alive = self._first_bits
        previous: int | None = None
        for depth, block_hash in enumerate(hashes):
            bits = self._bits_of.get(block_hash, 0)
            if bits == previous:
                continue
            previous = bits
            still = alive & on_any_tier(bits)
            if still != alive:
                if depth:
                    self._note_runs(runs, alive & ~still, depth)
                alive = still
                if not alive:
                    return runs
        if hashes:
            self._note_runs(runs, alive, len(hashes))
        return runs

    def spans(self, hashes: Sequence[BlockHash]) -> list[Span]:
        """Cut a prompt's blocks where their holders change; ends before a block nobody holds.

        Costs one look-up a block.
        """
        spans: list[Span] = []
        begin = 0
        held_by = 0
        for depth, block_hash in enumerate(hashes):
            bits = self._bits_of.get(block_hash, 0)
            if bits != held_by:
                if held_by:
                    spans.append(Span(depth - begin, held_by))
                if not bits:
                    return spans
                begin, held_by = depth, bits
        if held_by:
            spans.append(Span(len(hashes) - begin, held_by))
        return spans

    def lane(self, worker_id: WorkerId) -> int:
        """The bits of a worker, all its tiers; 0 if nothing was ever stored there."""
        worker = self._workers.get(worker_id)
        return 0 if worker is None else LANE_MASK << worker.slot * LANE

    def fastest_tier(self, holders: int, lanes: int) -> TierId | None:
        """The fastest tier on which any worker of `lanes` is among `holders`, None for nowhere."""
        held = holders & lanes
        if not held:
            return None
        return next(tier for tier in TierId if held & self._first_bits << RANK[tier])

    def shared_lanes(self) -> int:
        """The bits of every worker's tiers that all nodes reach."""
        return sum(self._first_bits << RANK[tier] for tier in TierId if tier.is_shared)

    def holds(self, worker_id: WorkerId, block_hash: BlockHash) -> bool:
        """Whether a worker has this block, on any tier."""
        worker = self._workers.get(worker_id)
        bits = self._bits_of.get(block_hash, 0)
        return worker is not None and bool(bits >> worker.slot * LANE & LANE_MASK)

    def num_blocks(self, worker_id: WorkerId) -> int:
        """Entries of a worker, a block on two tiers counted twice; 0 for an unknown worker."""
        worker = self._workers.get(worker_id)
        return 0 if worker is None else worker.num_blocks()

    def block_size_of(self, worker_id: WorkerId) -> int | None:
        """Tokens in a block of this worker, as its events say; None before the first of them."""
        worker = self._workers.get(worker_id)
        return None if worker is None else worker.block_size

    def is_truncated(self, worker_id: WorkerId) -> bool:
        """Whether the worker lost entries to a full index since it was last cleared or removed."""
        worker = self._workers.get(worker_id)
        return worker is not None and worker.truncated

    def _add_worker(self, worker_id: WorkerId) -> _Worker:
        slot = next(s for s in range(len(self._workers) + 1) if s not in self._worker_of_slot)
        worker = _Worker(slot)
        self._workers[worker_id] = worker
        self._worker_of_slot[slot] = worker_id
        self._first_bits |= 1 << slot * LANE
        return worker

    def _store(
        self, worker_id: WorkerId, worker: _Worker, event: BlockStored, model: str
    ) -> Applied:
        if event.kv_cache_spec_kind in _WINDOWED_KINDS:
            worker.windowed_groups.add(event.group_idx)
            return Applied(Outcome.IGNORED)
        # Runs of two block sizes cannot be compared, so the size only changes on an empty cache.
        if worker.block_size not in (None, event.block_size) and worker.num_blocks():
            return Applied(Outcome.REFUSED)
        parent = (
            root_hash(model)
            if event.parent_block_hash is None
            else worker.find(event.parent_block_hash)
        )
        if parent is None:
            return Applied(Outcome.ORPHAN)
        num_blocks = len(event.block_hashes)
        try:
            hashes = hash_event_blocks(
                parent,
                event.token_ids,
                num_blocks,
                event.block_size,
                event.lora_name,
                event.extra_keys,
            )
        except EventDecodeError:
            return Applied(Outcome.REFUSED)
        if num_blocks > self._max_blocks:
            return Applied(Outcome.REFUSED)
        cleared = self._make_room(num_blocks)
        if worker_id in cleared and event.parent_block_hash is not None:
            return Applied(Outcome.ORPHAN, cleared)
        worker.block_size = event.block_size
        self._insert(worker, event.tier, event.block_hashes, hashes)
        return Applied(Outcome.APPLIED, cleared)

    def _insert(
        self,
        worker: _Worker,
        tier: TierId,
        engine_hashes: Sequence[EngineBlockHash],
        hashes: Sequence[BlockHash],
    ) -> None:
        holder = worker.holders.get(tier)
        if holder is None:
            holder = _Holder(1 << worker.slot * LANE + RANK[tier])
            worker.holders[tier] = holder
        for engine_hash, block_hash in zip(engine_hashes, hashes, strict=True):
            if engine_hash in holder.hash_of:
                holder.repeats[engine_hash] = holder.repeats.get(engine_hash, 0) + 1
                continue
            holder.hash_of[engine_hash] = block_hash
            self._num_blocks += 1
            bits = self._bits_of.get(block_hash, 0)
            if bits & holder.bit:
                holder.aliases[block_hash] = holder.aliases.get(block_hash, 0) + 1
            else:
                self._bits_of[block_hash] = bits | holder.bit

    def _remove(self, worker: _Worker, event: BlockRemoved) -> Applied:
        if event.group_idx in worker.windowed_groups:
            return Applied(Outcome.IGNORED)
        holder = worker.holders.get(event.tier)
        if holder is not None:
            for engine_hash in event.block_hashes:
                if engine_hash in holder.repeats:
                    _count_down(holder.repeats, engine_hash)
                    continue
                # What was never entered (an orphan, say) has nothing to remove.
                block_hash = holder.hash_of.pop(engine_hash, None)
                if block_hash is None:
                    continue
                self._num_blocks -= 1
                if block_hash in holder.aliases:
                    _count_down(holder.aliases, block_hash)
                else:
                    self._drop_bit(block_hash, holder.bit)
        return Applied(Outcome.APPLIED)

    def _make_room(self, num_blocks: int) -> tuple[WorkerId, ...]:
        cleared: list[WorkerId] = []
        while self._num_blocks + num_blocks > self._max_blocks:
            worker_id, holder = max(
                (
                    (worker_id, holder)
                    for worker_id, worker in self._workers.items()
                    for holder in worker.holders.values()
                ),
                key=lambda pair: len(pair[1].hash_of),
            )
            self._empty(holder)
            self._workers[worker_id].truncated = True
            cleared.append(worker_id)
        return tuple(cleared)

    def _empty(self, holder: _Holder) -> None:
        for block_hash in holder.hash_of.values():
            self._drop_bit(block_hash, holder.bit)
        self._num_blocks -= len(holder.hash_of)
        holder.hash_of.clear()
        holder.repeats.clear()
        holder.aliases.clear()

    def _drop_bit(self, block_hash: BlockHash, bit: int) -> None:
        bits = self._bits_of.get(block_hash, 0) & ~bit
        if bits:
            self._bits_of[block_hash] = bits
        else:
            self._bits_of.pop(block_hash, None)

    def _note_runs(self, runs: dict[WorkerId, int], first_bits: int, num_blocks: int) -> None:
        while first_bits:
            lowest = first_bits & -first_bits
            runs[self._worker_of_slot[(lowest.bit_length() - 1) // LANE]] = num_blocks
            first_bits ^= lowest


def _count_down(counts: dict[_Name, int], name: _Name) -> None:
    if counts[name] == 1:
        del counts[name]
    else:
        counts[name] -= 1
