"""Prometheus metrics of the request path. Labels come from configuration, never from requests."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from cache_router.types import RouteDecision
from gateway.sse import Usage

# vLLM's own buckets, so that one panel can overlay gateway and engine.
_TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_ITL_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_DURATION_BUCKETS = tuple(0.01 * 2**power for power in range(17))
_STAGE_BUCKETS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0),
    *(2.5, 5.0),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one request ended."""

    endpoint: str
    model: str
    status: int
    is_stream: bool
    duration_s: float


class Metrics:
    """Everything that is counted while a request passes; what is known anyway is collected."""

    def __init__(self, version: str) -> None:
        """Make a registry of our own: two gateways may live in one test process."""
        self.registry = registry = CollectorRegistry()
        self._requests = Counter(
            "radixgate_requests",
            "Requests answered.",
            ("endpoint", "model", "code", "stream"),
            registry=registry,
        )
        self._duration = Histogram(
            "radixgate_request_duration_seconds",
            "Seconds from request received to answer sent.",
            ("endpoint", "model"),
            buckets=_DURATION_BUCKETS,
            registry=registry,
        )
        self.ttft = Histogram(
            "radixgate_time_to_first_token_seconds",
            "Seconds from request received to the first data event of a stream.",
            ("endpoint", "model"),
            buckets=_TTFT_BUCKETS,
            registry=registry,
        )
        self.itl = Histogram(
            "radixgate_inter_token_latency_seconds",
            "Seconds between two data events of a stream.",
            ("endpoint", "model"),
            buckets=_ITL_BUCKETS,
            registry=registry,
        )
        self.tokenize = _stage(registry, "tokenize", "Seconds to get a request's token ids.")
        self.route = _stage(registry, "route", "Seconds to hash, look up and choose a worker.")
        self.overhead = _stage(
            registry, "overhead", "Seconds from request received to request sent to a worker."
        )
        self._prompt_tokens = _tokens(registry, "prompt", "Prompt tokens, as engines count them.")
        self._completion_tokens = _tokens(registry, "completion", "Generated tokens.")
        self._cached_tokens = _tokens(
            registry, "cached_prompt", "Prompt tokens that engines took from a cache."
        )
        self._predicted_hit_tokens = _tokens(
            registry, "predicted_hit", "Prompt tokens that the index expected to be cached."
        )
        self._actual_hit_tokens = _tokens(
            registry,
            "actual_hit",
            "Prompt tokens that were cached, for requests that had a prediction.",
        )
        self._route_decisions = Counter(
            "radixgate_route_decisions",
            "Workers chosen, by reason.",
            ("model", "reason"),
            registry=registry,
        )
        self._upstream_errors = Counter(
            "radixgate_upstream_errors",
            "Failures of workers.",
            ("worker", "reason"),
            registry=registry,
        )
        self._retries = Counter(
            "radixgate_retries", "Requests sent to another worker.", ("worker",), registry=registry
        )
        self._disconnects = Counter(
            "radixgate_client_disconnects",
            "Clients that left before their answer was whole.",
            ("phase",),
            registry=registry,
        )
        Gauge("radixgate_build_info", "Always 1.", ("version",), registry=registry).labels(
            version
        ).set(1)
        # Looking a child up by its labels costs more than counting; both sides are bounded.
        self._outcome_children = lru_cache(maxsize=4096)(self._make_outcome_children)

    def _make_outcome_children(
        self, endpoint: str, model: str, status: int, is_stream: bool
    ) -> tuple[Counter, Histogram]:
        return (
            self._requests.labels(endpoint, model, str(status), str(is_stream).lower()),
            self._duration.labels(endpoint, model),
        )

    def count_request(self, outcome: Outcome) -> None:
        """Count a request that is over."""
        requests, duration = self._outcome_children(
            outcome.endpoint, outcome.model, outcome.status, outcome.is_stream
        )
        requests.inc()
        duration.observe(outcome.duration_s)

    def count_decision(self, model: str, decision: RouteDecision) -> None:
        """Count a worker chosen."""
        self._route_decisions.labels(model, decision.reason.value).inc()

    def count_usage(self, model: str, decision: RouteDecision, usage: Usage) -> None:
        """Count an answer's tokens, and what was predicted of them against what came."""
        self._prompt_tokens.labels(model).inc(usage.prompt_tokens)
        self._completion_tokens.labels(model).inc(usage.completion_tokens or 0)
        if usage.cached_tokens is None:
            return
        self._cached_tokens.labels(model).inc(usage.cached_tokens)
        if decision.predicted_cached_tokens is not None:
            self._predicted_hit_tokens.labels(model).inc(decision.predicted_cached_tokens)
            self._actual_hit_tokens.labels(model).inc(usage.cached_tokens)

    def count_upstream_error(self, worker: str, reason: str) -> None:
        """Count a worker's failure; `reason` is one of a few words of ours."""
        self._upstream_errors.labels(worker, reason).inc()

    def count_retry(self, worker: str) -> None:
        """Count a request that `worker` failed and another one gets."""
        self._retries.labels(worker).inc()

    def count_disconnect(self, phase: str) -> None:
        """Count a client that left while its request was in `phase`."""
        self._disconnects.labels(phase).inc()


def _stage(registry: CollectorRegistry, stage: str, text: str) -> Histogram:
    return Histogram(
        f"radixgate_{stage}_seconds", text, ("model",), buckets=_STAGE_BUCKETS, registry=registry
    )


def _tokens(registry: CollectorRegistry, what: str, text: str) -> Counter:
    return Counter(f"radixgate_{what}_tokens", text, ("model",), registry=registry)
