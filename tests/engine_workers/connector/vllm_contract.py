"""Runs inside the engine's Python: prints, as JSON, what the installed vLLM asks of a connector."""

# Only the engine's environment has vLLM.
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
from typing import Any

from vllm.config import (
    CacheConfig,
    KVTransferConfig,
    LoadConfig,
    ModelConfig,
    ParallelConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.plugins import load_general_plugins
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from engine_workers.connector.radixgate_connector import RadixgateConnector

DATACLASSES = (
    CacheConfig,
    FullAttentionSpec,
    KVCacheConfig,
    KVConnectorOutput,
    KVConnectorTransferResults,
    KVTransferConfig,
    LoadConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerOutput,
    SpeculativeConfig,
    VllmConfig,
)


def parameters(owner: type, name: str) -> list[str] | None:
    member = inspect.getattr_static(owner, name)
    function = getattr(member, "__func__", member)
    return list(inspect.signature(function).parameters) if callable(function) else None


def public(owner: type) -> list[str]:
    return sorted(name for name in dir(owner) if not name.startswith("_"))


def overridden() -> dict[str, list[list[str] | None]]:
    bases = (KVConnectorBase_V1, SupportsHMA)
    pairs = {}
    for name in vars(RadixgateConnector):
        for base in bases:
            if hasattr(base, name) and not name.startswith("_"):
                pairs[name] = [parameters(RadixgateConnector, name), parameters(base, name)]
    return pairs


def registered() -> list[str]:
    load_general_plugins()
    classes = []
    for module in (None, "engine_workers.connector.radixgate_connector"):
        config = KVTransferConfig(
            kv_connector="RadixgateConnector",
            kv_role="kv_both",
            kv_connector_module_path=module,
        )
        classes.append(KVConnectorFactory.get_connector_class(config).__qualname__)
    return classes


def as_a_child() -> bool:
    children = [{"kv_connector": "RadixgateConnector", "kv_role": "kv_both"}]
    return bool(
        MultiConnector.all_children_support_hma(
            KVTransferConfig(
                kv_connector="MultiConnector",
                kv_role="kv_both",
                kv_connector_extra_config={"connectors": children},
            )
        )
    )


answer: dict[str, Any] = {
    "missing": sorted(RadixgateConnector.__abstractmethods__),
    "members": public(KVConnectorBase_V1),
    "hma_members": public(SupportsHMA),
    "overridden": overridden(),
    "constructor": parameters(KVConnectorBase_V1, "__init__"),
    "fields": {
        kind.__name__: sorted(field.name for field in dataclasses.fields(kind))
        for kind in DATACLASSES
    },
    "request": sorted(
        {*vars(Request)} | {*inspect.signature(Request.__init__).parameters} | {"block_hashes"}
    ),
    "registered": registered(),
    "supports_hma_as_a_child": as_a_child(),
}
sys.stdout.write("\n" + json.dumps(answer))
