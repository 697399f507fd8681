"""Lookups in flight and the leases that they brought, over all tensor-parallel ranks.

A lease is given back exactly once, however its request ends, unless its connection ended first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine_workers.cache_wire import FromEngine, Lookup, Release, Staged, Staging
from engine_workers.connector.channel import Channel, Connected, Lost
from engine_workers.connector.connector_settings import ConnectorSettings
from engine_workers.connector.engine_request import EngineRequest
from engine_workers.connector.lookup_state import LookupState, Phase

_MAX_UNANSWERED = 1024
_LATE_ANSWER_S = 1.0


@dataclass(slots=True)
class _Rank:
    channel: Channel
    is_connected: bool = False
    is_silent: bool = False
    """An answer did not come in time, and nothing has come since."""
    unanswered: dict[str, float] = field(default_factory=dict)
    """Request ids of lookups without an answer, and when they were sent."""


class Lookups:
    """Sends lookups to every rank's server and keeps what they answer. One thread only.

    Args:
        channels: Connections to the cache server, one for each tensor-parallel rank.
        settings: Deadlines.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        channels: Sequence[Channel],
        settings: ConnectorSettings,
        clock: Callable[[], float],
    ) -> None:
        self._ranks = [_Rank(channel) for channel in channels]
        self._settings = settings
        self._clock = clock
        self._open: dict[str, LookupState] = {}

    @property
    def is_connected(self) -> bool:
        """Whether every rank's server is there."""
        return all(rank.is_connected for rank in self._ranks)

    def get(self, request_id: str) -> LookupState | None:
        """The lookup of this request that waits for answers or holds leases, None if none does."""
        return self._open.get(request_id)

    def begin(self, request: EngineRequest, num_wanted: int, num_local_blocks: int) -> bool:
        """Ask for the request's first `num_wanted` blocks, unless nobody could answer.

        Returns:
            Whether an answer is worth waiting for.
        """
        if num_wanted <= num_local_blocks or not self._can_begin(request.request_id):
            return False
        message = Lookup(
            request_id=request.request_id,
            block_hashes=list(request.block_hashes[:num_wanted]),
            num_local_blocks=num_local_blocks,
            num_prompt_tokens=request.num_prompt_tokens,
        )
        now_s = self._clock()
        is_worth_waiting = True
        for rank in self._ranks:
            # A silent server is asked all the same: its answer is what ends the silence.
            is_worth_waiting = is_worth_waiting and not rank.is_silent
            if rank.channel.send(message):
                rank.unanswered[request.request_id] = now_s
            else:
                is_worth_waiting = False
        if is_worth_waiting:
            self._open[request.request_id] = LookupState(
                request_id=request.request_id,
                num_local_blocks=num_local_blocks,
                deadline_s=now_s + self._settings.lookup_deadline_s,
                answers=[None] * len(self._ranks),
            )
        return is_worth_waiting

    def settle(self, lookup: LookupState) -> bool:
        """Whether the lookup is decided. At its deadline it is, without what has not come."""
        if lookup.phase is not Phase.WAITING:
            return True
        if lookup.is_answered:
            lookup.phase = Phase.STAGED
            if lookup.num_blocks == 0:
                self.give_back(lookup)
            return True
        if self._clock() < lookup.deadline_s:
            return False
        for rank, answer in zip(self._ranks, lookup.answers, strict=True):
            rank.is_silent = rank.is_silent or answer is None
        self.give_back(lookup)
        return True

    def give_back(self, lookup: LookupState) -> None:
        """End the lookup and its leases; an answer that is still to come is given back then."""
        for rank, answer in zip(self._ranks, lookup.answers, strict=True):
            if answer is not None and answer.lease:
                rank.channel.send(Release([answer.lease]))
        lookup.phase = Phase.OVER
        self._open.pop(lookup.request_id, None)

    def report(self, message: FromEngine) -> None:
        """Tell the first rank's server something that is not about a lookup."""
        self._ranks[0].channel.send(message)

    def take_in(self) -> bool:
        """Take in what servers sent.

        Returns:
            Whether a server was lost, and with it all that was known of its content.
        """
        was_lost = False
        for number, rank in enumerate(self._ranks):
            for event in rank.channel.poll():
                match event:
                    case Connected():
                        rank.is_connected = True
                        rank.is_silent = False
                    case Lost():
                        was_lost = True
                        self._on_lost(number)
                    case Staging():
                        rank.is_silent = False
                        self._on_staging(event)
                    case Staged():
                        rank.is_silent = False
                        self._on_staged(number, event)
        return was_lost

    def awaits_answers(self) -> bool:
        """Whether answers may still come soon, whose leases nobody may need any more."""
        now_s = self._clock()
        return any(
            now_s - sent_s < _LATE_ANSWER_S
            for rank in self._ranks
            for sent_s in rank.unanswered.values()
        )

    def _can_begin(self, request_id: str) -> bool:
        oldest_s = self._clock() - self._settings.stage_deadline_s - _LATE_ANSWER_S
        for rank in self._ranks:
            if len(rank.unanswered) >= _MAX_UNANSWERED:
                # A server that answers everybody else has forgotten these.
                rank.unanswered = {
                    name: sent_s for name, sent_s in rank.unanswered.items() if sent_s > oldest_s
                }
            if not rank.is_connected or len(rank.unanswered) >= _MAX_UNANSWERED:
                return False
            # Two answers to one name could not be told apart.
            if request_id in rank.unanswered or request_id in self._open:
                return False
        return True

    def _on_lost(self, number: int) -> None:
        rank = self._ranks[number]
        rank.is_connected = False
        rank.unanswered.clear()
        for lookup in list(self._open.values()):
            # This rank's leases ended with the connection, and are not to be given back. A load
            # that runs goes on: its worker checks what it copied.
            lookup.answers[number] = None
            if lookup.phase is not Phase.LOADING:
                self.give_back(lookup)

    def _on_staging(self, event: Staging) -> None:
        lookup = self._open.get(event.request_id)
        if lookup is not None:
            wait_s = min(event.wait_s, self._settings.stage_deadline_s)
            lookup.deadline_s = max(lookup.deadline_s, self._clock() + wait_s)

    def _on_staged(self, number: int, event: Staged) -> None:
        rank = self._ranks[number]
        is_ours = rank.unanswered.pop(event.request_id, None) is not None
        lookup = self._open.get(event.request_id)
        if is_ours and lookup is not None and lookup.phase is Phase.WAITING:
            lookup.answers[number] = event
        elif event.lease:
            rank.channel.send(Release([event.lease]))
