"""Running a gateway: its parts, its listening socket, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence

import uvicorn

from cache_router.errors import ConfigurationError
from cache_router.settings import Settings
from gateway.app import build_app
from gateway.assembly import assemble
from gateway.client_connection import ClientConnection
from gateway.tokenizer_settings import check_tokenizer_settings
from gateway.worker_spec import WorkerSpec


class _Server(uvicorn.Server):
    """uvicorn, but for its signals: whoever runs the gateway decides when it ends."""

    def __init__(self, config: uvicorn.Config, listening: asyncio.Event) -> None:
        super().__init__(config)
        self._listening = listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and say so."""
        await super().startup(sockets)
        self._listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


async def run_gateway(
    settings: Settings,
    worker_urls: Sequence[str],
    *,
    ready: Callable[[], None] | None = None,
    stop: asyncio.Event | None = None,
) -> None:
    """Serve until `stop` is set, or until SIGINT or SIGTERM if no `stop` is given.

    Args:
        settings: Where to listen, and every limit.
        worker_urls: Values of `--worker`, see `WorkerSpec`.
        ready: Called once the socket listens; workers may not have been looked at yet.
        stop: Ends the gateway from outside.

    Raises:
        ConfigurationError: A worker's URL cannot be read, a tokenizer that was named cannot be
            used, or the port cannot be listened on.
    """
    specs = [WorkerSpec.parse(url) for url in worker_urls]
    if not specs:
        raise ConfigurationError("--worker", "give the URL of at least one vLLM server")
    check_tokenizer_settings(settings)
    listener = _listen(settings.host, settings.port)
    if stop is None:
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with assemble(settings, specs, clock=time.monotonic, rng=random.Random()) as services:
        listening = asyncio.Event()
        server = _Server(
            uvicorn.Config(
                build_app(services),
                http=ClientConnection,
                ws="none",
                lifespan="off",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                log_config=None,
                timeout_keep_alive=settings.keep_alive_s,
                timeout_graceful_shutdown=max(1, round(settings.shutdown_grace_s)),
                backlog=2048,
            ),
            listening,
        )
        serving = asyncio.create_task(server.serve([listener]), name="http-server")
        try:
            await listening.wait()
            if ready is not None:
                ready()
            stopping = asyncio.create_task(stop.wait(), name="stop")
            await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
        finally:
            server.should_exit = True
            await serving


def _listen(host: str, port: int) -> socket.socket:
    """Take the port before anything else is built: a taken one is the commonest mistake.

    Raises:
        ConfigurationError: It cannot be had.
    """
    try:
        return socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=2048
        )
    except OSError as error:
        raise ConfigurationError(
            "RADIXGATE_PORT",
            f"cannot listen on {host}:{port} ({error.strerror or error}); "
            "stop what listens there or choose another port",
        ) from error
