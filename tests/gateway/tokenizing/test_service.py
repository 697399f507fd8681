from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cache_router.errors import NoWorkerError
from cache_router.settings import Settings
from gateway.tokenizing.service import Tokenized, TokenizerService
from tests.gateway.tokenizing.model_folders import CHATML, byte_level, train, write_folder

TOKENIZER = train(byte_level())
MESSAGES = [{"role": "user", "content": "Hello world"}]
CHAT = {"messages": MESSAGES}
PICTURE = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}


class FakeEngine:
    """Answers each payload with the ids it was given for it, or fails, or never answers."""

    def __init__(self) -> None:
        self.payloads: list[dict[str, Any]] = []
        self.answer: list[int] | None = [7, 8, 9]
        self.is_silent = False

    async def tokenize(self, model: str, payload: dict[str, Any]) -> list[int]:
        self.payloads.append(payload)
        if self.is_silent:
            await asyncio.Event().wait()
        if self.answer is None:
            raise NoWorkerError(model, 1)
        return self.answer


class BlockedBody(dict[str, Any]):
    """A body that cannot be read before `gate` opens."""

    gate: threading.Event

    def get(self, key: str, default: Any = None) -> Any:
        self.gate.wait()
        return super().get(key, default)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
async def service(engine: FakeEngine) -> AsyncIterator[TokenizerService]:
    settings = Settings(
        tokenizer_threads=1, engine_tokenize_timeout_s=0.05, parity_sample_share=0.25
    )
    draws = iter((0.2, 0.25, 0.9))
    service = TokenizerService(settings, engine, None, lambda: next(draws))
    yield service
    service.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "model", TOKENIZER)


def lists(tokenized: Tokenized) -> list[list[int]]:
    return [ids.tolist() for ids in tokenized.prompts]


def expected_ids() -> list[int]:
    text = "<|im_start|>user\nHello world<|im_end|>\n<|im_start|>assistant\n"
    return list(TOKENIZER.encode(text).ids)


async def test_a_model_with_tokenizer_files_is_tokenized_here(
    service: TokenizerService, engine: FakeEngine, folder: Path
) -> None:
    state = await service.add_model("m", str(folder))
    assert (state.source, state.folder) == ("gateway", str(folder))
    chat = await service.tokenize_chat("m", CHAT)
    assert (chat.source, lists(chat)) == ("gateway", [expected_ids()])
    completion = await service.tokenize_completion("m", {"prompt": ["a", "b"]})
    assert lists(completion) == [TOKENIZER.encode("a").ids, TOKENIZER.encode("b").ids]
    assert engine.payloads == []


@pytest.mark.parametrize("root", [None, "nowhere/at-all"])
async def test_a_model_without_files_goes_to_its_engine_from_the_start(
    service: TokenizerService, engine: FakeEngine, root: str | None
) -> None:
    assert (await service.add_model("m", root)).source == "engine"
    chat = await service.tokenize_chat("m", CHAT)
    assert (chat.source, lists(chat)) == ("engine", [[7, 8, 9]])
    assert engine.payloads == [{"model": "m", "messages": MESSAGES}]


async def test_a_folder_that_cannot_be_used_says_why(
    service: TokenizerService, tmp_path: Path
) -> None:
    folder = write_folder(tmp_path / "m", TOKENIZER, template=None)
    state = await service.add_model("m", str(folder))
    assert state.source == "engine"
    assert "no Jinja chat template" in state.reason
    assert service.states() == {"m": state}


async def test_a_model_is_loaded_again_only_under_another_root(
    service: TokenizerService, folder: Path
) -> None:
    assert (await service.add_model("m", None)).source == "engine"
    first = await service.add_model("m", str(folder))
    assert first.source == "gateway"
    (folder / "tokenizer.json").unlink()
    assert await service.add_model("m", str(folder)) is first


async def test_the_configured_tokenizer_wins_over_the_model_s_own(
    engine: FakeEngine, folder: Path, tmp_path: Path
) -> None:
    template = tmp_path / "given.jinja"
    template.write_text(CHATML.replace("assistant", "bot"))
    settings = Settings(tokenizer=folder, chat_template=template, tokenizer_threads=1)
    service = TokenizerService(settings, engine, None)
    state = await service.add_model("m", "somewhere/else")
    assert state.folder == str(folder)
    (ids,) = (await service.tokenize_chat("m", CHAT)).prompts
    assert TOKENIZER.decode(ids.tolist(), skip_special_tokens=False).endswith("bot\n")
    service.close()


async def test_an_unknown_model_has_no_tokens(
    service: TokenizerService, engine: FakeEngine
) -> None:
    assert await service.tokenize_chat("m", CHAT) == Tokenized((), "none")
    assert engine.payloads == []


