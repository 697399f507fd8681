"""What `/ready` decides and `/health` tells."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from cache_router.worker_registry import WorkerInfo
from gateway.services import Services


def is_ready(services: Services) -> bool:
    """Whether every worker has been looked at and one can take requests."""
    return services.discovery.first_round_done and any(
        worker.ready for worker in services.registry.workers()
    )


def health_report(services: Services) -> dict[str, Any]:
    """Return the state of this gateway, JSON-ready; addresses included, prompts and keys not."""
    workers = services.registry.workers()
    num_ready = sum(worker.ready for worker in workers)
    status = "degraded" if services.discovery.problems() else "ok"
    if num_ready == 0:
        status = "down"
    return {
        "status": status,
        "version": services.version,
        "in_flight": services.intake.num_in_flight,
        "workers": [_worker(services, worker) for worker in workers],
        "unusable_workers": services.discovery.problems(),
        "tokenizers": {
            model: asdict(state) for model, state in services.tokenizer.states().items()
        },
        "cache_servers": [
            {
                "url": source.url,
                "model": source.model,
                "trust": source.trust,
                "trust_reason": source.trust_reason,
                "indexed_blocks": services.index.num_blocks(source.source_id),
            }
            for source in services.registry.cache_sources()
        ],
        "unusable_cache_servers": services.discovery.cache_problems(),
        "index": {"blocks": sum(services.index.num_blocks(w.worker_id) for w in workers)},
    }


def _worker(services: Services, worker: WorkerInfo) -> dict[str, Any]:
    load = services.registry.load(worker.worker_id)
    return {
        "id": worker.worker_id,
        "ready": worker.ready,
        "reason": worker.ready_reason,
        "models": [model.name for model in worker.models],
        "trust": worker.trust,
        "trust_reason": worker.trust_reason,
        "block_size": services.index.block_size_of(worker.worker_id),
        "indexed_blocks": services.index.num_blocks(worker.worker_id),
        "in_flight": load.num_running,
        "waiting_tokens": load.waiting_tokens,
    }
