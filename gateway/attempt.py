"""One request on one worker: sent, its answer passed on, and what came of it noted."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from cache_router.errors import UpstreamError
from cache_router.reservation import Reservation
from cache_router.types import RouteDecision
from gateway.asgi import header_of
from gateway.error_responses import error_response
from gateway.generation_request import GenerationRequest
from gateway.http_connection import Header
from gateway.post_endpoint import Exchange
from gateway.relay import StreamLimits, is_event_stream, relay_stream, relay_whole
from gateway.services import Services
from gateway.sse import Usage
from gateway.tokenizing.service import Tokenized
from gateway.upstream_client import UpstreamRequest
from gateway.upstream_response import UpstreamResponse

logger = logging.getLogger(__name__)

# Trace context travels on; everything else a client sends is between it and the gateway.
_FORWARDED = (b"accept", b"traceparent", b"tracestate", b"baggage")


@dataclass(frozen=True, slots=True)
class Sending:
    """What is sent, the same for every attempt."""

    request: GenerationRequest
    tokenized: Tokenized
    body: bytes


class Attempt:
    """A request on its way to one worker and back."""

    def __init__(
        self,
        services: Services,
        exchange: Exchange,
        sending: Sending,
        decision: RouteDecision,
        reservation: Reservation,
    ) -> None:
        self._services = services
        self._metrics = services.metrics
        self._exchange = exchange
        self._sending = sending
        self._request = sending.request
        self._decision = decision
        self._reservation = reservation

    async def run(self, *, fresh: bool) -> None:
        """Send the request, on a `fresh` connection if need be, and pass the answer on.

        Raises:
            UpstreamError: The worker failed before anything was sent to the client.
        """
        services = self._services
        self._exchange.phase = "waiting"
        self._metrics.overhead.labels(self._request.model).observe(self._exchange.age_s)
        target = services.discovery.target(self._decision.worker_id)
        upstream_request = UpstreamRequest(
            self._decision.worker_id,
            target.origin,
            b"POST",
            self._request.endpoint.value,
            self._headers(target.dp_rank),
            self._sending.body,
        )
        try:
            response = await services.client.send(upstream_request, fresh=fresh)
            try:
                usage = await self._relay(response)
            finally:
                response.close()
        except UpstreamError as error:
            self._failed(error)
            raise
        if response.status >= 400:
            # Refused requests leave no blocks behind.
            self._reservation.failed()
        elif usage is not None:
            self._metrics.count_usage(self._request.model, self._decision, usage)
            services.tokenizer.check(self._request, self._sending.tokenized, usage.prompt_tokens)

    async def _relay(self, response: UpstreamResponse) -> Usage | None:
        responder, settings = self._exchange.responder, self._services.settings
        if response.status != 200 or not is_event_stream(response):
            usage = await relay_whole(
                response, responder, self._route_headers(), self._decision.worker_id
            )
            self._reservation.prefill_done()
            return usage
        self._exchange.phase = "streaming"
        return await relay_stream(
            response,
            responder,
            self._route_headers(),
            self._decision.worker_id,
            hide_usage=self._request.hides_usage,
            limits=StreamLimits(settings.sse_keep_alive_s, settings.chunk_timeout_s),
            listener=self,
        )

    # --- what the relay tells ---

    def first_data(self) -> None:
        """Take the first data event for the end of the prefill."""
        self._reservation.prefill_done()
        self._metrics.ttft.labels(self._request.endpoint, self._request.model).observe(
            self._exchange.age_s
        )

    def next_data(self, interval_s: float) -> None:
        """Observe the time between two data events."""
        self._metrics.itl.labels(self._request.endpoint, self._request.model).observe(interval_s)

    def broken(self, error: UpstreamError) -> None:
        """Log and count a stream that could not be finished."""
        logger.warning("request %s: %s", self._exchange.responder.request_id, error)
        self._failed(error)

    def _failed(self, error: UpstreamError) -> None:
        self._reservation.failed()
        self._metrics.count_upstream_error(self._decision.worker_id, error_response(error).code)

    def _headers(self, dp_rank: int | None) -> list[Header]:
        headers: list[Header] = [
            (b"content-type", b"application/json"),
            (b"x-request-id", self._exchange.responder.request_id.encode()),
        ]
        for name in _FORWARDED:
            value = header_of(self._exchange.scope, name)
            if value is not None:
                headers.append((name, value))
        if dp_rank is not None:
            headers.append((b"x-data-parallel-rank", b"%d" % dp_rank))
        return headers

    def _route_headers(self) -> list[Header]:
        if not self._services.settings.route_headers:
            return []
        headers: list[Header] = [
            (b"x-radixgate-worker", self._decision.worker_id.encode()),
            (b"x-radixgate-route", self._decision.reason.value.encode()),
        ]
        predicted = self._decision.predicted_cached_tokens
        if predicted is not None:
            headers.append((b"x-radixgate-predicted-cached-tokens", b"%d" % predicted))
        return headers
