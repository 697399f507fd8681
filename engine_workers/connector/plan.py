"""What the scheduler's side tells the workers' side to do in one step.

vLLM carries these between its processes; they hold numbers and hashes, never KV bytes.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankLoad:
    """Where one tensor-parallel rank finds its part of the blocks."""

    boot_token: str
    """Life of the server whose arena the offsets are of."""
    offsets: tuple[int, ...]
    """Arena offsets of the payloads, one a block."""
    checksums: tuple[int, ...]
    """xxh3_64 of the payloads, one a block."""


@dataclass(frozen=True, slots=True)
class LoadJob:
    """One request's blocks, to be copied from the arena into the engine's KV cache."""

    request_id: str
    ranks: tuple[RankLoad, ...]
    """One for each tensor-parallel rank."""
    block_ids: tuple[int, ...]
    """The engine's own blocks to fill, in the order of the offsets."""
    block_hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class SaveBlock:
    """A block that is full after this step, with all that its header says."""

    block_id: int
    block_hash: bytes
    parent_hash: bytes | None
    token_ids: tuple[int, ...]
    extra_keys: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class SaveChain:
    """Blocks of one request, parents first; when one is dropped, so are all behind it."""

    request_id: str
    blocks: tuple[SaveBlock, ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Everything of one step."""

    loads: tuple[LoadJob, ...] = ()
    saves: tuple[SaveChain, ...] = ()
    ended: tuple[str, ...] = ()
    """Requests whose chains of saves end here: finished, or preempted and to begin again."""
