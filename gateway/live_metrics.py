"""Metrics that are read off the gateway's state when they are scraped, not counted on the way."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cache_router.types import Trust
from gateway.services import Services


class LiveMetrics(Collector):
    """Workers, index, event streams and tokenizers, one sample each at the moment of a scrape.

    A worker that is gone has no samples, so no series has to be deleted.
    """

    def __init__(self, services: Services) -> None:
        self._services = services

    def collect(self) -> Iterable[Metric]:
        """Yield every family."""
        yield from self._workers()
        yield from self._events()
        yield from self._tokenizers()

    def _workers(self) -> Iterable[Metric]:
        services = self._services
        ready = GaugeMetricFamily(
            "radixgate_worker_ready", "1 if the worker may get requests.", labels=("worker",)
        )
        inflight = GaugeMetricFamily(
            "radixgate_inflight_requests", "Requests in flight.", labels=("worker",)
        )
        waiting = GaugeMetricFamily(
            "radixgate_waiting_prompt_tokens",
            "Uncached prompt tokens whose prefill is awaited.",
            labels=("worker",),
        )
        blocks = GaugeMetricFamily(
            "radixgate_kv_index_blocks", "Blocks in the index.", labels=("worker",)
        )
        trust = GaugeMetricFamily(
            "radixgate_worker_trust",
            "1 for the state in which the index of the worker is.",
            labels=("worker", "trust"),
        )
        for worker in services.registry.workers():
            label = [worker.worker_id]
            load = services.registry.load(worker.worker_id)
            ready.add_metric(label, float(worker.ready))
            inflight.add_metric(label, load.num_running)
            waiting.add_metric(label, load.waiting_tokens)
            blocks.add_metric(label, services.index.num_blocks(worker.worker_id))
            for state in Trust:
                trust.add_metric([worker.worker_id, state], float(worker.trust is state))
        yield from (ready, inflight, waiting, blocks, trust)

    def _events(self) -> Iterable[Metric]:
        events = CounterMetricFamily(
            "radixgate_kv_events", "KV events, by type.", labels=("worker", "type")
        )
        gaps = CounterMetricFamily(
            "radixgate_kv_event_gaps", "Gaps in a worker's event stream.", labels=("worker",)
        )
        resets = CounterMetricFamily(
            "radixgate_kv_index_resets",
            "Times a worker's entries were dropped.",
            labels=("worker",),
        )
        failures = CounterMetricFamily(
            "radixgate_kv_event_decode_failures",
            "Messages and batches that could not be read.",
            labels=("worker",),
        )
        lost = CounterMetricFamily(
            "radixgate_kv_event_lost_batches",
            "Batches that neither the stream nor a replay brought.",
            labels=("worker",),
        )
        replays = CounterMetricFamily(
            "radixgate_kv_event_replays",
            "Replays asked of a worker, by result.",
            labels=("worker", "result"),
        )
        for worker_id, stats in self._services.discovery.event_stats().items():
            for name, count in (
                ("stored", stats.stored_events),
                ("removed", stats.removed_events),
                ("cleared", stats.cleared_events),
                ("orphan", stats.orphan_events),
                ("refused", stats.refused_events),
                ("undescribed", stats.undescribed_events),
                ("unknown", stats.unknown_events),
            ):
                events.add_metric([worker_id, name], count)
            gaps.add_metric([worker_id], stats.gaps)
            resets.add_metric([worker_id], stats.resets)
            failures.add_metric([worker_id], stats.decode_failures)
            lost.add_metric([worker_id], stats.lost_batches)
            replays.add_metric([worker_id, "failed"], stats.replay_failures)
            replays.add_metric([worker_id, "answered"], stats.replays - stats.replay_failures)
        yield from (events, gaps, resets, failures, lost, replays)

    def _tokenizers(self) -> Iterable[Metric]:
        tokenizer = self._services.tokenizer
        mismatches = CounterMetricFamily(
            "radixgate_tokenization_mismatch",
            "Requests whose token ids differed from the engine's.",
            labels=("model",),
        )
        source = GaugeMetricFamily(
            "radixgate_tokenizer_source",
            "1 for what a model's prompts are tokenized by.",
            labels=("model", "source"),
        )
        for model, state in tokenizer.states().items():
            mismatches.add_metric([model], state.num_mismatches)
            for name in ("gateway", "engine", "none"):
                source.add_metric([model, name], float(state.source == name))
        stats = tokenizer.stats()
        checks = CounterMetricFamily(
            "radixgate_tokenization_checks",
            "Requests whose token ids were to be compared with the engine's, by result.",
            labels=("result",),
        )
        checks.add_metric(["compared"], stats.checks_total)
        checks.add_metric(["unanswered"], stats.unchecked_total)
        cached = CounterMetricFamily(
            "radixgate_tokenizer_tokens",
            "Prompt tokens that the gateway's tokenizers gave, by where from.",
            labels=("source",),
        )
        cached.add_metric(["cache"], stats.cache.tokens_reused)
        cached.add_metric(["encoded"], stats.cache.tokens_encoded)
        yield from (mismatches, source, checks, cached)