async def test_a_body_that_is_refused_here_goes_to_the_engine_if_that_can_tell(
    service: TokenizerService, engine: FakeEngine, folder: Path
) -> None:
    await service.add_model("m", str(folder))
    body = {"messages": MESSAGES, "tools": [{"function": {"name": "f"}}], "tool_choice": "auto"}
    write_folder(folder.parent / "raising", TOKENIZER, template="{{ raise_exception('no') }}")
    await service.add_model("raising", str(folder.parent / "raising"))
    assert (await service.tokenize_chat("raising", body)).source == "engine"
    assert (await service.tokenize_chat("m", body)).source == "gateway"


@pytest.mark.parametrize("root_is_known", [True, False])
async def test_pictures_have_no_tokens_and_ask_nobody(
    service: TokenizerService, engine: FakeEngine, folder: Path, root_is_known: bool
) -> None:
    await service.add_model("m", str(folder) if root_is_known else None)
    assert await service.tokenize_chat("m", PICTURE) == Tokenized((), "none")
    assert engine.payloads == []


async def test_an_engine_is_asked_for_each_text_and_never_for_token_ids(
    service: TokenizerService, engine: FakeEngine
) -> None:
    await service.add_model("m", None)
    assert lists(await service.tokenize_completion("m", {"prompt": ["a", "b"]})) == [[7, 8, 9]] * 2
    assert [payload["prompt"] for payload in engine.payloads] == ["a", "b"]
    engine.payloads.clear()
    assert lists(await service.tokenize_completion("m", {"prompt": [[1], [2, 3]]})) == [[1], [2, 3]]
    many = await service.tokenize_completion("m", {"prompt": ["x"] * 65})
    assert many == Tokenized((), "none")
    assert engine.payloads == []


@pytest.mark.parametrize("trouble", ["failing", "silent", "wrong"])
async def test_an_engine_that_does_not_answer_is_no_tokens(
    service: TokenizerService, engine: FakeEngine, trouble: str
) -> None:
    await service.add_model("m", None)
    engine.is_silent = trouble == "silent"
    engine.answer = None if trouble == "failing" else [-1]
    assert await service.tokenize_chat("m", CHAT) == Tokenized((), "none")
    assert await service.tokenize_completion("m", {"prompt": "x"}) == Tokenized((), "none")


async def test_the_share_of_checked_requests_is_the_configured_one(
    service: TokenizerService,
) -> None:
    assert [service.should_sample() for _ in range(3)] == [True, False, False]


async def test_equal_ids_pass_the_check(
    service: TokenizerService, engine: FakeEngine, folder: Path
) -> None:
    await service.add_model("m", str(folder))
    (ids,) = (await service.tokenize_chat("m", CHAT)).prompts
    engine.answer = expected_ids()
    await service.check_parity("m", CHAT, ids)
    stats = service.stats()
    assert (stats.checks_total, stats.unchecked_total, stats.mismatches_total) == (1, 0, 0)
    assert service.states()["m"].source == "gateway"


