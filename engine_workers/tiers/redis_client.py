"""Connecting to Redis or Valkey, single or cluster, with bounds on connections and time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from redis.asyncio import BlockingConnectionPool, Redis, RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import OutOfMemoryError, RedisError

from cache_router.errors import ConfigurationError, TierError

_QUESTION_CONNECTIONS = 2
"""Kept free of blocks, so that a question never waits behind megabytes."""
_MAX_URL_BYTES = 4096

Client = Redis | RedisCluster


@dataclass(frozen=True, slots=True)
class RedisOptions:
    """How to reach Redis."""

    url: str = field(repr=False)
    cluster: bool = False
    ttl_s: int = 7 * 24 * 3600
    timeout_s: float = 2.0
    num_connections: int = 4
    """Blocks that are moved at the same time."""


def configured_url(url: str | None, url_file: Path | None) -> str:
    """Return the URL of Redis, from its file if there is one.

    Raises:
        ConfigurationError: Neither is given, or the file cannot be read.
    """
    if url_file is not None:
        try:
            with url_file.open(encoding="utf-8") as file:
                return file.read(_MAX_URL_BYTES).strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError("RADIXGATE_REDIS_URL_FILE", "cannot be read") from error
    if url is None:
        raise ConfigurationError("RADIXGATE_REDIS_URL", "needed for the tier `redis`")
    return url


def connect(options: RedisOptions) -> Client:
    """Return a client; nothing is sent before it is first used.

    Raises:
        ConfigurationError: The URL is none.
    """
    limits = {
        "socket_timeout": options.timeout_s,
        "socket_connect_timeout": options.timeout_s,
        # Once: a connection that the server closed while it was idle is found out by using it.
        "retry": Retry(NoBackoff(), 1),
    }
    num_connections = options.num_connections + _QUESTION_CONNECTIONS
    try:
        if options.cluster:
            return RedisCluster.from_url(options.url, max_connections=num_connections, **limits)
        pool = BlockingConnectionPool.from_url(
            options.url, max_connections=num_connections, timeout=options.timeout_s, **limits
        )
    except (ValueError, TypeError, RedisError) as error:
        # The library's text may quote the URL, and so the password: neither told nor chained.
        del error
        problem = "is no redis://, rediss:// or unix:// URL"
        raise ConfigurationError("RADIXGATE_REDIS_URL", problem) from None
    return Redis.from_pool(pool)


class RedisAccess:
    """Turns with a client: a bound on how many, on how long, and our errors for its own."""

    def __init__(self, tier: str, options: RedisOptions) -> None:
        self._tier = tier
        self._timeout_s = options.timeout_s
        self._client = connect(options)
        self._block_turns = asyncio.Semaphore(options.num_connections)
        self._question_turns = asyncio.Semaphore(_QUESTION_CONNECTIONS)
        self._is_closed = False

    def for_block(self) -> AbstractAsyncContextManager[Client]:
        """Wait for a turn to move a block; see `_turn`."""
        return self._turn(self._block_turns)

    def for_question(self) -> AbstractAsyncContextManager[Client]:
        """Wait for a turn to ask something small; see `_turn`."""
        return self._turn(self._question_turns)

    async def close(self) -> None:
        """Close all connections."""
        if not self._is_closed:
            self._is_closed = True
            await self._client.aclose()

    @asynccontextmanager
    async def _turn(self, turns: asyncio.Semaphore) -> AsyncIterator[Client]:
        """Give the client for as long as the time limit allows.

        Raises:
            TierError: Closed, not reachable, too slow, full, or not letting us in.
        """
        if self._is_closed:
            raise TierError(self._tier, "closed")
        try:
            async with turns, asyncio.timeout(self._timeout_s):
                yield self._client
        except OutOfMemoryError as error:
            raise TierError(self._tier, "full, and it evicts nothing") from error
        except TimeoutError as error:
            raise TierError(self._tier, f"no answer in {self._timeout_s:g} s") from error
        except (RedisError, OSError) as error:
            raise TierError(self._tier, f"{type(error).__name__}: {error}"[:200]) from error
