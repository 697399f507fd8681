from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.processors import BertProcessing, ByteLevel, Sequence, TemplateProcessing

from cache_router.errors import TokenizerError
from gateway.tokenizing.incremental_cache import SegmentCache
from gateway.tokenizing.model_tokenizer import ModelTokenizer
from gateway.tokenizing.request_fields import Truncation
from tests.gateway.tokenizing.model_folders import byte_level, train, write_folder

USER = {"role": "user", "content": "Hello world"}
SMOLLM2_SYSTEM = (
    "<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
)


def load(folder: Path, tokenizer: Tokenizer | None = None, **settings: Any) -> ModelTokenizer:
    template = settings.pop("template", "{{ bos_token }}{{ messages[0].content }}")
    write_folder(folder, tokenizer or train(byte_level()), settings, template)
    return ModelTokenizer.load(folder, None)


@pytest.fixture(scope="module")
def smollm2(smollm2_folder: Path) -> ModelTokenizer:
    return ModelTokenizer.load(smollm2_folder, None)


def test_smollm2_writes_and_encodes_what_its_engine_does(smollm2: ModelTokenizer) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    assert smollm2.render_chat(body) == (
        SMOLLM2_SYSTEM + "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    # The ids that vLLM 0.32 answers with under `return_token_ids`.
    system = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018]
    system += [411, 407, 19712, 8182, 2, 198]
    turn = [1, 4093, 198, 6004, 2, 198, 1, 520, 9531, 198]
    assert smollm2.encode_chat(body).tolist() == system + turn
    assert smollm2.encode_chat(body).dtype == np.uint32


def test_a_long_conversation_is_encoded_like_its_rendered_text(smollm2: ModelTokenizer) -> None:
    messages = [
        {"role": "user", "content": f"Tell me more about item {i}. " * 60} for i in range(9)
    ]
    for count in range(1, len(messages) + 1):
        body = {"messages": messages[:count]}
        whole = smollm2.encode_completion(smollm2.render_chat(body))[0]
        assert np.array_equal(smollm2.encode_chat(body), whole)


def test_chat_adds_special_tokens_only_if_asked_to_and_completions_unless(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, train(byte_level(), adds_bos=True), template="{{ messages }}")
    chat = tokenizer.encode_chat({"messages": [USER]}).tolist()
    asked = tokenizer.encode_chat({"messages": [USER], "add_special_tokens": True}).tolist()
    assert asked == [1, *chat, 2]
    (completion,) = tokenizer.encode_completion_body({"prompt": "x"})
    (bare,) = tokenizer.encode_completion_body({"prompt": "x", "add_special_tokens": False})
    assert completion.tolist() == [1, *bare.tolist(), 2]


def test_add_bos_token_in_the_configuration_changes_nothing(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, add_bos_token=True)
    assert (
        tokenizer.encode_completion("x")[0].tolist()
        == tokenizer.encode_completion("x", False)[0].tolist()
    )


def test_one_of_several_post_processors_may_wrap_the_prompt(tmp_path: Path) -> None:
    wrapping = TemplateProcessing(single="$A <|im_end|>", special_tokens=[("<|im_end|>", 2)])
    backend = train(byte_level())
    backend.post_processor = Sequence([ByteLevel(), wrapping])
    assert load(tmp_path / "a", backend).encode_completion("x")[0].tolist()[1:] == [2]
    backend.post_processor = Sequence([wrapping, wrapping])
    with pytest.raises(TokenizerError, match="twice"):
        load(tmp_path / "b", backend)


def test_unknown_post_processors_are_refused(tmp_path: Path) -> None:
    backend = train(byte_level())
    backend.post_processor = BertProcessing(("<|im_end|>", 2), ("<|im_start|>", 1))
    with pytest.raises(TokenizerError, match="BertProcessing"):
        load(tmp_path, backend)


def test_template_variables_are_special_tokens_and_what_the_template_reads(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, template="{{ bos_token }}|{{ x }}|{{ eos_token is defined }}")
    body: dict[str, Any] = {"messages": [USER], "chat_template_kwargs": {"x": 1, "y": 2}}
    assert tokenizer.render_chat(body) == "<|im_start|>|1|False"
    body["chat_template_kwargs"] = {"bos_token": "B", "eos_token": "E"}
    assert tokenizer.render_chat(body) == "B||True"


