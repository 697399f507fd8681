"""Multi-turn conversations through the gateway, against round-robin over the same engines.

Each engine's KV cache holds about 60 % of all histories, so two engines can hold everything if
every conversation stays where it is, and neither can if they do not.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx2
import numpy as np

from benchmarks.conversations import Recipe, Workload, make_workload
from benchmarks.measured_stream import Measured, measure_chat
from benchmarks.testbed import BLOCK_SIZE, forget_prefixes
from cache_router.hashing import hash_blocks
from cache_router.types import BlockHash, PromptRoot

CONCURRENCY = 2
KV_SHARE = 0.6

Send = Callable[[Sequence[dict[str, str]]], Awaitable[Measured]]


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn as it went."""

    number: int
    """Within its conversation, from 0."""
    measured: Measured
    ideal_cached_tokens: int
    """What an endless cache shared by all engines would have held of its prompt."""


def kv_blocks_per_engine(recipe: Recipe, tokens_per_word: float) -> int:
    """How many blocks hold `KV_SHARE` of all histories."""
    words = recipe.num_history_words + (recipe.num_turns - 1) * recipe.num_question_words
    answers = recipe.num_turns * (recipe.max_tokens + 20)
    tokens = recipe.num_conversations * (words * tokens_per_word + answers)
    return round(KV_SHARE * tokens / BLOCK_SIZE)


async def replay(workload: Workload, send: Send) -> list[Turn]:
    """Send every turn in the workload's order, `CONCURRENCY` at a time, each after its own last."""
    slots = asyncio.Semaphore(CONCURRENCY)
    histories: list[list[dict[str, str]]] = [[] for _ in workload.conversations]
    locks = [asyncio.Lock() for _ in workload.conversations]
    turns_done = [0] * len(workload.conversations)
    computed: set[BlockHash] = set()
    turns: list[Turn] = []

    async def take_turn(number: int) -> None:
        async with locks[number]:
            history = histories[number]
            question = workload.conversations[number].questions[turns_done[number]]
            history.append({"role": "user", "content": question})
            measured = await send(history)
            history.append({"role": "assistant", "content": measured.text})
            turns.append(Turn(turns_done[number], measured, _ideal(measured, computed)))
            turns_done[number] += 1

    async def in_slot(number: int) -> None:
        try:
            await take_turn(number)
        finally:
            slots.release()

    async with asyncio.TaskGroup() as tasks:
        for number in workload.order:
            await slots.acquire()
            tasks.create_task(in_slot(number))
    return turns


def _ideal(measured: Measured, computed: set[BlockHash]) -> int:
    """Count what was computed before anywhere, and enter what now is."""
    root = PromptRoot("m")
    prompt = np.array(measured.prompt_token_ids, dtype=np.uint32)
    held = 0
    for block in hash_blocks(prompt, BLOCK_SIZE, root):
        if block not in computed:
            break
        held += 1
    # The last sampled token was never put through the model.
    sequence = np.array(
        [*measured.prompt_token_ids, *measured.output_token_ids[:-1]], dtype=np.uint32
    )
    computed.update(hash_blocks(sequence, BLOCK_SIZE, root))
    return min(held, (len(prompt) - 1) // BLOCK_SIZE) * BLOCK_SIZE


def summarize(turns: Sequence[Turn]) -> dict[str, float]:
    """Condense the turns from the second on; the first of a conversation is cold for everyone."""
    later = [turn for turn in turns if turn.number > 0]
    prompt_tokens = sum(turn.measured.prompt_tokens for turn in later)
    ttfts = [turn.measured.ttft_s for turn in later]
    return {
        "num_turns": len(later),
        "mean_ttft_s": statistics.fmean(ttfts),
        "median_ttft_s": statistics.median(ttfts),
        "p90_ttft_s": float(np.percentile(ttfts, 90)),
        "cached_token_share": sum(t.measured.cached_tokens for t in later) / prompt_tokens,
        "ideal_cached_token_share": sum(t.ideal_cached_tokens for t in later) / prompt_tokens,
    }


def ideal_mean_ttft_s(turns: Sequence[Turn]) -> float:
    """Mean TTFT of the later turns, of either policy, that had everything cached that could be."""
    return statistics.fmean(
        turn.measured.ttft_s
        for turn in turns
        if turn.number > 0 and turn.measured.cached_tokens >= turn.ideal_cached_tokens
    )


async def run_rounds(
    model: str, engines: Sequence[str], gateway_url: str, recipe: Recipe, num_rounds: int
) -> dict[str, Any]:
    """Replay the same workload by both policies, in alternating order, and compare."""
    workload = make_workload(recipe)
    rounds: list[dict[str, dict[str, float]]] = []
    all_turns: list[Turn] = []
    async with httpx2.AsyncClient(timeout=600) as client:
        next_engine = 0

        async def by_gateway(messages: Sequence[dict[str, str]]) -> Measured:
            return await measure_chat(client, gateway_url, model, messages, recipe.max_tokens)

        async def by_round_robin(messages: Sequence[dict[str, str]]) -> Measured:
            nonlocal next_engine
            url = engines[next_engine % len(engines)]
            next_engine += 1
            return await measure_chat(client, url, model, messages, recipe.max_tokens)

        policies = {"radixgate": by_gateway, "round_robin": by_round_robin}
        for number in range(num_rounds):
            names = list(policies) if number % 2 == 0 else list(policies)[::-1]
            summaries: dict[str, dict[str, float]] = {}
            for name in names:
                await forget_prefixes(client, engines)
                next_engine = 0
                turns = await replay(workload, policies[name])
                all_turns += turns
                summaries[name] = summary = summarize(turns)
                print(
                    f"round {number + 1}, {name:11}: mean TTFT {summary['mean_ttft_s']:.3f} s, "
                    f"cached {summary['cached_token_share']:.3f} of prompt tokens",
                    flush=True,
                )
            rounds.append(summaries)
    return {"rounds": rounds, **_compare(rounds), "ideal_mean_ttft_s": ideal_mean_ttft_s(all_turns)}


def _compare(rounds: Sequence[dict[str, dict[str, float]]]) -> dict[str, float]:
    def median(pick: Callable[[dict[str, dict[str, float]]], float]) -> float:
        return statistics.median(pick(summaries) for summaries in rounds)

    return {
        "radixgate_mean_ttft_s": median(lambda r: r["radixgate"]["mean_ttft_s"]),
        "round_robin_mean_ttft_s": median(lambda r: r["round_robin"]["mean_ttft_s"]),
        "ttft_ratio": median(
            lambda r: r["radixgate"]["mean_ttft_s"] / r["round_robin"]["mean_ttft_s"]
        ),
        "cached_token_share": median(lambda r: r["radixgate"]["cached_token_share"]),
        "round_robin_cached_token_share": median(lambda r: r["round_robin"]["cached_token_share"]),
        "ideal_cached_token_share": median(lambda r: r["radixgate"]["ideal_cached_token_share"]),
        "share_of_ideal": median(
            lambda r: (
                r["radixgate"]["cached_token_share"] / r["radixgate"]["ideal_cached_token_share"]
            )
        ),
    }
