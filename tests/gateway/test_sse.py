from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_router.errors import UpstreamIncompleteError, UpstreamProtocolError
from gateway.sse import EventSplitter, StreamJudge, event_data, usage_of

_NEWLINES = ["\n", "\r\n", "\r"]


def _event(payload: str, newline: str = "\n") -> bytes:
    return f"data: {payload}{newline}{newline}".encode()


def _chunk(**fields: Any) -> bytes:
    return _event(json.dumps({"id": "c1", "object": "chat.completion.chunk", **fields}))


def _split(data: list[bytes]) -> list[bytes]:
    splitter = EventSplitter("w", 1 << 20)
    events = [event for piece in data for event in splitter.feed(piece)]
    return events + list(splitter.finish())


@given(
    st.lists(
        st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=30), max_size=8
    ),
    st.sampled_from(_NEWLINES),
    st.data(),
)
def test_events_are_whole_whatever_the_reads_were(
    payloads: list[str], newline: str, data: st.DataObject
) -> None:
    events = [_event(payload, newline) for payload in payloads]
    stream = b"".join(events)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=10)))
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert _split([piece for piece in pieces if piece]) == events


def test_several_events_in_one_read_come_apart() -> None:
    events = [_event("a"), b": note\n\n", _event("b")]
    assert _split([b"".join(events)]) == events


def test_one_newline_pair_split_over_reads_is_not_a_blank_line() -> None:
    assert _split([b"data: a\r", b"\ndata: b\r\n", b"\r\n"]) == [b"data: a\r\ndata: b\r\n\r\n"]


def test_a_stream_that_ends_within_an_event_is_incomplete() -> None:
    with pytest.raises(UpstreamIncompleteError):
        _split([_event("a"), b'data: {"id":'])


def test_an_event_without_end_is_refused() -> None:
    splitter = EventSplitter("w", 100)
    with pytest.raises(UpstreamProtocolError):
        list(splitter.feed(b"data: " + b"x" * 200))


@pytest.mark.parametrize(
    ("event", "data"),
    [
        (b"data: x\n\n", b"x"),
        (b"data:x\n\n", b"x"),
        (b"data: x\r\n\r\n", b"x"),
        (b"data: x\r\r", b"x"),
        (b"data: a\ndata: b\n\n", b"a\nb"),
        (b"event: e\ndata: x\nid: 1\n\n", b"x"),
        (b"data\n\n", b""),
        (b": comment\n\n", None),
        (b"event: e\n\n", None),
        (b"\n\n", None),
    ],
)
def test_data_is_read_as_the_format_says(event: bytes, data: bytes | None) -> None:
    assert event_data(event) == data


def _judge(events: list[bytes], *, hide_usage: bool = False) -> tuple[StreamJudge, list[bytes]]:
    judge = StreamJudge(hide_usage=hide_usage)
    return judge, [event for event in events if not judge.see(event).hidden]


_DELTA = _chunk(choices=[{"index": 0, "delta": {"content": "x"}, "finish_reason": None}])
_USAGE = _chunk(
    choices=[],
    usage={
        "prompt_tokens": 7,
        "completion_tokens": 2,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 0},
    },
)
_DONE = b"data: [DONE]\n\n"


def test_usage_that_the_client_did_not_ask_for_is_hidden_but_read() -> None:
    judge, passed = _judge([_DELTA, _USAGE, _DONE], hide_usage=True)
    assert passed == [_DELTA, _DONE]
    assert judge.usage is not None
    assert (judge.usage.prompt_tokens, judge.usage.cached_tokens) == (7, 0)
    assert judge.is_whole


def test_usage_that_the_client_asked_for_passes() -> None:
    judge, passed = _judge([_DELTA, _USAGE, _DONE])
    assert passed == [_DELTA, _USAGE, _DONE]
    assert judge.is_whole


def test_a_chunk_with_choices_and_usage_is_never_hidden() -> None:
    both = _chunk(choices=[{"index": 0, "delta": {}}], usage={"prompt_tokens": 1})
    _, passed = _judge([both], hide_usage=True)
    assert passed == [both]


@pytest.mark.parametrize("events", [[], [_DONE], [_USAGE, _DONE], [_DELTA], [b": only\n\n", _DONE]])
def test_a_stream_without_choices_or_without_done_is_not_whole(events: list[bytes]) -> None:
    assert not _judge(events, hide_usage=True)[0].is_whole


def test_an_error_event_is_seen_and_passes() -> None:
    error = _chunk(error={"message": "m", "type": "t", "param": None, "code": 500})
    judge, passed = _judge([_DELTA, error, _DONE])
    assert judge.saw_error
    assert passed == [_DELTA, error, _DONE]


def test_a_null_error_is_none() -> None:
    judge, _ = _judge([_chunk(choices=[{"index": 0}], error=None), _DONE])
    assert not judge.saw_error


def test_an_unknown_payload_passes() -> None:
    judge, passed = _judge([_event("not json"), _event("[1,2]"), _DONE], hide_usage=True)
    assert len(passed) == 3
    assert judge.is_whole


def test_missing_cached_tokens_are_unknown_not_zero() -> None:
    usage = usage_of(b'{"usage":{"prompt_tokens":3,"prompt_tokens_details":null}}')
    assert usage is not None
    assert usage.cached_tokens is None


def test_usage_of_something_else_is_none() -> None:
    assert usage_of(b"<html>") is None
