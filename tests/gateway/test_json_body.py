from __future__ import annotations

import json
import time
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_router.errors import InvalidRequestError
from gateway.json_body import JsonBody

_scalars = st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.text(max_size=20)
_values = st.recursive(
    _scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
_names = st.text(max_size=8)
_objects = st.dictionaries(_names, _values, max_size=6)
_space = st.sampled_from(["", " ", "\n", "\t ", "\r\n"])


@st.composite
def _bodies(draw: st.DrawFn) -> tuple[dict[str, Any], bytes]:
    """An object and one of its spellings, with odd white space and escapes."""
    fields = draw(_objects)
    ascii_only = draw(st.booleans())
    members = [
        f"{draw(_space)}{json.dumps(name, ensure_ascii=ascii_only)}{draw(_space)}:{draw(_space)}"
        f"{json.dumps(value, ensure_ascii=ascii_only)}{draw(_space)}"
        for name, value in fields.items()
    ]
    text = draw(_space) + "{" + (",".join(members) or draw(_space)) + "}" + draw(_space)
    return fields, text.encode("utf-8", "surrogatepass")


def _is_encodable(fields: dict[str, Any]) -> bool:
    try:
        json.dumps(fields, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


@given(_bodies())
def test_fields_are_what_json_says(body: tuple[dict[str, Any], bytes]) -> None:
    fields, raw = body
    if _is_encodable(fields):
        assert JsonBody(raw).fields == fields


@given(_bodies(), st.dictionaries(_names, st.none() | _scalars, max_size=4), st.data())
def test_splice_changes_the_named_members_and_no_other_byte(
    body: tuple[dict[str, Any], bytes], extra: dict[str, Any], data: st.DataObject
) -> None:
    fields, raw = body
    if not (_is_encodable(fields) and _is_encodable(extra)):
        return
    changes: dict[str, bytes | None] = {
        name: json.dumps(value).encode() for name, value in extra.items()
    }
    for name in data.draw(st.lists(st.sampled_from(sorted(fields)), unique=True)) if fields else []:
        changes[name] = None

    spliced = JsonBody(raw).splice(changes)

    expected = dict(fields)
    for name, value in changes.items():
        if value is None:
            expected.pop(name, None)
        else:
            expected[name] = json.loads(value)
    assert JsonBody(spliced).fields == expected
    for name, value in fields.items():
        if name not in changes:
            spellings = (json.dumps(value), json.dumps(value, ensure_ascii=False))
            assert any(spelling.encode() in spliced for spelling in spellings)


def test_splice_without_a_change_is_the_same_bytes() -> None:
    raw = b' {"a" : 1.50,\n "b":[ 1,2 ] }\n'
    assert JsonBody(raw).splice({}) == raw


def test_a_replaced_value_leaves_its_neighbours_white_space() -> None:
    raw = b'{ "model" : "x" , "n":1e0 }'
    assert JsonBody(raw).splice({"model": b'"yy"'}) == b'{ "model" : "yy" , "n":1e0 }'


@pytest.mark.parametrize(
    "raw",
    [
        b'{"a":1,"a":2}',
        b'{"a":1,"b":2,"a":3}',
        b'{"b":1,"a":2,"a":3}',
        b'{"a":1,"\\u0061":2}',
        b'{"a":{"x":1},"c":"}","a":{"x":1}}',
        b'{"a":1,"a":1,"a":1}',
    ],
)
def test_a_repeated_top_level_key_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="twice"):
        JsonBody(raw)


def test_a_key_repeated_further_down_is_the_engines_business() -> None:
    assert JsonBody(b'{"a":{"x":1,"x":2}}').raw == b'{"a":{"x":1,"x":2}}'


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"nonsense",
        b"[1]",
        b'"text"',
        b"null",
        b'{"a":1}}',
        b'{"a":NaN}',
        b'{"a":01}',
        b'{"a":"\xff"}',
        b'{"a":tru}',
        b'{"a":1,}',
        b'{"a":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    ],
)
def test_what_is_not_an_object_in_json_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        JsonBody(raw)


@pytest.mark.parametrize("key", [b"k" * 20_000_000, rb"\n" * 10_000_000])
def test_a_key_of_megabytes_costs_no_more_memory_than_a_few_of_it(key: bytes) -> None:
    raw = b'{"' + key + b'":1}'
    tracemalloc.start()
    began_s = time.process_time()
    JsonBody(raw)
    # With a way back for every byte it was 100 times the key, and 10 s.
    assert time.process_time() - began_s < 5
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 10 * len(raw)


def test_thousands_of_top_level_keys_are_refused() -> None:
    members = b",".join(b'"k%d":1' % i for i in range(1025))
    with pytest.raises(InvalidRequestError, match="more than 1024 top-level keys"):
        JsonBody(b"{" + members + b"}")
