from __future__ import annotations

import inspect

import pytest

from cache_router import errors
from cache_router.errors import OverloadedError, RadixgateError, UpstreamUnreachableError
from gateway.error_responses import SHAPES, ErrorResponse, error_response, is_openai_shape

ABSTRACT = {RadixgateError}


def test_every_error_of_ours_has_a_status() -> None:
    all_errors = {
        kind
        for _, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, RadixgateError)
    }
    assert all_errors - ABSTRACT == set(SHAPES)


def test_a_worker_is_not_named_to_callers() -> None:
    response = error_response(UpstreamUnreachableError("http://10.0.0.3:8000", "refused"))
    assert "10.0.0.3" not in response.message
    assert response.status == 502


def test_overload_says_when_to_come_back() -> None:
    assert error_response(OverloadedError(3, 5)).headers == ((b"retry-after", b"5"),)


def test_a_message_is_bounded() -> None:
    response = ErrorResponse(400, "x" * 1_000_000, "t", "c")
    assert len(response.body) < 4096
    assert is_openai_shape(response.body)


@pytest.mark.parametrize(
    "body", [b"", b"<html>", b"[]", b'{"error":"text"}', b'{"detail":"x"}', b'{"error":{}}']
)
def test_other_shapes_are_told_apart(body: bytes) -> None:
    assert not is_openai_shape(body)
