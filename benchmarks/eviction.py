"""Hit rates of eviction policies: `python -m benchmarks.eviction TRACE`.

TRACE has one JSON object a line with `hash_ids`, one id for each block of a prompt, equal ids for
equal prefixes, as in the traces that Mooncake published. A hit is a block of the leading run that
is there when the prompt comes; what lies behind a gap is of no use to an engine.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import Any, Protocol

from benchmarks.eviction_baselines import (
    Fifo,
    Lru,
    PublishedS3Fifo,
    clairvoyant_hits,
    leading_run,
)
from benchmarks.results import write_result
from engine_workers.cache_server.eviction import S3Fifo

_CAPACITIES = (1_000, 3_000, 10_000, 20_000, 30_000, 50_000, 100_000)

Prompts = Sequence[Sequence[int]]


class Policy(Container[int], Protocol):
    """What a replay needs of a policy."""

    def touch(self, name: int) -> None:
        """Note a use."""

    def insert(self, name: int, parent: int | None) -> None:
        """Take a block in that is not there."""


class Ours:
    """The cache server's policy, with blocks of size 1."""

    def __init__(self, capacity: int) -> None:
        self._policy = S3Fifo[int](capacity)

    def __contains__(self, name: object) -> bool:
        """Whether the block is here."""
        return name in self._policy

    def touch(self, name: int) -> None:
        """Note a use."""
        self._policy.touch(name)

    def insert(self, name: int, parent: int | None) -> None:
        """Take a block in."""
        self._policy.insert(name, 1, parent)


class OursWithoutParents(Ours):
    """The same, but nothing keeps a parent while its child stays."""

    def insert(self, name: int, parent: int | None) -> None:
        """Take a block in."""
        self._policy.insert(name, 1)


POLICIES: dict[str, Callable[[int], Policy]] = {
    "fifo": Fifo,
    "lru": Lru,
    "s3_fifo_published": PublishedS3Fifo,
    "radixgate": Ours,
    "radixgate_without_parents": OursWithoutParents,
}


def replay(prompts: Prompts, policy: Policy) -> int:
    """Look every prompt up, use what is there, save the rest; return the number of hits."""
    num_hits = 0
    for prompt in prompts:
        num_hits += leading_run(prompt, policy)
        for name in reversed(prompt):
            if name in policy:
                policy.touch(name)
        parent: int | None = None
        for name in prompt:
            if name not in policy:
                policy.insert(name, parent)
            parent = name
    return num_hits


def measure(prompts: Prompts) -> dict[str, Any]:
    """Hit rate of each policy at each capacity, and what a call costs."""
    num_blocks = sum(len(prompt) for prompt in prompts)
    hit_rates: dict[str, dict[str, float]] = {name: {} for name in (*POLICIES, "clairvoyant")}
    seconds = dict.fromkeys(POLICIES, 0.0)
    for capacity in _CAPACITIES:
        for name, policy in POLICIES.items():
            start = time.perf_counter()
            hit_rates[name][str(capacity)] = replay(prompts, policy(capacity)) / num_blocks
            seconds[name] += time.perf_counter() - start
        best = clairvoyant_hits(prompts, capacity) / num_blocks
        hit_rates["clairvoyant"][str(capacity)] = best
    return {
        "requests": len(prompts),
        "blocks": num_blocks,
        "unique_blocks": len({name for prompt in prompts for name in prompt}),
        "hit_rate_by_capacity_in_blocks": hit_rates,
        "microseconds_per_block": {
            name: 1e6 * spent / num_blocks / len(_CAPACITIES) for name, spent in seconds.items()
        },
    }


def read_prompts(trace: Path) -> list[list[int]]:
    """The `hash_ids` of each line."""
    with trace.open() as lines:
        return [json.loads(line)["hash_ids"] for line in lines]


def main() -> int:
    """Replay, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.eviction", description=__doc__)
    parser.add_argument("trace", type=Path, help="file with one JSON object a line")
    options = parser.parse_args()
    result = measure(read_prompts(options.trace))
    print("hit rate at blocks".ljust(28), *(f"{capacity:>8}" for capacity in _CAPACITIES))
    for name, rates in result["hit_rate_by_capacity_in_blocks"].items():
        print(name.ljust(28), *(f"{100 * rate:7.2f}%" for rate in rates.values()))
    file = write_result("eviction", {"trace": options.trace.name, **result})
    print(f"written: {file.relative_to(file.parents[2])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
