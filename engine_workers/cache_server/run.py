"""Running a cache server: its tiers, its socket, its metrics page, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Callable
from pathlib import Path

import zmq.asyncio

from cache_router.errors import ConfigurationError
from cache_router.settings import Settings
from engine_workers.blocks.namespace import Fingerprint
from engine_workers.cache_server.cache_metrics import CacheMetrics
from engine_workers.cache_server.cache_parts import build_parts
from engine_workers.cache_server.configured_tiers import opened_tiers
from engine_workers.cache_server.event_sources import Endpoints, EventSources
from engine_workers.cache_server.http_pages import served_pages, server_pages
from engine_workers.cache_server.server import CacheServer
from engine_workers.cache_server.server_socket import cache_socket, listening_socket
from engine_workers.hardware import available_memory_bytes
from engine_workers.workspace import Workspace

_logger = logging.getLogger(__name__)
_DRAIN_S = 5.0
"""What was saved gets these seconds to reach the tiers; the rest is computed again some day."""


async def run_cache_server(
    settings: Settings,
    workspace: Workspace,
    *,
    ready: Callable[[], None] | None = None,
    stop: asyncio.Event | None = None,
) -> None:
    """Serve until `stop` is set, or until SIGINT or SIGTERM if no `stop` is given.

    Args:
        settings: Sizes, deadlines, tiers.
        workspace: Where socket and SSD tier are if no setting says so.
        ready: Called once the socket listens.
        stop: Ends the server from outside.

    Raises:
        ConfigurationError: The arena, the socket, a tier or the port cannot be had.
    """
    stop = _until_signal() if stop is None else stop
    metrics = CacheMetrics()
    async with contextlib.AsyncExitStack() as stack:
        # First: only one server at a time may open the tiers.
        path = cache_socket(settings, workspace)
        listener = stack.enter_context(listening_socket(path))
        context = zmq.asyncio.Context()
        stack.callback(context.destroy, linger=0)
        events = EventSources(context, _event_endpoints(settings, path))
        tiers = await stack.enter_async_context(opened_tiers(settings, workspace, metrics, events))
        try:
            parts = build_parts(settings, tiers, metrics, events, time.monotonic)
        except OSError as error:
            raise ConfigurationError(
                "RADIXGATE_ARENA_BYTES",
                f"{settings.arena_bytes} bytes cannot be mapped: {error.strerror}",
            ) from error
        stack.callback(parts.arena.close)
        stack.callback(parts.engines.close)
        _warn_of_too_little_memory(parts.arena.num_bytes)
        if settings.cache_server_metrics_port is not None:
            await stack.enter_async_context(
                served_pages(
                    server_pages(metrics.registry, events, parts.planner),
                    settings.host,
                    settings.cache_server_metrics_port,
                )
            )
        server = CacheServer(parts, settings.write_ring_bytes, time.monotonic)
        serving = asyncio.create_task(server.serve(listener), name="cache-server")
        stopping = asyncio.create_task(stop.wait(), name="stop")
        try:
            if ready is not None:
                ready()
            await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not serving.done():
                await asyncio.wait({asyncio.create_task(parts.writer.drain())}, timeout=_DRAIN_S)
        finally:
            stopping.cancel()
            serving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await serving


def _warn_of_too_little_memory(arena_bytes: int) -> None:
    """Say so if the arena cannot fill up: the system would end somebody for want of memory."""
    available_bytes = available_memory_bytes()
    if arena_bytes > available_bytes:
        _logger.warning(
            "RADIXGATE_ARENA_BYTES is %d, and %d bytes of memory are available",
            arena_bytes,
            available_bytes,
        )


def _event_endpoints(settings: Settings, socket_path: Path) -> Endpoints:
    """Say where a namespace's events are: beside the socket, or for gateways on other machines."""
    if settings.cache_events_tcp:
        return lambda _: ("tcp://*:0", "tcp://*:0")

    def beside_the_socket(namespace: Fingerprint) -> tuple[str, str]:
        stem = f"ipc://{socket_path.absolute()}.{namespace.hex()[:8]}"
        return f"{stem}.e", f"{stem}.r"

    return beside_the_socket


def _until_signal() -> asyncio.Event:
    """Return an event that SIGINT and SIGTERM set."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop
