"""Running a gateway: its parts, its listening socket, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import random
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence

import uvicorn
from fastapi import FastAPI

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
    stop = _until_signal() if stop is None else stop
    with contextlib.closing(_listen(settings.host, settings.port)) as listener:
        async with assemble(settings, specs, clock=time.monotonic, rng=random.Random()) as services:
            await _serve(build_app(services), settings, listener, ready, stop)


def _until_signal() -> asyncio.Event:
    """Return an event that SIGINT and SIGTERM set."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


async def _serve(
    app: FastAPI,
    settings: Settings,
    listener: socket.socket,
    ready: Callable[[], None] | None,
    stop: asyncio.Event,
) -> None:
    """Serve `app` until `stop` is set, then let running requests end."""
    listening = asyncio.Event()
    server = _Server(
        uvicorn.Config(
            app,
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
        await _first_of(serving, listening)
        if ready is not None and listening.is_set():
            ready()
        await _first_of(serving, stop)
    finally:
        server.should_exit = True
        await serving


async def _first_of(serving: asyncio.Task[None], event: asyncio.Event) -> None:
    """Wait for `event`, or for the server to end by itself."""
    waiting = asyncio.create_task(event.wait())
    await asyncio.wait({serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()


def _listen(host: str, port: int) -> socket.socket:
    """Take the port before anything else is built: a taken one is the commonest mistake.

    Raises:
        ConfigurationError: It cannot be had.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigurationError(
            "RADIXGATE_HOST", f"{host!r} is no address to listen on: {error}"
        ) from error
    try:
        return socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigurationError(
                "RADIXGATE_HOST", f"{host!r} is no address of this machine"
            ) from error
        raise ConfigurationError(
            "RADIXGATE_PORT",
            f"cannot listen on {host}:{port} ({error.strerror or error}); "
            "stop what listens there or choose another port",
        ) from error
