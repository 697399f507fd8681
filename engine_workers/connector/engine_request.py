"""What the connector reads of an engine's request, and nothing else of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class EngineRequest(Protocol):
    """The engine's own object; it changes while the request runs."""

    @property
    def request_id(self) -> str:
        """Unique among the engine's requests."""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens that came with the request."""

    @property
    def num_tokens(self) -> int:
        """Prompt and what was generated so far."""

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV is in the engine before the step that is being planned."""

    @property
    def all_token_ids(self) -> Sequence[int]:
        """Prompt and generated token ids, shape (num_tokens,)."""

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """The engine's chained hashes of all full blocks of those tokens, parents first."""


class EngineView(Protocol):
    """What only the engine knows of a request. Nothing here changes anything."""

    def num_local_blocks(self, request: EngineRequest) -> int:
        """Leading blocks of the request that the engine's own cache holds now."""

    def extra_keys(self, request: EngineRequest, number: int) -> tuple[object, ...]:
        """What is in the hash of the request's block of that number beside tokens and parent."""


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request of the step that is being planned."""

    request_id: str
    num_tokens: int
    """Tokens computed in this step that are known to be right: drafts are not counted."""
    block_ids: Sequence[int]
    """The engine's blocks of this request, in order."""
