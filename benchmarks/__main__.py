"""`make bench`: every row, engines started once; prints the figures and writes them as JSON."""

from __future__ import annotations

import argparse
import asyncio
import sys
from dataclasses import asdict

from benchmarks.conversations import Recipe
from benchmarks.gateway_overhead import run_pairs
from benchmarks.multi_turn import CONCURRENCY, KV_SHARE, kv_blocks_per_engine, run_rounds
from benchmarks.results import write_result
from benchmarks.testbed import running_engines, running_gateway

_NUM_ENGINES = 2
# Of SmolLM2's tokenizer and the words of the conversations; the run reports what it really was.
_TOKENS_PER_WORD = 1.08


async def run(num_rounds: int, num_pairs: int) -> None:
    """Start everything, measure, print, write."""
    recipe = Recipe()
    kv_blocks = kv_blocks_per_engine(recipe, _TOKENS_PER_WORD)
    async with (
        running_engines(_NUM_ENGINES, kv_blocks) as (model, engines),
        running_gateway(engines) as gateway,
    ):
        overhead = await run_pairs(model, engines, gateway.url, num_pairs)
        overhead |= {
            "gateway_live_after_s": gateway.live_after_s,
            "gateway_ready_after_s": gateway.ready_after_s,
        }
        turns = await run_rounds(model, engines, gateway.url, recipe, num_rounds)
        overhead["gateway_resident_mib"] = gateway.resident_bytes / 1024**2
    turns |= {
        "recipe": asdict(recipe),
        "engines": _NUM_ENGINES,
        "kv_blocks_per_engine": kv_blocks,
        "kv_share_of_histories": KV_SHARE,
        "concurrency": CONCURRENCY,
    }
    print()
    print(
        f"turns from the second on      radixgate {turns['radixgate_mean_ttft_s']:.3f} s mean TTFT"
    )
    print(f"                            round-robin {turns['round_robin_mean_ttft_s']:.3f} s")
    print(f"                                  ratio {turns['ttft_ratio']:.3f}")
    print(f"                         full hits only {turns['ideal_mean_ttft_s']:.3f} s")
    print(f"cached share of prompt tokens radixgate {turns['cached_token_share']:.3f}")
    print(f"                            round-robin {turns['round_robin_cached_token_share']:.3f}")
    print(f"                           ideal router {turns['ideal_cached_token_share']:.3f}")
    print(f"                     radixgate of ideal {turns['share_of_ideal']:.3f}")
    print(
        f"gateway adds {overhead['added_total_median_ms']:.2f} ms to a request of "
        f"{overhead['prompt_tokens']} tokens (median of {num_pairs} pairs; TTFT "
        f"{overhead['added_ttft_median_ms']:.2f} ms; direct {overhead['direct_median_ms']:.1f} ms)"
    )
    print(
        f"gateway live after {overhead['gateway_live_after_s']:.2f} s, ready after "
        f"{overhead['gateway_ready_after_s']:.2f} s, {overhead['gateway_resident_mib']:.0f} MiB"
    )
    for file in (write_result("multi_turn", turns), write_result("gateway_overhead", overhead)):
        print(f"written: {file.relative_to(file.parents[2])}")


def main() -> int:
    """Read the options and run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="times each policy replays all turns")
    parser.add_argument("--pairs", type=int, default=100, help="pairs of direct and through")
    options = parser.parse_args()
    asyncio.run(run(options.rounds, options.pairs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
