"""The gateway's token ids against those that engines really used, template by template."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from engine_workers.engine_runtime import load_runtime
from engine_workers.model_store import default_model
from engine_workers.workspace import Workspace
from gateway.tokenizing.model_tokenizer import ModelTokenizer
from tests.integration.conftest import gateway_process
from tests.integration.parity_bodies import CHAT, compare_with_engine, parity_bodies
from tests.real_engines import RunningEngines, running_engines

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

TEMPLATES = Path(__file__).parent / "chat_templates"


def test_there_are_enough_bodies() -> None:
    bodies = parity_bodies()
    assert len(bodies) >= 200
    assert len({body.endpoint for body in bodies}) == 2


def test_token_ids_are_the_engines_with_the_models_own_template(
    engines: RunningEngines, smollm2_folder: Path
) -> None:
    tokenizer = ModelTokenizer.load(smollm2_folder, None)
    assert compare_with_engine(engines.urls[0], tokenizer, parity_bodies()) == []


@pytest.fixture
def templated_engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RunningEngines]:
    workspace = Workspace.current()
    with running_engines(
        default_model(workspace),
        load_runtime(workspace, None),
        workspace.sockets,
        tmp_path,
        num_engines=1,
        chat_template=request.param,
    ) as running:
        yield running


@pytest.mark.parametrize(
    ("templated_engine", "template"),
    [(file, file) for file in sorted(TEMPLATES.glob("*.jinja"))],
    ids=[file.stem for file in sorted(TEMPLATES.glob("*.jinja"))],
    indirect=["templated_engine"],
)
def test_token_ids_are_the_engines_with_another_template(
    templated_engine: RunningEngines, template: Path, smollm2_folder: Path
) -> None:
    tokenizer = ModelTokenizer.load(smollm2_folder, template)
    bodies = parity_bodies()
    assert compare_with_engine(templated_engine.urls[0], tokenizer, bodies) == []
    # And the template is at work: some prompt is another one than with the model's own.
    plain = ModelTokenizer.load(smollm2_folder, None)
    chats = [body.fields for body in bodies if body.endpoint == CHAT]
    assert any(
        tokenizer.encode_chat(fields).tolist() != plain.encode_chat(fields).tolist()
        for fields in chats
    )


def test_a_wrong_template_is_noticed_and_the_engine_tokenizes_from_then_on(
    engines: RunningEngines, tmp_path: Path
) -> None:
    # The engines render the model's own template: the gateway was told a lie.
    lie = ("--chat-template", str(TEMPLATES / "bos.jinja"))
    with gateway_process(engines, tmp_path / "gateway.log", lie) as gateway:
        body = {
            "model": gateway.model,
            "messages": [{"role": "user", "content": "tell " * 100}],
            "max_tokens": 2,
        }

        def explain() -> str:
            answer = httpx2.post(f"{gateway.url}/v1/route/explain", json=body)
            return str(answer.json()["tokenized_by"])

        assert explain() == "gateway"
        for _ in range(2):
            httpx2.post(f"{gateway.url}/v1/chat/completions", json=body).raise_for_status()
        assert explain() == "engine"
        state = httpx2.get(f"{gateway.url}/health").json()["tokenizers"][gateway.model]
        assert state["source"] == "engine"
        assert "differed" in state["reason"]
        metrics = httpx2.get(f"{gateway.url}/metrics").text
        name = f'radixgate_tokenization_mismatch_total{{model="{gateway.model}"}}'
        assert f"{name} 1.0" in metrics
        # And what the engine says is right: the second request hit all of the first.
        answer = httpx2.post(f"{gateway.url}/v1/chat/completions", json=body)
        usage = answer.json()["usage"]["prompt_tokens_details"]
        predicted = int(answer.headers["x-radixgate-predicted-cached-tokens"])
        assert predicted == usage["cached_tokens"] > 0
