"""What the cache server counts. Labels are tiers and a few words of ours, so they are bounded."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from engine_workers.tiers.circuit import Circuit, CircuitState

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class CacheMetrics:
    """The counters of one server, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.lookup_blocks = Counter(
            "radixgate_cache_lookup_blocks",
            "Blocks asked for, by the tier that had them (none: nobody did, in time).",
            ("tier",),
            registry=self.registry,
        )
        self.lookup_seconds = Histogram(
            "radixgate_cache_lookup_seconds",
            "From a lookup to its answer, staging included.",
            ("result",),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.operations = Counter(
            "radixgate_cache_operations",
            "Blocks moved, by tier, operation (load, save, remove) and result.",
            ("tier", "operation", "result"),
            registry=self.registry,
        )
        self.moved_bytes = Counter(
            "radixgate_cache_bytes",
            "Payload bytes moved, by tier and operation.",
            ("tier", "operation"),
            registry=self.registry,
        )
        self.operation_seconds = Histogram(
            "radixgate_cache_operation_seconds",
            "Time of one block's operation, or of asking a tier what it holds (contains).",
            ("tier", "operation"),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.evictions = Counter(
            "radixgate_cache_evictions",
            "Blocks that gave way to others.",
            ("tier",),
            registry=self.registry,
        )
        self.closed_connections = Counter(
            "radixgate_cache_closed_connections",
            "Connections that the server closed, by reason.",
            ("reason",),
            registry=self.registry,
        )
        self.prefill_tokens = Counter(
            "radixgate_cache_prefill_tokens",
            "Prompt tokens that engines reported, by where their KV came from.",
            ("source",),
            registry=self.registry,
        )

        self._circuits = Gauge(
            "radixgate_cache_tier_usable",
            "1 while a tier is used, 0 while it is left alone because it fails or hangs.",
            ("tier", "operation"),
            registry=self.registry,
        )
        self.load_decisions = Counter(
            "radixgate_cache_load_decisions",
            "Lookups that tiers could serve, by how much of that was worth loading.",
            ("result",),
            registry=self.registry,
        )
        self.predicted_load_seconds = Counter(
            "radixgate_cache_predicted_load_seconds",
            "What loads from a tier were expected to take.",
            ("tier",),
            registry=self.registry,
        )
        self.actual_load_seconds = Counter(
            "radixgate_cache_actual_load_seconds",
            "What the same loads took.",
            ("tier",),
            registry=self.registry,
        )

    def watch_circuit(self, tier: str, operation: str, circuit: Circuit) -> None:
        """Show whether a tier is used, or left alone because it fails."""
        self._circuits.labels(tier, operation).set_function(
            lambda: circuit.state() is CircuitState.CLOSED
        )

    def watch(self, name: str, help_text: str, read: Callable[[], float]) -> None:
        """Add a gauge that is read when it is asked for."""
        Gauge(name, help_text, registry=self.registry).set_function(read)

    def count_moved(self, tier: str, operation: str, num_bytes: int, seconds: float) -> None:
        """Count a block that was moved."""
        self.operations.labels(tier, operation, "ok").inc()
        self.moved_bytes.labels(tier, operation).inc(num_bytes)
        self.operation_seconds.labels(tier, operation).observe(seconds)
