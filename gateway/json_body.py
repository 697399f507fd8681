"""A request body whose top-level values can be read, and replaced without touching another byte."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from cache_router.errors import InvalidRequestError

_DECODER = msgspec.json.Decoder(dict[str, msgspec.Raw])
# What stands before a value when no member is hidden there: an opening brace or a comma, a key.
# Possessive, or the matcher would remember a way back for every byte of a key of megabytes.
_LEAD = re.compile(
    rb'[ \t\r\n]*+[{,][ \t\r\n]*+"(?:[^"\\]++|\\.)*+"[ \t\r\n]*+:[ \t\r\n]*+', re.DOTALL
)
# No API has a tenth of it; each member costs microseconds of everybody's event loop.
_MAX_MEMBERS = 1024


@dataclass(frozen=True, slots=True)
class _Member:
    """Offsets in the body: the key's lead starts at `start`, the value is `value:end`."""

    start: int
    value: int
    end: int


class JsonBody:
    """A JSON object as bytes, parsed once, forwarded as it came."""

    __slots__ = ("_members", "_raw_values", "fields", "raw")

    def __init__(self, raw: bytes) -> None:
        """Parse `raw`.

        Raises:
            InvalidRequestError: Not a JSON object, nested too deeply, too many top-level keys, or
                one of them twice.
        """
        self.raw = raw
        try:
            self._raw_values = _DECODER.decode(raw)
            if len(self._raw_values) > _MAX_MEMBERS:
                raise InvalidRequestError(
                    f"The request body has more than {_MAX_MEMBERS} top-level keys."
                )
            self.fields: dict[str, Any] = {
                name: msgspec.json.decode(value) for name, value in self._raw_values.items()
            }
        except msgspec.ValidationError as error:
            raise InvalidRequestError("The request body must be a JSON object.") from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidRequestError(f"The request body is not valid JSON: {error}.") from error
        except RecursionError as error:
            raise InvalidRequestError("The request body is nested too deeply.") from error
        self._members = self._locate()

    def _locate(self) -> dict[str, _Member]:
        """Find each value's place, and refuse a key that stands there twice."""
        # `msgspec.Raw` is a view into `raw`, so a value's offset is a difference of addresses.
        base = _address(self.raw)
        members: dict[str, _Member] = {}
        cursor = 0
        placed = sorted(
            (_address(value) - base, len(memoryview(value)), name)
            for name, value in self._raw_values.items()
        )
        for offset, length, name in placed:
            # A repeated key's first value was dropped by the parser and lies in this gap.
            if _LEAD.fullmatch(self.raw, cursor, offset) is None:
                raise InvalidRequestError(
                    f"A top-level key stands twice in the request body, before or at {name[:64]!r}."
                )
            members[name] = _Member(cursor, offset, offset + length)
            cursor = offset + length
        if members and self.raw[cursor:].strip(b" \t\r\n") != b"}":
            raise InvalidRequestError("A top-level key stands twice in the request body.")
        return members

    def splice(self, changes: Mapping[str, bytes | None]) -> bytes:
        """Return the body with top-level values changed, every other byte as it came.

        Args:
            changes: For each name its new value as JSON, or None to take the member out. A name
                that the body lacks is added at its end; taking out what is not there is no change.
        """
        edits: list[tuple[int, int, bytes]] = []
        added: list[bytes] = []
        num_left = len(self._members)
        for name, value in changes.items():
            member = self._members.get(name)
            if member is None:
                if value is not None:
                    added.append(msgspec.json.encode(name) + b":" + value)
            elif value is None:
                num_left -= 1
                edits.append((member.start, member.end, b""))
            else:
                edits.append((member.value, member.end, value))
        pieces: list[bytes] = []
        cursor = 0
        for start, end, value in sorted(edits):
            pieces += (self.raw[cursor:start], value)
            cursor = end
        closing = self.raw.rindex(b"}")
        pieces.append(self.raw[cursor:closing])
        if added:
            pieces.append((b"," if num_left else b"") + b",".join(added))
        pieces.append(self.raw[closing:])
        spliced = b"".join(pieces)
        # The first member's lead is the opening brace: if it went, the next one's comma stands in.
        first = min(self._members.values(), key=lambda member: member.start, default=None)
        if first is not None and any(edit[:2] == (first.start, first.end) for edit in edits):
            spliced = b"{" + spliced.lstrip(b" \t\r\n").removeprefix(b",")
        return spliced


def _address(buffer: bytes | msgspec.Raw) -> int:
    """Where a buffer's first byte lies in memory."""
    address: int = np.frombuffer(buffer, dtype=np.uint8).__array_interface__["data"][0]
    return address
