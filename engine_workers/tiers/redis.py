"""The Redis tier: blocks in Redis or Valkey, shared by all nodes, each with a time to live."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from functools import partial

from redis.exceptions import ResponseError

from cache_router.errors import BlockCorruptError, BlockLostError
from cache_router.types import Medium
from engine_workers.blocks.block_header import BlockHeader
from engine_workers.blocks.block_name import BlockName
from engine_workers.blocks.sealing import Seal, open_record
from engine_workers.tiers.known_blocks import KnownBlocks
from engine_workers.tiers.redis_client import Client, RedisAccess, RedisOptions
from engine_workers.tiers.redis_records import (
    MANIFEST_BYTES,
    MAX_FIRST_BYTES,
    PART_BYTES,
    Strings,
    cut,
    key_of,
    manifest_of,
)
from engine_workers.tiers.tier import TierUsage
from engine_workers.tiers.worker_threads import WorkerThreads

_KEYS_AT_ONCE = 512
_PART_TTL_MARGIN_S = 60
"""By which a block's further parts outlive its first one, so that none is missed."""
_NUM_THREADS = 2

logger = logging.getLogger(__name__)


class RedisTier:
    """A `Tier` in Redis or Valkey. Whether the server is there shows when it is first asked."""

    name = "redis"
    medium = Medium.STORAGE
    is_shared = True

    def __init__(self, options: RedisOptions, seal: Seal) -> None:
        self._ttl_s = options.ttl_s
        self._access = RedisAccess(self.name, options)
        self._seal = seal
        self._threads = WorkerThreads(self.name, _NUM_THREADS)
        self._known = KnownBlocks()
        self._is_policy_known = False

    async def contains(self, names: Sequence[BlockName]) -> list[bool]:
        """Say which blocks are there, in one round trip for some hundreds."""
        answers: list[bool] = []
        for begin in range(0, len(names) or 1, _KEYS_AT_ONCE):
            async with self._access.for_question() as client:
                pipeline = client.pipeline(transaction=False)
                for name in names[begin : begin + _KEYS_AT_ONCE]:
                    pipeline.exists(self._key(name))
                answers.extend(bool(answer) for answer in await pipeline.execute())
        return answers

    async def load_into(self, name: BlockName, payload: memoryview) -> BlockHeader:
        """Fetch and verify a block."""
        try:
            record = await self._fetch(name, len(payload))
            header = await self._threads.run(
                partial(open_record, self._seal, name, record, payload)
            )
        except BlockCorruptError:
            await self.remove([name])
            raise
        except BlockLostError:
            self._known.discard(name)
            raise
        self._known.add(header)
        return header

    async def store(self, header: BlockHeader, payload: memoryview) -> None:
        """Store a block, if no node has done so."""
        if not (await self.contains([header.name]))[0]:
            await self._look_at_policy()
            strings = await self._threads.run(partial(self._strings_of, header, payload))
            await self._send(self._key(header.name), strings)
        self._known.add(header)

    async def remove(self, names: Sequence[BlockName]) -> None:
        """Delete blocks, all their parts with them."""
        for begin in range(0, len(names) or 1, _KEYS_AT_ONCE):
            keys = [self._key(name) for name in names[begin : begin + _KEYS_AT_ONCE]]
            async with self._access.for_question() as client:
                part_keys = await _part_keys(client, keys)
                pipeline = client.pipeline(transaction=False)
                for key, further in zip(keys, part_keys, strict=True):
                    # Not `unlink`: a cluster's pipeline has that only for a client.
                    pipeline.execute_command("UNLINK", key, *further)
                await pipeline.execute()
        for name in names:
            self._known.discard(name)

    async def headers(self) -> AsyncIterator[BlockHeader]:
        """Tell of what this node stored or loaded and is still there."""
        async for header in self._known.headers(self.contains):
            yield header

    def usage(self) -> TierUsage:
        """Count what this node knows of; the server may have evicted some of it."""
        return self._known.usage()

    async def close(self) -> None:
        """Close the connections."""
        await self._threads.close()
        await self._access.close()

    def _key(self, name: BlockName) -> str:
        return key_of(self._seal, name)

    async def _fetch(self, name: BlockName, payload_bytes: int) -> memoryview:
        """Return a block's record; never more than one of this size can be long."""
        key = self._key(name)
        async with self._access.for_block() as client:
            first = await _string(client, key)
            part_keys = manifest_of(first).part_keys(key)
            record = memoryview(first)[MANIFEST_BYTES:]
            if not part_keys:
                return record
            if len(part_keys) > 1 + payload_bytes // PART_BYTES:
                raise BlockCorruptError("number of parts")
            try:
                parts = [await _string(client, part_key) for part_key in part_keys]
            except BlockLostError as error:
                raise BlockCorruptError("part missing") from error
        return memoryview(b"".join([record, *parts]))

    async def _send(self, key: str, strings: Strings) -> None:
        async with self._access.for_block() as client:
            part_keys = strings.manifest.part_keys(key)
            for part_key, part in zip(part_keys, strings.parts, strict=True):
                await client.set(part_key, part, ex=self._ttl_s + _PART_TTL_MARGIN_S)
            # Last: only with this string the block is there. Another node's is left as it is.
            is_ours = await client.set(key, strings.first, ex=self._ttl_s, nx=True)
            if not is_ours and part_keys:
                await client.unlink(*part_keys)

    def _strings_of(self, header: BlockHeader, payload: memoryview) -> Strings:
        return cut(*self._seal.close(header, payload))

    async def _look_at_policy(self) -> None:
        """Warn once of a server that will fill up and then refuse."""
        if self._is_policy_known:
            return
        async with self._access.for_question() as client:
            try:
                memory = await client.info("memory")
            except ResponseError:
                # We may not ask: a full server will show by refusing.
                memory = {}
        if self._is_policy_known:
            return
        self._is_policy_known = True
        if memory.get("maxmemory") and memory.get("maxmemory_policy") == "noeviction":
            logger.warning(
                "Redis has maxmemory-policy noeviction: when it is full it takes no more blocks "
                "until some expire; allkeys-lru or allkeys-lfu make room"
            )


async def _string(client: Client, key: str) -> bytes:
    """Return a string, or as much of it as one of ours can be long.

    Raises:
        BlockLostError: There is none.
        BlockCorruptError: It is empty, or there is something else under this name.
    """
    try:
        value = await client.getrange(key, 0, MAX_FIRST_BYTES - 1)
        if not value and not await client.exists(key):
            raise BlockLostError
    except ResponseError as error:
        if _is_of_wrong_type(error):
            raise BlockCorruptError("not a string") from error
        raise
    if not isinstance(value, bytes) or not value:
        raise BlockCorruptError("empty")
    return value


async def _part_keys(client: Client, keys: Sequence[str]) -> list[list[str]]:
    """Return the names of the further strings of each block, as far as its first one tells."""
    pipeline = client.pipeline(transaction=False)
    for key in keys:
        pipeline.getrange(key, 0, MANIFEST_BYTES - 1)
    part_keys: list[list[str]] = []
    for key, first in zip(keys, await pipeline.execute(raise_on_error=False), strict=True):
        if isinstance(first, Exception) and not _is_of_wrong_type(first):
            raise first
        part_keys.append(_parts_named_in(first, key))
    return part_keys


def _parts_named_in(first: object, key: str) -> list[str]:
    if not isinstance(first, bytes):
        return []
    try:
        return manifest_of(first).part_keys(key)
    except BlockCorruptError:
        return []


def _is_of_wrong_type(error: Exception) -> bool:
    return isinstance(error, ResponseError) and str(error).startswith("WRONGTYPE")
