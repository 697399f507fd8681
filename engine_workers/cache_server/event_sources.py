"""The cache server's event streams, one for each model that an engine here serves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq.asyncio

from cache_router.cost import Rates
from cache_router.errors import TierError
from cache_router.types import TierId
from engine_workers.blocks.block_header import BlockHeader
from engine_workers.blocks.block_name import BlockName
from engine_workers.blocks.namespace import Fingerprint, Namespace
from engine_workers.cache_server.kv_event_publisher import KvEventPublisher, Located
from engine_workers.tiers.tier import Tier

Endpoints = Callable[[Fingerprint], tuple[str, str]]
"""Where to publish a namespace's events, and where to answer replays."""
_MAX_SOURCES = 64


@dataclass(slots=True)
class _Source:
    models: list[str]
    block_bytes: int
    publisher: KvEventPublisher
    located: dict[tuple[TierId, bytes], BlockHeader] = field(default_factory=dict)


class EventSources:
    """Tells gateways what lies where. Blocks of models that nobody serves are not told of.

    Args:
        context: Makes the sockets.
        endpoints: Where they listen.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        endpoints: Endpoints,
    ) -> None:
        self._context = context
        self._endpoints = endpoints
        self._sources: dict[Fingerprint, _Source] = {}

    def join(
        self,
        namespace: Namespace,
        models: Sequence[str],
        block_bytes: int,
        tiers: Sequence[Tier],
        tasks: asyncio.TaskGroup,
    ) -> None:
        """Begin to publish for an engine that has connected.

        Args:
            namespace: Its way of computing blocks.
            models: Names that it serves its base model under.
            block_bytes: Bytes of one block's payload.
            tiers: Those that may hold blocks of an earlier life of this server.
            tasks: Runs the publisher, which ends with it.
        """
        # All ranks of an engine keep the same blocks: the first one's are told of.
        if namespace.tp_rank or not models:
            return
        fingerprint = namespace.fingerprint
        known = self._sources.get(fingerprint)
        if known is not None:
            known.models = list(models)
            return
        if len(self._sources) >= _MAX_SOURCES:
            return
        located: dict[tuple[TierId, bytes], BlockHeader] = {}

        def snapshot() -> Iterator[Located]:
            return iter([Located(header, tier) for (tier, _), header in located.items()])

        endpoint, replay_endpoint = self._endpoints(fingerprint)
        publisher = KvEventPublisher(self._context, endpoint, replay_endpoint, snapshot, time.time)
        self._sources[fingerprint] = _Source(list(models), block_bytes, publisher, located)
        tasks.create_task(publisher.run(), name="kv-events")
        for tier in tiers:
            tasks.create_task(self._recall(fingerprint, tier), name=f"recall:{tier.name}")

    def stored(self, header: BlockHeader, tier: TierId) -> None:
        """Tell of a block that is there now."""
        source = self._sources.get(header.name.namespace)
        if source is None:
            return
        place = (tier, header.name.block_hash)
        if place not in source.located:
            source.located[place] = header
            source.publisher.stored(Located(header, tier))

    def removed(self, name: BlockName, tier: TierId) -> None:
        """Tell of a block that is there no more."""
        source = self._sources.get(name.namespace)
        if source is not None and source.located.pop((tier, name.block_hash), None) is not None:
            source.publisher.removed(name.block_hash, tier)

    def describe(self, rates: Callable[[Fingerprint], Rates]) -> bytes:
        """Say where the streams are, as JSON for gateways."""
        sources: list[dict[str, Any]] = [
            {
                "models": source.models,
                "block_bytes": source.block_bytes,
                "endpoint": source.publisher.endpoint,
                "replay_endpoint": source.publisher.replay_endpoint,
                "rates": rates(fingerprint),
            }
            for fingerprint, source in self._sources.items()
        ]
        return msgspec.json.encode({"sources": sources})

    async def _recall(self, fingerprint: Fingerprint, tier: Tier) -> None:
        """Tell of what a tier kept since an earlier life."""
        try:
            async for header in tier.headers():
                if header.name.namespace == fingerprint:
                    self.stored(header, TierId(tier.name))
        except TierError:
            # Its breaker and its metrics tell; what is looked up there later is told of then.
            return