def test_requests_with_tools_get_the_template_for_tools(tmp_path: Path) -> None:
    named = {"default": "plain", "tool_use": "{{ tools[0].function.name }}"}
    tokenizer = load(tmp_path, template=None, chat_template=named)
    body = {"messages": [USER], "tools": [{"function": {"name": "f"}}]}
    assert tokenizer.render_chat(body) == "f"
    assert tokenizer.render_chat({"messages": [USER]}) == "plain"


def test_without_a_default_template_chat_is_refused(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, template=None, chat_template={"other": "x"})
    with pytest.raises(TokenizerError, match="default"):
        tokenizer.encode_chat({"messages": [USER]})


def test_truncation_keeps_what_is_added_around_the_prompt(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, train(byte_level(), adds_bos=True))
    whole = tokenizer.encode_completion("Hello world, how are you?", False)[0].tolist()

    def shortened(truncation: Truncation) -> list[int]:
        (ids,) = tokenizer.encode_completion("Hello world, how are you?", True, truncation)
        return list(ids)

    assert shortened(Truncation(5)) == [1, *whole[-3:], 2]
    assert shortened(Truncation(5, "left")) == [1, *whole, 2][-5:]
    assert shortened(Truncation(5, "right")) == [1, *whole, 2][:5]
    assert shortened(Truncation(500)) == [1, *whole, 2]
    with pytest.raises(TokenizerError, match="nothing"):
        shortened(Truncation(2))


def test_truncation_of_texts_that_the_engine_may_cut_before_is_refused(tmp_path: Path) -> None:
    tokenizer = load(tmp_path)
    with pytest.raises(TokenizerError, match="before it encodes"):
        tokenizer.encode_completion("word " * 1000, True, Truncation(2, "left"))


def test_all_prompts_of_a_completion_are_encoded_in_order(tmp_path: Path) -> None:
    tokenizer = load(tmp_path)
    texts = ["Hello", "", "world"]
    assert [tokenizer.decode(ids) for ids in tokenizer.encode_completion(texts)] == texts
    assert [ids.tolist() for ids in tokenizer.encode_completion([[7, 8], [9]])] == [[7, 8], [9]]


def test_half_a_surrogate_pair_is_refused(tmp_path: Path) -> None:
    tokenizer = load(tmp_path)
    with pytest.raises(TokenizerError, match="Unicode"):
        tokenizer.encode_completion("a\ud800b")
    with pytest.raises(TokenizerError, match="Unicode"):
        tokenizer.encode_chat({"messages": [{"role": "user", "content": "\udc00"}]})


def test_decoding_keeps_special_tokens(smollm2: ModelTokenizer) -> None:
    text = "<|im_start|>user\nGrüße 😀 !<|im_end|>"
    assert smollm2.decode(smollm2.encode_completion(text)[0]) == text
    with pytest.raises(TokenizerError):
        smollm2.decode([2**70])


def test_decoding_that_the_engine_edits_is_refused(tmp_path: Path) -> None:
    words = Tokenizer(WordLevel({"a": 0, ".": 1, "<|im_start|>": 2}, unk_token="a"))
    words.add_special_tokens(["<|im_start|>"])
    tokenizer = load(tmp_path, words, clean_up_tokenization_spaces=True)
    with pytest.raises(TokenizerError, match="cleans up"):
        tokenizer.decode([0, 1])
    assert load(tmp_path, clean_up_tokenization_spaces=True).decode([1]) == "<|im_start|>"


def test_a_shared_cache_serves_a_second_request(smollm2_folder: Path) -> None:
    cache = SegmentCache(1_000_000)
    tokenizer = ModelTokenizer.load(smollm2_folder, None, cache)
    body = {"messages": [{"role": "user", "content": "some words of a talk " * 200}]}
    tokenizer.encode_chat(body)
    encoded = cache.stats().tokens_encoded
    tokenizer.encode_chat(body)
    assert cache.stats().tokens_encoded - encoded < encoded / 2
    assert cache.stats().hits > 0


def test_padding_and_truncation_saved_with_a_tokenizer_are_off(tmp_path: Path) -> None:
    backend = train(byte_level())
    backend.enable_truncation(2)
    backend.enable_padding(length=50)
    assert len(load(tmp_path, backend).encode_completion("Hello world, how are you?")[0]) > 2
    assert len(load(tmp_path, backend).encode_completion("x")[0]) < 50


def test_a_broken_tokenizer_file_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, train(byte_level()))
    (folder / "tokenizer.json").write_text('{"added_tokens": [], "model": {}}')
    with pytest.raises(TokenizerError, match="not a tokenizer"):
        ModelTokenizer.load(folder, None)
