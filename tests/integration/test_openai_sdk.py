from __future__ import annotations

import json
from typing import Any

import httpx2
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam
from pydantic import BaseModel

from tests.integration.conftest import GatewayProcess

pytestmark = pytest.mark.engines

QUESTION: list[ChatCompletionMessageParam] = [
    {"role": "user", "content": "What is the capital of France?"}
]
WEATHER: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        # Without it the engine leaves the arguments unconstrained.
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def chat(sdk: openai.OpenAI, model: str, **options: Any) -> Any:
    return sdk.chat.completions.create(
        model=model, messages=QUESTION, temperature=0, max_tokens=12, **options
    )


def test_an_answer_is_the_models(sdk: openai.OpenAI, model: str) -> None:
    answer = chat(sdk, model)
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert answer.model == model
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer._request_id


def test_a_stream_says_the_same_as_a_whole_answer(sdk: openai.OpenAI, model: str) -> None:
    whole = chat(sdk, model).choices[0].message.content
    chunks = list(chat(sdk, model, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole
    assert len({chunk.id for chunk in chunks}) == 1
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


def test_usage_comes_last_and_once_where_it_was_asked_for(sdk: openai.OpenAI, model: str) -> None:
    chunks = list(chat(sdk, model, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens > 0
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_the_streaming_helper_accumulates(sdk: openai.OpenAI, model: str) -> None:
    with sdk.chat.completions.stream(
        model=model, messages=QUESTION, temperature=0, max_tokens=12
    ) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert "Paris" in (final.choices[0].message.content or "")


def test_multibyte_text_streams_without_a_broken_character(sdk: openai.OpenAI, model: str) -> None:
    options: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": "Repeat: 안녕하세요 🙂🫠 café"}],
        "temperature": 0,
        "max_tokens": 40,
    }
    whole = sdk.chat.completions.create(**options).choices[0].message.content
    chunks = sdk.chat.completions.create(stream=True, **options)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}]
)
def test_a_tool_that_must_be_called_is_called(
    sdk: openai.OpenAI, model: str, choice: Any, stream: bool
) -> None:
    options: dict[str, Any] = {"tools": [WEATHER], "tool_choice": choice}
    request = {**options, "model": model, "messages": QUESTION, "temperature": 0, "max_tokens": 60}
    if stream:
        with sdk.chat.completions.stream(**request) as events:
            for _ in events:
                pass
            message: Any = events.get_final_completion().choices[0].message
    else:
        message = sdk.chat.completions.create(**request).choices[0].message
    (call,) = message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")


def test_a_tools_result_can_be_sent_back(sdk: openai.OpenAI, model: str) -> None:
    call = {"id": "call_1", "type": "function"}
    arguments = {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    messages: Any = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [{**call, "function": arguments}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    answer = sdk.chat.completions.create(
        model=model, messages=messages, tools=[WEATHER], max_tokens=5
    )
    assert answer.choices[0].message.content


def test_a_json_schema_is_kept(sdk: openai.OpenAI, model: str) -> None:
    schema = {
        "type": "object",
        "properties": {"capital": {"type": "string", "maxLength": 12}},
        "required": ["capital"],
        "additionalProperties": False,
    }
    answer = sdk.chat.completions.create(
        model=model,
        messages=QUESTION,
        temperature=0,
        max_tokens=60,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "capital", "schema": schema, "strict": True},
        },
    )
    assert set(json.loads(answer.choices[0].message.content or "")) == {"capital"}


class Capital(BaseModel):
    """What `parse` makes a schema of."""

    is_known: bool


def test_parse_gives_a_typed_answer(sdk: openai.OpenAI, model: str) -> None:
    answer = sdk.chat.completions.parse(
        model=model, messages=QUESTION, temperature=0, max_tokens=60, response_format=Capital
    )
    assert isinstance(answer.choices[0].message.parsed, Capital)


