"""KV events as vLLM publishes them, old and new, read into one form.

A batch is a msgpack array `(timestamp, events, data-parallel rank)`. vLLM 0.32 writes each event
as a map with a `type`, older ones as an array that begins with it. Fields and event types that
we do not know are left aside: a newer engine must not blind the router.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from cache_router.errors import EventDecodeError
from cache_router.types import EngineBlockHash, Medium, TierId, tier_of


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Blocks that follow each other and one parent now lie on a medium."""

    block_hashes: Sequence[EngineBlockHash]
    parent_block_hash: EngineBlockHash | None
    """None if the first of them begins a sequence."""
    token_ids: Sequence[int]
    """Shape (num_blocks * block_size,)."""
    block_size: int
    medium: Medium = Medium.GPU
    lora_name: str | None = None
    extra_keys: Sequence[Sequence[Any] | None] | None = None
    """One entry a block, see `hashing.hash_event_blocks`."""
    group_idx: int | None = None
    """Which of a hybrid model's KV cache groups the blocks belong to."""
    kv_cache_spec_kind: str | None = None
    """That group's kind of attention."""
    ownership: str | None = None
    """Which tier of the publisher's storage it is, by the publisher's name for it."""

    @property
    def tier(self) -> TierId:
        """Where the blocks are now."""
        return tier_of(self.medium, self.ownership)


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """One copy of each of these blocks left a medium."""

    block_hashes: Sequence[EngineBlockHash]
    medium: Medium = Medium.GPU
    group_idx: int | None = None
    ownership: str | None = None

    @property
    def tier(self) -> TierId:
        """Where the blocks were."""
        return tier_of(self.medium, self.ownership)


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The worker's cache is empty."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True, slots=True)
class EventBatch:
    """One published batch, its events in the order in which they happened."""

    events: Sequence[KvEvent]
    num_unknown: int = 0
    """Events of types that we do not know."""
    num_undescribed: int = 0
    """Stored events whose blocks cannot be named by content: placeholders without token ids,
    and blocks of a LoRA adapter that is given by a number only."""


_Hash = int | bytes
_TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]


class _MapStored(msgspec.Struct, tag="BlockStored", frozen=True):
    block_hashes: list[_Hash]
    parent_block_hash: _Hash | None
    token_ids: list[_TokenId]
    block_size: Annotated[int, msgspec.Meta(ge=0)]
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: Any = None
    locality: Any = None
    ownership: Any = None


class _MapRemoved(msgspec.Struct, tag="BlockRemoved", frozen=True):
    block_hashes: list[_Hash]
    medium: str | None = None
    group_idx: int | None = None
    locality: Any = None
    ownership: Any = None


class _MapCleared(msgspec.Struct, tag="AllBlocksCleared", frozen=True):
    pass


class _ArrayStored(_MapStored, tag="BlockStored", array_like=True, frozen=True):
    pass


class _ArrayRemoved(_MapRemoved, tag="BlockRemoved", array_like=True, frozen=True):
    pass


class _ArrayCleared(_MapCleared, tag="AllBlocksCleared", array_like=True, frozen=True):
    pass


_MapEvent = _MapStored | _MapRemoved | _MapCleared
_ArrayEvent = _ArrayStored | _ArrayRemoved | _ArrayCleared


class _MapBatch(msgspec.Struct, array_like=True, frozen=True):
    ts: float
    events: list[_MapEvent]


class _MixedBatch(msgspec.Struct, array_like=True, frozen=True):
    ts: float
    events: list[Any]


_map_batch_decoder = msgspec.msgpack.Decoder(_MapBatch)
_mixed_batch_decoder = msgspec.msgpack.Decoder(_MixedBatch)

_KNOWN_TYPES = frozenset({"BlockStored", "BlockRemoved", "AllBlocksCleared"})


def decode_batch(payload: bytes) -> EventBatch:
    """Read one batch.

    Raises:
        EventDecodeError: not msgpack, not a batch, or an event of a known type that lacks what
            that type must have. Nothing of such a batch should be applied.
    """
    try:
        wire_events: Sequence[_MapEvent] = _map_batch_decoder.decode(payload).events
    except msgspec.ValidationError:
        return _decode_other_forms(payload)
    except (msgspec.DecodeError, RecursionError) as error:
        raise EventDecodeError(f"not a KV event batch: {error}") from error
    return _to_batch(wire_events, num_unknown=0)


def _decode_other_forms(payload: bytes) -> EventBatch:
    """Read a batch with array-form events, or with types that we do not know."""
    try:
        raw_events = _mixed_batch_decoder.decode(payload).events
        known = [
            msgspec.convert(raw, _ArrayEvent if isinstance(raw, list) else _MapEvent)
            for raw in raw_events
            if _type_of(raw) in _KNOWN_TYPES
        ]
    except (msgspec.DecodeError, RecursionError) as error:
        raise EventDecodeError(f"not a KV event batch: {error}") from error
    return _to_batch(known, num_unknown=len(raw_events) - len(known))


def _type_of(raw: Any) -> str:
    match raw:
        case [str() as name, *_] | {"type": str() as name}:
            return name
        case _:
            raise EventDecodeError("an event without a type")


def _to_batch(wire_events: Sequence[_MapEvent], num_unknown: int) -> EventBatch:
    events: list[KvEvent] = []
    num_undescribed = 0
    for wire in wire_events:
        match wire:
            case _MapStored():
                if not wire.block_hashes:
                    continue
                by_number_only = wire.lora_id is not None and wire.lora_name is None
                if not wire.token_ids or wire.block_size == 0 or by_number_only:
                    num_undescribed += 1
                    continue
                events.append(
                    BlockStored(
                        wire.block_hashes,
                        wire.parent_block_hash,
                        wire.token_ids,
                        wire.block_size,
                        _medium(wire.medium),
                        wire.lora_name,
                        wire.extra_keys,
                        wire.group_idx,
                        wire.kv_cache_spec_kind,
                        _ownership(wire.ownership),
                    )
                )
            case _MapRemoved():
                medium = _medium(wire.medium)
                events.append(
                    BlockRemoved(
                        wire.block_hashes, medium, wire.group_idx, _ownership(wire.ownership)
                    )
                )
            case _MapCleared():
                events.append(AllBlocksCleared())
    return EventBatch(events, num_unknown, num_undescribed)


def _medium(name: str | None) -> Medium:
    """Engines that name no medium have only one; a name that we do not know counts as slowest."""
    if name is None:
        return Medium.GPU
    try:
        return Medium(name.upper())
    except ValueError:
        return Medium.STORAGE


def _ownership(name: object) -> str | None:
    # A name of a form that we do not know tells as little as none.
    return name if isinstance(name, str) else None
