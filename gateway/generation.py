"""The hot routes: a request's one way from bytes to a worker and back.

They are raw ASGI endpoints: request and response objects would cost more than everything else
that happens here.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from cache_router.errors import (
    RadixgateError,
    UpstreamError,
    UpstreamStaleError,
    UpstreamUnreachableError,
)
from cache_router.reservation import Reservation
from cache_router.types import RouteDecision, RouteQuery, WorkerId
from gateway.asgi import (
    ClientGoneError,
    Receive,
    Responder,
    Scope,
    Send,
    client_present,
    header_of,
    read_body,
)
from gateway.error_responses import INTERNAL_ERROR, error_response, route_error
from gateway.generation_request import Endpoint, GenerationRequest
from gateway.http_connection import Header
from gateway.metrics import Outcome
from gateway.relay import is_event_stream, relay_stream, relay_whole
from gateway.services import Services
from gateway.sse import Usage
from gateway.tokenizing.service import Tokenized

logger = logging.getLogger(__name__)

# Trace context travels on; everything else a client sends is between it and the gateway.
_FORWARDED = (b"accept", b"traceparent", b"tracestate", b"baggage")
_MAX_ATTEMPTS = 2


@dataclass(slots=True)
class _Progress:
    """How far a request is: for its log line and its metrics, however it ends."""

    phase: str = "reading"
    model: str = "other"
    is_stream: bool = False


class GenerationEndpoint:
    """`POST /v1/chat/completions` or `POST /v1/completions`."""

    def __init__(self, services: Services, endpoint: Endpoint) -> None:
        self._services = services
        self._endpoint = endpoint
        # Held for their attributes' sake: every name below is looked up for each request.
        self._metrics = services.metrics
        self._settings = services.settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; whatever happens becomes an answer, or the client is gone."""
        responder = Responder(scope, send)
        if scope["method"] != "POST":
            error = route_error(405, scope["method"], scope["path"])
            await responder.send_error(error, ((b"allow", b"POST"),))
            return
        progress = _Progress()
        try:
            with self._services.intake.slot():
                raw = await read_body(scope, receive, self._settings.max_body_bytes)
                async with client_present(receive):
                    await self._answer(scope, responder, raw, progress)
        except ClientGoneError:
            responder.status = 499
            self._metrics.count_disconnect(progress.phase)
        except RadixgateError as error:
            await self._fail(responder, error)
        except Exception:
            logger.exception("request %s failed in the gateway itself", responder.request_id)
            if responder.started:
                # Cut off: a clean end would pass for a whole answer.
                raise
            await responder.send_error(INTERNAL_ERROR)
        finally:
            self._metrics.count_request(
                Outcome(
                    self._endpoint,
                    progress.model,
                    responder.status,
                    progress.is_stream,
                    time.perf_counter() - responder.received_s,
                )
            )

    async def _fail(self, responder: Responder, error: RadixgateError) -> None:
        if isinstance(error, UpstreamError):
            logger.warning("request %s: %s", responder.request_id, error)
        if responder.started:
            raise error
        await responder.send_error(error_response(error))

    async def _answer(
        self, scope: Scope, responder: Responder, raw: bytes, progress: _Progress
    ) -> None:
        """Parse, tokenize, route and relay; what fails before the first byte can be re-routed."""
        services = self._services
        request = GenerationRequest.parse(self._endpoint, raw)
        root = services.prompt_root(request.model, request.cache_salt)
        progress.model = request.model
        progress.is_stream = request.is_stream

        progress.phase = "tokenizing"
        began_s = time.perf_counter()
        tokenized = await services.tokenizer.tokenize(request)
        self._metrics.tokenize.labels(request.model).observe(time.perf_counter() - began_s)

        body = request.upstream_body()
        excluded: frozenset[WorkerId] = frozenset()
        for attempt in range(_MAX_ATTEMPTS):
            query = RouteQuery(
                root,
                tokenized.prompts,
                request.max_output_tokens,
                request.session_key,
                excluded,
            )
            began_s = time.perf_counter()
            decision = services.router.route(query)
            self._metrics.route.labels(request.model).observe(time.perf_counter() - began_s)
            self._metrics.count_decision(request.model, decision)
            with services.router.reserve(query, decision) as reservation:
                attempted = _Attempt(
                    services, scope, responder, request, tokenized, decision, reservation, progress
                )
                try:
                    await attempted.run(body, fresh=attempt > 0)
                except UpstreamUnreachableError as error:
                    # Nothing is known against a worker whose idle connection had gone stale.
                    if not isinstance(error, UpstreamStaleError):
                        services.discovery.suspect(decision.worker_id)
                        excluded |= {decision.worker_id}
                    others = len(services.registry.workers_for(request.model)) - len(excluded)
                    if responder.started or attempt + 1 == _MAX_ATTEMPTS or not others:
                        raise
                    logger.warning("request %s re-routed: %s", responder.request_id, error)
                    self._metrics.count_retry(decision.worker_id)
                else:
                    return


