"""What the gateway adds to a request of about 1,000 tokens, direct against through, in pairs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from random import Random
from typing import Any

import httpx2

from benchmarks.conversations import Recipe, make_workload
from benchmarks.measured_stream import measure_chat

_NUM_WORDS = 900


async def run_pairs(
    model: str, engines: Sequence[str], gateway_url: str, num_pairs: int
) -> dict[str, Any]:
    """Send each request to the engine that holds its prefix, both ways, in random order.

    The prefix is warm, so that the engine's own time is short and steady; the question at its
    end is new each time, as in a conversation.
    """
    rng = Random(11)
    document = make_workload(Recipe(num_conversations=1, num_history_words=_NUM_WORDS, seed=3))
    prefix = document.conversations[0].questions[0]
    ttft_added: list[float] = []
    total_added: list[float] = []
    direct_total: list[float] = []
    prompt_tokens = 0
    async with httpx2.AsyncClient(timeout=600) as client:

        def messages(number: int) -> list[dict[str, str]]:
            return [
                {"role": "user", "content": prefix},
                {"role": "assistant", "content": "It lists things."},
                {"role": "user", "content": f"Number {number}: which things?"},
            ]

        warm = await measure_chat(client, gateway_url, model, messages(0), 1)
        holder = warm.headers["x-radixgate-worker"]
        assert holder in engines
        for number in range(1, num_pairs + 1):
            ways = [("direct", holder), ("through", gateway_url)]
            rng.shuffle(ways)
            measured = {
                name: await measure_chat(client, url, model, messages(number), 1)
                for name, url in ways
            }
            assert measured["through"].headers["x-radixgate-worker"] == holder
            ttft_added.append(measured["through"].ttft_s - measured["direct"].ttft_s)
            total_added.append(measured["through"].total_s - measured["direct"].total_s)
            direct_total.append(measured["direct"].total_s)
            prompt_tokens = measured["through"].prompt_tokens
    return {
        "num_pairs": num_pairs,
        "prompt_tokens": prompt_tokens,
        "direct_median_ms": statistics.median(direct_total) * 1000,
        "added_ttft_median_ms": statistics.median(ttft_added) * 1000,
        "added_total_median_ms": statistics.median(total_added) * 1000,
    }