async def test_different_ids_move_the_model_to_its_engine_and_log_no_prompt(
    service: TokenizerService, engine: FakeEngine, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await service.add_model("m", str(folder))
    (ids,) = (await service.tokenize_chat("m", CHAT)).prompts
    with caplog.at_level(logging.DEBUG):
        await service.check_parity("m", CHAT, ids)
    state = service.states()["m"]
    assert (state.source, state.num_mismatches) == ("engine", 1)
    assert service.stats().mismatches_total == 1
    assert (await service.tokenize_chat("m", CHAT)).source == "engine"
    assert [record.levelname for record in caplog.records if "differed" in record.message] == [
        "WARNING"
    ]
    assert "Hello" not in caplog.text


async def test_a_model_stays_with_its_engine_after_a_mismatch(
    service: TokenizerService, folder: Path
) -> None:
    await service.add_model("m", str(folder))
    service.report_mismatch("m")
    service.report_mismatch("m")
    assert (await service.add_model("m", str(folder))).source == "engine"
    assert service.states()["m"].num_mismatches == 2


@pytest.mark.parametrize("trouble", ["failing", "silent"])
async def test_a_missing_answer_is_no_evidence(
    service: TokenizerService, engine: FakeEngine, folder: Path, trouble: str
) -> None:
    await service.add_model("m", str(folder))
    (ids,) = (await service.tokenize_chat("m", CHAT)).prompts
    engine.answer = None
    engine.is_silent = trouble == "silent"
    await service.check_parity("m", CHAT, ids)
    assert service.stats().unchecked_total == 1
    assert service.states()["m"].source == "gateway"


@pytest.mark.parametrize(
    "body", [{**CHAT, "documents": []}, {"prompt": ["a", "b"]}, {"prompt": [1, 2]}]
)
async def test_what_the_endpoint_cannot_say_is_not_checked(
    service: TokenizerService, engine: FakeEngine, folder: Path, body: dict[str, Any]
) -> None:
    await service.add_model("m", str(folder))
    await service.check_parity("m", body, np.array([1], dtype=np.uint32))
    assert service.stats().unchecked_total == 1
    assert engine.payloads == []


async def test_completions_are_checked_by_their_prompt(
    service: TokenizerService, engine: FakeEngine, folder: Path
) -> None:
    await service.add_model("m", str(folder))
    await service.check_parity("m", {"prompt": "x"}, np.array([7, 8, 9], dtype=np.uint32))
    assert service.stats().checks_total == 1
    assert engine.payloads == [{"model": "m", "prompt": "x", "add_special_tokens": True}]


async def test_checks_that_would_pile_up_are_left_out(
    service: TokenizerService, engine: FakeEngine, folder: Path
) -> None:
    await service.add_model("m", str(folder))
    engine.is_silent = True
    ids = np.array([1], dtype=np.uint32)
    await asyncio.gather(*(service.check_parity("m", CHAT, ids) for _ in range(9)))
    assert service.stats().unchecked_total == 9
    assert len(engine.payloads) == 4


async def test_a_prompt_with_the_date_in_it_is_written_again_before_it_counts_as_different(
    service: TokenizerService, engine: FakeEngine, tmp_path: Path
) -> None:
    template = "{{ strftime_now('%Y') }}" + CHATML
    folder = write_folder(tmp_path / "m", TOKENIZER, template=template)
    await service.add_model("m", str(folder))
    (ids,) = (await service.tokenize_chat("m", CHAT)).prompts
    engine.answer = ids.tolist()
    yesterday = ids[1:]
    await service.check_parity("m", CHAT, yesterday)
    service.note_prompt_tokens("m", len(yesterday), len(ids))
    assert service.states()["m"].source == "gateway"
    engine.answer = [1, 2, 3]
    await service.check_parity("m", CHAT, ids)
    assert service.states()["m"].source == "engine"


async def test_a_different_number_of_prompt_tokens_is_a_mismatch(
    service: TokenizerService, folder: Path
) -> None:
    await service.add_model("m", str(folder))
    service.note_prompt_tokens("m", 5, 5)
    assert service.states()["m"].source == "gateway"
    service.note_prompt_tokens("m", 5, 6)
    assert service.states()["m"].source == "engine"
    service.note_prompt_tokens("m", 5, 7)
    assert service.stats().mismatches_total == 1


async def test_the_loop_runs_while_a_prompt_is_worked_on_and_the_queue_is_bounded(
    service: TokenizerService, engine: FakeEngine, folder: Path
) -> None:
    await service.add_model("m", str(folder))
    BlockedBody.gate = threading.Event()
    waiting = [
        asyncio.create_task(service.tokenize_chat("m", BlockedBody(CHAT))) for _ in range(1024)
    ]
    await asyncio.sleep(0)
    assert await service.tokenize_chat("m", CHAT) == Tokenized((), "none")
    assert service.stats().overflows_total == 1
    assert engine.payloads == []
    BlockedBody.gate.set()
    assert {tokenized.source for tokenized in await asyncio.gather(*waiting)} == {"gateway"}
    assert (await service.tokenize_chat("m", CHAT)).source == "gateway"


async def test_nobody_waits_behind_a_body_of_megabytes(
    service: TokenizerService, folder: Path
) -> None:
    await service.add_model("m", str(folder))
    blocked = BlockedBody(CHAT)
    blocked.gate = threading.Event()
    long = asyncio.create_task(service.tokenize_chat("m", blocked, 2_000_000))
    try:
        async with asyncio.timeout(10):
            assert lists(await service.tokenize_chat("m", CHAT)) == [expected_ids()]
    finally:
        blocked.gate.set()
    assert lists(await long) == [expected_ids()]


async def test_a_client_that_leaves_frees_its_place_in_the_queue(
    service: TokenizerService, folder: Path
) -> None:
    await service.add_model("m", str(folder))
    BlockedBody.gate = threading.Event()
    leaving = [
        asyncio.create_task(service.tokenize_chat("m", BlockedBody(CHAT))) for _ in range(1024)
    ]
    await asyncio.sleep(0)
    for task in leaving:
        task.cancel()
    results = await asyncio.gather(*leaving, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in results)
    BlockedBody.gate.set()
    assert (await service.tokenize_chat("m", CHAT)).source == "gateway"


async def test_after_close_there_are_no_tokens(service: TokenizerService, folder: Path) -> None:
    await service.add_model("m", str(folder))
    service.close()
    assert await service.tokenize_chat("m", CHAT) == Tokenized((), "none")
