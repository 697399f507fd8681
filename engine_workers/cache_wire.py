"""What engines and the cache server of their node say to each other; both sides import this.

A Unix stream socket carries frames: 4 bytes of length (little-endian), then one msgpack map tagged
by `type`. File descriptors travel beside the frame that mentions them (SCM_RIGHTS). KV bytes never
do: loads are read from the arena, which engines map read-only, saves go through a write ring that
only one engine writes.

A write ring is a memfd of `num_slots` slots of `slot_bytes`. A slot holds one block:
4 bytes of header length (little-endian), the header as `block_header.pack` makes it, padding to the
next multiple of 64, then the payload.
"""

from __future__ import annotations

import msgspec

from engine_workers.blocks.namespace import Namespace

PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 8 * 1024 * 1024


class _Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of all messages: a map tagged by `type`."""


# --- from an engine ---


class Hello(_Message, frozen=True):
    """First frame of every connection, from scheduler and worker alike."""

    protocol: int
    engine_id: str
    role: str
    """`scheduler` looks up and holds leases, `worker` maps memory and saves."""
    namespace: Namespace
    block_bytes: int
    """Bytes of one block's payload, all layers."""
    ring_slots: int = 0
    """How many write slots a worker asks for."""
    served_models: list[str] = []
    """Names that the engine serves its model under, the one that its KV events are hashed with
    first; so that gateways can tell whose blocks these are. Empty: they are not told."""


class Lookup(_Message, frozen=True):
    """Find and stage the longest prefix; sent when the request is queued."""

    request_id: str
    block_hashes: list[bytes]
    """Of all full blocks of the prompt, parent first."""
    num_local_blocks: int
    """What the engine's own cache already holds; only what is beyond is staged."""
    num_prompt_tokens: int


class Release(_Message, frozen=True):
    """Give leases back: loaded, given up, or never claimed."""

    leases: list[int]


class Put(_Message, frozen=True):
    """Blocks that lie in the write ring, ready to be checked and copied."""

    slots: list[int]
    """Ring slots, in the order of their chain."""
    block_hashes: list[bytes]
    seconds: float = 0.0
    """What copying them into the ring has held up the engine."""


class Forget(_Message, frozen=True):
    """Blocks that turned out unusable when they were loaded: drop them everywhere."""

    block_hashes: list[bytes]


class PrefillReport(_Message, frozen=True):
    """What computing cost, for the decision between loading and computing."""

    num_cached_tokens: int
    num_computed_tokens: int
    seconds: float


# --- from the server ---


class Welcome(_Message, frozen=True):
    """Answer to Hello. The arena's descriptor comes with it, and for a worker its ring's."""

    boot_token: str
    """Random for each life of the server; another one means that all leases are void."""
    arena_bytes: int
    slot_bytes: int
    """Distance of two blocks of this namespace in the arena; `block_bytes` rounded up."""
    ring_slots: int
    ring_slot_bytes: int


class Refused(_Message, frozen=True):
    """The engine cannot be served; it goes on without a cache."""

    reason: str


class Staging(_Message, frozen=True):
    """Sent ahead of Staged when blocks are on their way from a tier, so that it takes longer.

    Until it or Staged comes, an engine waits a few tens of milliseconds: a server that hangs must
    not delay anybody. After it, the engine waits for as long as it says.
    """

    boot_token: str
    request_id: str
    wait_s: float
    """Seconds that Staged may still take."""


class Staged(_Message, frozen=True):
    """Answer to Lookup, once: blocks that lie verified in the arena, under a lease."""

    boot_token: str
    request_id: str
    lease: int
    """0 if nothing is staged."""
    num_blocks: int
    """Length of the prefix that can be claimed, local blocks included."""
    offsets: list[int]
    """Arena offsets of the payloads of blocks `num_local_blocks .. num_blocks`, in order."""
    sources: list[str]
    """Tier that each came from, in the same order."""
    checksums: list[int]
    """xxh3_64 of each payload, in the same order. The worker checks its copies against them: a
    lease can end, with the connection that holds it, while a copy from the arena is running."""


class Freed(_Message, frozen=True):
    """Ring slots that may be written again, whether their blocks were kept or not."""

    boot_token: str
    slots: list[int]
    num_kept: int


FromEngine = Hello | Lookup | Release | Put | Forget | PrefillReport
FromServer = Welcome | Refused | Staging | Staged | Freed