def test_logprobs_are_finite_and_ordered(sdk: openai.OpenAI, model: str) -> None:
    answer = chat(sdk, model, logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    assert content
    for token in content:
        tops = [top.logprob for top in token.top_logprobs]
        assert len(tops) == 3
        assert tops == sorted(tops, reverse=True)
        assert token.logprob == tops[0]


def test_stop_ends_the_text(sdk: openai.OpenAI, model: str) -> None:
    stopped = chat(sdk, model, stop=["capital"]).choices[0]
    assert "capital" not in stopped.message.content
    assert stopped.finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_n_answers_come_from_one_request(sdk: openai.OpenAI, model: str, stream: bool) -> None:
    options: dict[str, Any] = {
        "model": model,
        "messages": QUESTION,
        "n": 3,
        "temperature": 1,
        "seed": 5,
        "max_tokens": 5,
    }
    if stream:
        chunks = sdk.chat.completions.create(stream=True, **options)
        indices = {choice.index for chunk in chunks for choice in chunk.choices}
    else:
        indices = {choice.index for choice in sdk.chat.completions.create(**options).choices}
    assert indices == {0, 1, 2}


def test_a_seed_repeats_and_another_one_does_not(sdk: openai.OpenAI, model: str) -> None:
    def sample(seed: int) -> str | None:
        answer = sdk.chat.completions.create(
            model=model, messages=QUESTION, temperature=1.5, max_tokens=16, seed=seed
        )
        return answer.choices[0].message.content

    first = sample(1)
    assert sample(1) == first
    assert any(sample(seed) != first for seed in (2, 3, 4))


@pytest.mark.parametrize(
    ("prompt", "num_choices"),
    [
        ("The capital of France is", 1),
        (["The capital of France is", "Two and two is"], 2),
        ([504, 3575, 282, 4649, 314], 1),
        ([[504, 3575, 282, 4649, 314], [504, 3575]], 2),
    ],
)
def test_completions_take_a_prompt_of_each_shape(
    sdk: openai.OpenAI, model: str, prompt: Any, num_choices: int
) -> None:
    answer = sdk.completions.create(model=model, prompt=prompt, max_tokens=4, temperature=0)
    assert [choice.index for choice in answer.choices] == list(range(num_choices))
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 4 * num_choices
    streamed: dict[int, str] = {}
    for chunk in sdk.completions.create(
        model=model, prompt=prompt, max_tokens=4, temperature=0, stream=True
    ):
        for choice in chunk.choices:
            streamed[choice.index] = streamed.get(choice.index, "") + choice.text
    assert streamed == {choice.index: choice.text for choice in answer.choices}


def test_streamed_usage_sums_all_choices(sdk: openai.OpenAI, model: str) -> None:
    chunks = list(
        sdk.completions.create(
            model=model,
            prompt=["a b c", "d e f"],
            n=3,
            max_tokens=5,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
    )
    usage = [chunk.usage for chunk in chunks if not chunk.choices]
    assert len(usage) == 1
    assert usage[0] is not None
    assert usage[0].completion_tokens == 30


def test_echo_with_logprobs_is_valid_json(sdk: openai.OpenAI, model: str) -> None:
    answer = sdk.completions.create(
        model=model, prompt="One two three", echo=True, logprobs=1, max_tokens=2, temperature=0
    )
    assert answer.choices[0].text.startswith("One two three")


def test_models_are_listed(sdk: openai.OpenAI, model: str) -> None:
    (listed,) = sdk.models.list().data
    assert listed.id == model
    assert sdk.models.retrieve(model).id == model


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"model": "no-such-model"}, openai.NotFoundError),
        ({"messages": []}, openai.BadRequestError),
        ({"messages": [{"role": "user", "content": "word " * 5000}]}, openai.BadRequestError),
        ({"temperature": -1}, openai.BadRequestError),
        ({"n": 0}, openai.BadRequestError),
        ({"max_tokens": 10_000_000}, openai.BadRequestError),
        ({"stop": [1]}, openai.BadRequestError),
        ({"logit_bias": {"x": 1}}, openai.BadRequestError),
        ({"extra_body": {"cache_salt": ""}}, openai.BadRequestError),
    ],
)
def test_a_mistake_is_a_4xx_before_any_stream(
    sdk: openai.OpenAI,
    model: str,
    options: dict[str, Any],
    error: type[openai.APIStatusError],
    stream: bool,
) -> None:
    request: dict[str, Any] = {"model": model, "messages": QUESTION, "max_tokens": 4, **options}
    with pytest.raises(error) as caught:
        sdk.chat.completions.create(**request, stream=stream)
    assert caught.value.body
    assert caught.value.request_id


def test_a_schema_that_no_grammar_can_be_made_of_is_an_error_either_way(
    sdk: openai.OpenAI, model: str
) -> None:
    schema = {"name": "x", "schema": {"type": "nope"}}
    options: dict[str, Any] = {
        "model": model,
        "messages": QUESTION,
        "response_format": {"type": "json_schema", "json_schema": schema},
    }
    with pytest.raises(openai.BadRequestError):
        sdk.chat.completions.create(**options)
    # The engine finds out after its 200, so it is an event of the stream.
    with pytest.raises(openai.APIError):
        list(sdk.chat.completions.create(**options, stream=True))


def test_too_long_a_prompt_is_named_so(sdk: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.completions.create(model=model, prompt="word " * 5000, max_tokens=8, stream=True)
    assert caught.value.code == "context_length_exceeded"


async def test_the_async_client_streams_too(real_gateway: GatewayProcess) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"{real_gateway.url}/v1", api_key="sk-any", max_retries=0
    ) as client:
        stream = await client.chat.completions.create(
            model=real_gateway.model, messages=QUESTION, temperature=0, max_tokens=12, stream=True
        )
        text = "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])
        whole = await client.chat.completions.create(
            model=real_gateway.model, messages=QUESTION, temperature=0, max_tokens=12
        )
    assert text == whole.choices[0].message.content


def test_no_mistake_has_cost_a_worker(real_gateway: GatewayProcess) -> None:
    health = httpx2.get(f"{real_gateway.url}/health").json()
    assert health["status"] == "ok"
    assert health["in_flight"] == 0
    for worker in health["workers"]:
        assert (worker["ready"], worker["in_flight"], worker["waiting_tokens"]) == (True, 0, 0)
    assert all(state["num_mismatches"] == 0 for state in health["tokenizers"].values())
