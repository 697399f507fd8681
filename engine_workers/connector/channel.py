"""The seam between the connector's decisions and its connection: send, and ask what came."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from engine_workers.blocks.namespace import Fingerprint
from engine_workers.cache_wire import FromEngine, FromServer
from engine_workers.connector.session import Session


@dataclass(frozen=True, slots=True)
class Connected:
    """The server is there; nothing of an earlier session counts any more."""

    session: Session
    fingerprint: Fingerprint
    """Of the namespace that this side said hello with."""


@dataclass(frozen=True, slots=True)
class Lost:
    """The connection ended: its leases are void, its ring is gone, no answer will come."""


ChannelEvent = Connected | Lost | FromServer


class Channel(Protocol):
    """A connection to the cache server that comes and goes. Nothing here blocks or raises."""

    def send(self, message: FromEngine) -> bool:
        """Queue a message. False if nobody is connected or too much is queued: it is dropped."""

    def poll(self) -> list[ChannelEvent]:
        """Return what happened since the last call, in order."""
