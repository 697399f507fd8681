"""The one file that knows vLLM: `RadixgateConnector`, a thin layer over the two sides.

vLLM makes one instance in its scheduler and one in each worker. What it cannot serve without a
doubt (see `engine_facts`) it leaves to vLLM alone: such an engine, or such a
request, runs as it would without a connector.
"""

# Only the engine's environment has vLLM and torch.
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from vllm import __version__ as vllm_version
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tp_group
from vllm.forward_context import ForwardContext
from vllm.platforms import current_platform
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.attention.backend import AttentionMetadata
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    resolve_none_hash_seed,
    to_event_extra_keys,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from engine_workers.cache_wire import PROTOCOL_VERSION, Hello
from engine_workers.connector.arena_reader import LoadResults
from engine_workers.connector.client import CacheServerClient
from engine_workers.connector.connector_settings import parse_settings, require_recompute
from engine_workers.connector.engine_facts import EngineBuild, is_served, supported_facts
from engine_workers.connector.engine_request import EngineRequest, ScheduledRequest
from engine_workers.connector.geometry import (
    EngineFacts,
    KvTensor,
    UnsupportedEngineError,
    block_layout,
    namespace_of,
)
from engine_workers.connector.huge_pages import advise_huge_pages
from engine_workers.connector.model_digest import model_digest
from engine_workers.connector.plan import StepPlan
from engine_workers.connector.rank_agreement import CommittedBlocks
from engine_workers.connector.scheduler_side import SchedulerSide
from engine_workers.connector.worker_side import WorkerSide

_log = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 1.0
_SOURCES = {"ram": CacheHitSource.HOST, "ssd": CacheHitSource.DISK}
_BUILD = EngineBuild(
    vllm_version=vllm_version,
    is_cpu=current_platform.is_cpu(),
    attention_isa=_get_attn_isa,
    hash_seed=lambda algorithm: resolve_none_hash_seed(get_hash_fn_by_name(algorithm)),
)
# Where a model's files lie and which library read them changes nothing in its blocks.
_IRRELEVANT_CONFIG = ("_name_or_path", "transformers_version")


@dataclass
class RadixgateMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """One step's plan, on its way to the workers."""

    plan: StepPlan = field(default_factory=StepPlan)


@dataclass
class RadixgateWorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What the server took over, on its way to the scheduler."""

    committed: CommittedBlocks

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Return both ranks' reports as one."""
        assert isinstance(other, RadixgateWorkerMetadata)
        return RadixgateWorkerMetadata(self.committed.merged(other.committed))


class RadixgateConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """vLLM's connector interface, passed on to `SchedulerSide` and `WorkerSide`."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        require_recompute(transfer.kv_load_failure_policy)
        self._settings = parse_settings(transfer.kv_connector_extra_config)
        self._engine_id = transfer.engine_id
        self._facts = _facts_of(vllm_config, kv_cache_config)
        self._block_pool: BlockPool | None = None
        self._clients: list[CacheServerClient] = []
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._refused_loads: set[str] = set()
        if role == KVConnectorRole.SCHEDULER and self._facts is not None:
            ranks = range(self._facts.tp_size)
            self._clients = [self._start_client("scheduler", self._facts, rank) for rank in ranks]
            self._scheduler = SchedulerSide(
                self._clients, self._facts.block_size, self._settings, engine=self
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is dropped is a block computed again some day, and no more."""
        return False

    # --- in the scheduler ---

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Keep the pool, to see what the engine's own cache holds."""
        self._block_pool = gpu_block_pool

    def num_local_blocks(self, request: EngineRequest) -> int:
        """Leading blocks of the request that the engine's own cache holds now."""
        if self._block_pool is None:
            return 0
        for number, block_hash in enumerate(request.block_hashes):
            if self._block_pool.get_cached_block(block_hash, [0]) is None:
                return number
        return len(request.block_hashes)

    def extra_keys(self, request: EngineRequest, number: int) -> tuple[object, ...]:
        """A block's extra hash keys, as KV events carry them."""
        assert self._facts is not None
        start = number * self._facts.block_size
        end = start + self._facts.block_size
        keys, _ = generate_block_hash_extra_keys(request, start, end, 0)
        event_keys = to_event_extra_keys([keys])
        return tuple(event_keys[0]) if event_keys and event_keys[0] else ()

    def on_new_request(self, request: Request) -> None:
        """Start the lookup."""
        if self._scheduler is not None and is_served(request):
            self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Promise what is staged; loads are always asynchronous."""
        if self._scheduler is None:
            return 0, False
        num_tokens = self._scheduler.num_new_tokens(request.request_id, num_computed_tokens)
        return num_tokens, bool(num_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Plan the load into the allocated blocks, or give the staged ones back."""
        if self._scheduler is not None:
            block_ids = blocks.get_block_ids()[0] if num_external_tokens else []
            self._scheduler.on_allocated(request.request_id, block_ids, num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        """Say which tiers the loaded tokens come from."""
        if self._scheduler is None or self._facts is None:
            return {}
        tokens: dict[CacheHitSource, int] = {}
        for tier in self._scheduler.loaded_from(request.request_id):
            source = _SOURCES.get(tier, CacheHitSource.EXTERNAL_UNSPECIFIED)
            tokens[source] = tokens.get(source, 0) + self._facts.block_size
        return tokens

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Plan the step's copies."""
        block_state = scheduler_output.kv_connector_block_state
        if self._scheduler is None or block_state is None:
            return RadixgateMetadata()
        drafts = scheduler_output.scheduled_spec_decode_tokens
        scheduled = [
            ScheduledRequest(
                request_id=request_id,
                num_tokens=num_tokens - len(drafts.get(request_id, ())),
                block_ids=(block_state.get_block_ids(request_id) or ([],))[0],
            )
            for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items()
        ]
        preempted = scheduler_output.preempted_req_ids or ()
        return RadixgateMetadata(self._scheduler.plan_step(scheduled, preempted))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take in what the workers report."""
        if self._scheduler is None:
            return
        report = connector_output.kv_connector_worker_meta
        self._scheduler.on_step_done(
            loaded=connector_output.finished_recving or (),
            failed=connector_output.failed_recving or (),
            committed=report.committed if isinstance(report, RadixgateWorkerMetadata) else None,
        )

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Give back what it holds. Its blocks were copied in the step that filled them."""
        if self._scheduler is not None:
            self._scheduler.on_finished(request.request_id)
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Give back what it holds."""
        return self.request_finished(request, block_ids[0])

    def has_pending_push_work(self) -> bool:
        """Whether to keep stepping, so that late answers' leases are given back at once."""
        return self._scheduler is not None and self._scheduler.awaits_answers()

    def reset_cache(self) -> bool | None:
        """Refuse: the blocks belong to all engines of the store, not to this one."""
        _log.warning("the tiers are not reset with an engine; use `radixgate cache clear`")
        return False

    # --- in a worker ---

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Learn where the blocks lie, and begin to connect."""
        if self._facts is None:
            return
        try:
            layout = block_layout(
                self._facts, _tensors_of(kv_caches), self._kv_cache_config.num_blocks
            )
        except UnsupportedEngineError as error:
            _log.warning("this engine computes without tiers: %s", error)
            return
        advise_huge_pages(layout)
        rank = get_tp_group().rank_in_group
        client = self._start_client("worker", self._facts, rank)
        self._clients = [client]
        self._worker = WorkerSide(client, layout, rank)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Hand this step's loads to the copy thread."""
        plan = self._plan()
        if self._worker is not None:
            self._worker.start_loads(plan.loads)
        else:
            self._refused_loads.update(job.request_id for job in plan.loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: no step reads what is still being loaded."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        """Nothing: blocks are saved whole, after the step."""

    def wait_for_save(self) -> None:
        """Copy this step's full blocks into the write ring."""
        if self._worker is not None:
            plan = self._plan()
            self._worker.save(plan.saves, plan.ended)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Report loads that are over; one that failed is reported as finished too."""
        refused, self._refused_loads = self._refused_loads, set()
        loads = LoadResults() if self._worker is None else self._worker.take_results()
        return KVConnectorTransferResults(
            finished_recving=refused | loads.finished, failed_recving=refused | loads.failed
        )

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Report what the server took over."""
        committed = self._worker.take_committed() if self._worker is not None else None
        return RadixgateWorkerMetadata(committed) if committed is not None else None

    # --- in both ---

    def shutdown(self) -> None:
        """End the threads, within seconds whatever the server does."""
        if self._worker is not None:
            self._worker.close(_CLOSE_TIMEOUT_S)
        for client in self._clients:
            client.close(_CLOSE_TIMEOUT_S)

    def _plan(self) -> StepPlan:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, RadixgateMetadata)
        return metadata.plan

    def _start_client(self, role: str, facts: EngineFacts, rank: int) -> CacheServerClient:
        def make_hello() -> Hello:
            model = model_digest(*_model_files(self._vllm_config))
            return Hello(
                protocol=PROTOCOL_VERSION,
                engine_id=f"{self._engine_id}/{rank}",
                role=role,
                namespace=namespace_of(facts, model, rank, self._settings.tenant_salt),
                block_bytes=facts.block_bytes,
                ring_slots=self._settings.ring_slots if role == "worker" else 0,
                # vLLM keeps the first of several names here, which also names its KV events' model.
                served_models=[str(self._vllm_config.model_config.served_model_name)],
            )

        client = CacheServerClient(Path(self._settings.socket), make_hello)
        client.start()
        return client


def _facts_of(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> EngineFacts | None:
    """What the engine's blocks are, None (and a line in the log) for kinds not served from here."""
    try:
        return supported_facts(vllm_config, kv_cache_config, _BUILD)
    except UnsupportedEngineError as error:
        _log.warning("this engine computes without tiers: %s", error)
        return None


def _model_files(vllm_config: VllmConfig) -> tuple[Path, str]:
    """Where the model's files lie, and its configuration as the engine uses it."""
    model = vllm_config.model_config
    config = model.hf_config.to_dict()
    for name in _IRRELEVANT_CONFIG:
        config.pop(name, None)
    folder = Path(model.model)
    if not folder.is_dir():
        found = try_to_load_from_cache(model.model, "config.json", revision=model.revision)
        if not isinstance(found, str):
            raise FileNotFoundError(f"{model.model} has no files here")
        folder = Path(found).parent
    return folder, json.dumps(config, sort_keys=True, default=str)


def _tensors_of(kv_caches: dict[str, torch.Tensor]) -> dict[str, KvTensor]:
    return {
        name: KvTensor(
            address=tensor.data_ptr(),
            shape=tuple(tensor.shape),
            stride_bytes=tuple(stride * tensor.element_size() for stride in tensor.stride()),
            item_bytes=tensor.element_size(),
        )
        for name, tensor in kv_caches.items()
    }
