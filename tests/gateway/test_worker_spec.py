from __future__ import annotations

import pytest

from cache_router.errors import ConfigurationError
from cache_router.worker_registry import EventEndpoint
from gateway.worker_spec import WorkerSpec


def test_a_url_is_enough() -> None:
    spec = WorkerSpec.parse("http://h:8000/")
    assert (spec.url, spec.model, spec.events) == ("http://h:8000", None, None)


def test_a_nodes_cache_server_is_named_beside_its_worker() -> None:
    assert WorkerSpec.parse("http://h:8000,cache=http://h:9400/").cache_url == "http://h:9400"


def test_what_is_given_is_not_discovered() -> None:
    spec = WorkerSpec.parse(
        "http://h:8000,model=org/m,max-model-len=4096,events=tcp://h:5557,replay=tcp://h:5558"
    )
    assert spec.model is not None
    assert (spec.model.name, spec.model.max_model_len) == ("org/m", 4096)
    assert spec.events == EventEndpoint("tcp://h:5557", "tcp://h:5558")


@pytest.mark.parametrize(
    "text",
    [
        "http://h,nonsense",
        "http://h,model=",
        "http://h,colour=red",
        "http://h,max-model-len=1",
        "http://h,model=m,max-model-len=many",
        "http://h,model=m,max-model-len=0",
        "http://h,replay=tcp://h:1",
        "http://h,cache=h:1",
        "http://h,cache=ftp://h",
        "http://h,events=h:1",
        "http://h,events=http://h:1",
        ",model=m",
    ],
)
def test_what_cannot_be_read_is_named(text: str) -> None:
    with pytest.raises(ConfigurationError, match="--worker"):
        WorkerSpec.parse(text)


@pytest.mark.parametrize(
    "url",
    [
        "http://h:0",
        "http://h/ü",
        "http://h/a b",
        "http://" + "ü" * 300,
        "http://a..ü",
        "http://h,model=m,max-model-len=" + "9" * 5000,
    ],
)
def test_what_no_server_can_have_is_refused_at_once(url: str) -> None:
    with pytest.raises(ConfigurationError, match="--worker"):
        WorkerSpec.parse(url)
