"""Ask a server on this machine whether it is well: one small HTTP GET, no HTTP library."""

from __future__ import annotations

import asyncio

_MAX_STATUS_LINE_BYTES = 1024


async def is_healthy(
    host: str, port: int, *, path: str = "/health", timeout_s: float = 2.0
) -> bool:
    """Whether a GET of `path` answers 200 in time; whatever else happens is a no."""
    try:
        async with asyncio.timeout(timeout_s):
            return await _get_status(host, port, path) == 200
    except (OSError, TimeoutError, ValueError):
        return False


async def _get_status(host: str, port: int, path: str) -> int:
    reader, writer = await asyncio.open_connection(host, port, limit=_MAX_STATUS_LINE_BYTES)
    try:
        request = f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n"
        writer.write(request.encode("ascii"))
        status_line = await reader.readline()
    finally:
        # abort, not close: nothing is left to flush, and a peer that hangs must not be waited for.
        writer.transport.abort()
    version, _, rest = status_line.partition(b" ")
    if not version.startswith(b"HTTP/1."):
        raise ValueError("not an HTTP response")
    return int(rest[:3])
