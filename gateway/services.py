"""What the routes work with, built once and passed down."""

from __future__ import annotations

from dataclasses import dataclass

from cache_router.errors import NoWorkerError, UnknownModelError
from cache_router.radix_index import RadixIndex
from cache_router.router import CacheRouter
from cache_router.settings import Settings
from cache_router.types import PromptRoot
from cache_router.worker_registry import WorkerRegistry
from gateway.discovery import Discovery
from gateway.intake import Intake
from gateway.metrics import Metrics
from gateway.request_tokens import RequestTokens
from gateway.upstream_client import UpstreamClient


@dataclass(frozen=True, slots=True)
class Services:
    """One gateway's parts."""

    version: str
    settings: Settings
    registry: WorkerRegistry
    index: RadixIndex
    router: CacheRouter
    tokenizer: RequestTokens
    discovery: Discovery
    client: UpstreamClient
    metrics: Metrics
    intake: Intake

    def prompt_root(self, model: str, cache_salt: str | None) -> PromptRoot:
        """What seeds the block hashes of a request for `model`.

        Raises:
            UnknownModelError: No worker serves it.
            NoWorkerError: None that was seen serves it, but one has never been seen yet.
        """
        try:
            return self.registry.prompt_root(model, cache_salt)
        except UnknownModelError:
            if self.discovery.all_seen:
                raise
            raise NoWorkerError(model, self.discovery.num_urls) from None
