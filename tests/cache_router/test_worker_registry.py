from __future__ import annotations

import pytest

from cache_router.errors import UnknownModelError
from cache_router.types import PromptRoot, Trust, WorkerId
from cache_router.worker_registry import EventEndpoint, ServedModel, WorkerInfo, WorkerRegistry

A, B = WorkerId("http://a:1"), WorkerId("http://b:1#dp1")


def base(name: str = "base", max_model_len: int | None = 100) -> ServedModel:
    return ServedModel(name, "/models/base", max_model_len, None, 1, "vllm")


def adapter(name: str = "ad", parent: str = "base") -> ServedModel:
    return ServedModel(name, "/models/ad", None, parent, 1, "vllm")


def info(registry: WorkerRegistry, worker_id: WorkerId) -> WorkerInfo:
    found = registry.get(worker_id)
    assert found is not None
    return found


@pytest.fixture
def registry() -> WorkerRegistry:
    registry = WorkerRegistry()
    registry.update(A, url="http://a:1", models=[base(), adapter()])
    registry.update(B, url="http://b:1", dp_rank=1, models=[base(max_model_len=200)])
    return registry


def test_a_new_worker_is_neither_ready_nor_trusted(registry: WorkerRegistry) -> None:
    assert (info(registry, A).ready, info(registry, A).trust) == (False, Trust.LOAD_ONLY)


def test_new_facts_leave_readiness_trust_and_load_alone(registry: WorkerRegistry) -> None:
    registry.set_ready(A, True, "answers")
    registry.set_trust(A, Trust.EXACT, "all events applied")
    registry.load(A).num_running = 3
    endpoint = EventEndpoint("ipc://a")
    registry.update(A, url="http://a:1", models=[base()], epoch=5.0, event_endpoint=endpoint)
    assert info(registry, A) == WorkerInfo(
        A,
        "http://a:1",
        None,
        (base(),),
        5.0,
        endpoint,
        True,
        "answers",
        Trust.EXACT,
        "all events applied",
    )
    assert registry.load(A).num_running == 3


def test_a_snapshot_does_not_change_when_the_registry_does(registry: WorkerRegistry) -> None:
    before = info(registry, A)
    registry.set_ready(A, True, "answers")
    assert not before.ready


def test_models_are_listed_once_with_the_largest_limit(registry: WorkerRegistry) -> None:
    assert registry.models() == (base(max_model_len=200), adapter())


def test_workers_are_found_by_model_and_by_adapter(registry: WorkerRegistry) -> None:
    assert [each.worker_id for each in registry.workers_for("base")] == [A, B]
    assert [each.worker_id for each in registry.workers_for("ad")] == [A]
    assert registry.workers_for("none") == ()


def test_an_adapter_has_its_base_models_limit(registry: WorkerRegistry) -> None:
    worker = info(registry, A)
    assert (worker.max_model_len("ad"), worker.max_model_len("none")) == (100, None)


def test_the_first_base_model_names_a_workers_hashes(registry: WorkerRegistry) -> None:
    registry.update(A, url="http://a:1", models=[adapter(), base("first"), base("alias")])
    assert info(registry, A).base_model == "first"
    registry.update(A, url="http://a:1", models=[])
    assert info(registry, A).base_model is None


def test_a_prompt_is_rooted_in_the_base_model(registry: WorkerRegistry) -> None:
    assert registry.prompt_root("base", "salt") == PromptRoot("base", None, "salt")
    assert registry.prompt_root("ad") == PromptRoot("base", "ad", None)
    with pytest.raises(UnknownModelError):
        registry.prompt_root("none")


def test_a_removed_worker_is_forgotten_and_begins_anew(registry: WorkerRegistry) -> None:
    registry.set_ready(A, True, "answers")
    old_load = registry.load(A)
    old_load.num_running = 1
    registry.remove(A)
    registry.remove(A)
    assert registry.get(A) is None
    registry.set_trust(A, Trust.EXACT, "too late")
    assert [each.worker_id for each in registry.workers()] == [B]
    registry.update(A, url="http://a:1", models=[base()])
    assert registry.load(A).num_running == 0
    assert not info(registry, A).ready