class _Attempt:
    """One request on one worker."""

    def __init__(
        self,
        services: Services,
        scope: Scope,
        responder: Responder,
        request: GenerationRequest,
        tokenized: Tokenized,
        decision: RouteDecision,
        reservation: Reservation,
        progress: _Progress,
    ) -> None:
        self._services = services
        self._scope = scope
        self._responder = responder
        self._request = request
        self._tokenized = tokenized
        self._decision = decision
        self._reservation = reservation
        self._progress = progress

    async def run(self, body: bytes, *, fresh: bool) -> None:
        """Send the request, on a `fresh` connection if need be, and pass the answer on.

        Raises:
            UpstreamError: The worker failed before anything was sent to the client.
        """
        services, responder, worker_id = self._services, self._responder, self._decision.worker_id
        self._progress.phase = "waiting"
        target = services.discovery.target(worker_id)
        overhead_s = time.perf_counter() - responder.received_s
        services.metrics.overhead.labels(self._request.model).observe(overhead_s)
        try:
            response = await services.client.send(
                worker_id,
                target.origin,
                b"POST",
                self._request.endpoint.value,
                self._headers(target.dp_rank),
                body,
                fresh=fresh,
            )
            try:
                if is_event_stream(response) and response.status == 200:
                    self._progress.phase = "streaming"
                    usage = await relay_stream(
                        response,
                        responder,
                        self._route_headers(),
                        worker_id,
                        hide_usage=self._request.hides_usage,
                        keep_alive_s=services.settings.sse_keep_alive_s,
                        silence_limit_s=services.settings.chunk_timeout_s,
                        times=self,
                        on_failure=self._on_failure,
                    )
                else:
                    usage = await relay_whole(response, responder, self._route_headers(), worker_id)
                    self._reservation.prefill_done()
            finally:
                response.close()
        except UpstreamError as error:
            self._on_failure(error)
            raise
        if response.status >= 400:
            # Refused requests leave no blocks behind.
            self._reservation.failed()
        elif usage is not None:
            self._observe(usage)

    def first(self) -> None:
        """Take the first data event for the end of the prefill."""
        self._reservation.prefill_done()
        since_s = time.perf_counter() - self._responder.received_s
        metrics = self._services.metrics
        metrics.time_to_first_token.labels(self._request.endpoint, self._request.model).observe(
            since_s
        )

    def next(self, interval_s: float) -> None:
        """Observe the time between two data events."""
        metrics = self._services.metrics
        metrics.inter_token_latency.labels(self._request.endpoint, self._request.model).observe(
            interval_s
        )

    def _on_failure(self, error: UpstreamError) -> None:
        self._reservation.failed()
        reason = error_response(error).code
        self._services.metrics.count_upstream_error(self._decision.worker_id, reason)
        if self._responder.started:
            logger.warning("request %s: %s", self._responder.request_id, error)

    def _observe(self, usage: Usage) -> None:
        model = self._request.model
        self._services.metrics.count_usage(model, self._decision, usage)
        self._services.tokenizer.check(self._request, self._tokenized, usage.prompt_tokens)

    def _headers(self, dp_rank: int | None) -> list[Header]:
        headers: list[Header] = [
            (b"content-type", b"application/json"),
            (b"x-request-id", self._responder.request_id.encode()),
        ]
        for name in _FORWARDED:
            value = header_of(self._scope, name)
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
