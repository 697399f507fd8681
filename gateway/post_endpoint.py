"""What every hot route does around its own work, as a raw ASGI app.

Request and response objects would cost more than everything else that happens there.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass

from cache_router.errors import RadixgateError, UpstreamError
from gateway.asgi import (
    ClientGoneError,
    Receive,
    Responder,
    Scope,
    Send,
    client_present,
    read_body,
)
from gateway.error_responses import INTERNAL_ERROR, error_response, route_error
from gateway.metrics import Outcome
from gateway.services import Services

logger = logging.getLogger(__name__)

_CLIENT_GONE = 499


@dataclass(slots=True)
class Exchange:
    """One request and its answer, and how far it is: for metrics, however it ends."""

    scope: Scope
    responder: Responder
    phase: str = "reading"
    model: str = "other"
    """A configured name, or `other`: never what a request says unchecked."""
    is_stream: bool = False

    @property
    def age_s(self) -> float:
        """Seconds since the request arrived."""
        return time.perf_counter() - self.responder.received_s


class PostEndpoint(ABC):
    """A `POST` route: bounded, given up when its client leaves, errors in OpenAI's shape."""

    def __init__(self, services: Services, path: str) -> None:
        self.path = path
        self.services = services

    @abstractmethod
    async def answer(self, exchange: Exchange, raw: bytes) -> None:
        """Answer one request with this body.

        Raises:
            RadixgateError: Nothing was sent yet, and this is why.
        """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; whatever happens becomes an answer, or the client is gone."""
        exchange = Exchange(scope, Responder(scope, send))
        responder = exchange.responder
        try:
            if scope["method"] != "POST":
                error = route_error(405, scope["method"], self.path)
                await responder.send_error(error, ((b"allow", b"POST"),))
                return
            with self.services.intake.slot():
                settings = self.services.settings
                raw = await read_body(
                    scope, receive, settings.max_body_bytes, settings.body_silence_s
                )
                async with client_present(receive):
                    await self.answer(exchange, raw)
        except ClientGoneError:
            responder.status = _CLIENT_GONE
            self.services.metrics.count_disconnect(exchange.phase)
        except RadixgateError as error:
            await self._fail(responder, error)
        except Exception:
            logger.exception("request %s failed in the gateway itself", responder.request_id)
            if responder.started:
                # Cut off: a clean end would pass for a whole answer.
                raise
            await responder.send_error(INTERNAL_ERROR)
        finally:
            self.services.metrics.count_request(
                Outcome(
                    self.path, exchange.model, responder.status, exchange.is_stream, exchange.age_s
                )
            )

    async def _fail(self, responder: Responder, error: RadixgateError) -> None:
        if isinstance(error, UpstreamError):
            logger.warning("request %s: %s", responder.request_id, error)
        if responder.started:
            raise error
        await responder.send_error(error_response(error))
