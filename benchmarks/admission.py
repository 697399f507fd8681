"""What admission to a full tier is worth: `python -m benchmarks.admission TRACE`.

The trace of `benchmarks.eviction`, alone and with prompts between its own that are never repeated,
through the cache server's eviction policy: taking everything, taking only what was asked for
before, and as the cache server decides. Hits are counted on the trace's own prompts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

from benchmarks.eviction import read_prompts
from benchmarks.eviction_baselines import leading_run
from benchmarks.results import write_result
from engine_workers.blocks.block_name import BlockName
from engine_workers.blocks.namespace import Fingerprint
from engine_workers.cache_server.admission import Admission, Offer, Room, Verdict
from engine_workers.cache_server.admission_trial import REPEATED, AdmissionTrial
from engine_workers.cache_server.eviction import S3Fifo
from engine_workers.cache_server.sightings import Sightings, keys_of
from engine_workers.cache_server.write_budget import WriteBudget

_CAPACITIES = (3_000, 10_000, 30_000)
_SCANS = (0, 2)
"""Never-repeated prompts between two of the trace, each as long as the one before it."""
_SCANNED = 1 << 40
"""Block ids from here on are not the trace's."""
_NAMESPACE = Fingerprint(bytes(16))

Prompts = Sequence[Sequence[int]]


class Admitting(StrEnum):
    """What a full tier takes in."""

    EVERYTHING = "everything"
    REPEATED = "only_repeated"
    JUDGED = "radixgate"


def with_scan(prompts: Prompts, num_scanned: int) -> Iterator[Sequence[int]]:
    """The prompts, each followed by some that never come again."""
    block = _SCANNED
    for prompt in prompts:
        yield prompt
        for _ in range(num_scanned):
            yield range(block, block + len(prompt))
            block += len(prompt)


def replay(
    prompts: Prompts, capacity: int, num_scanned: int, admitting: Admitting
) -> tuple[int, int]:
    """Return the trace's hits, and the number of blocks written."""
    policy = S3Fifo[int](capacity)
    sightings = Sightings()
    budget = WriteBudget(1e18, 1.0, lambda: 0.0)
    admission = Admission(sightings, AdmissionTrial(capacity), budget)
    num_hits = num_writes = 0
    for prompt in with_scan(prompts, num_scanned):
        if prompt[0] < _SCANNED:
            num_hits += leading_run(prompt, policy)
        names = [BlockName(_NAMESPACE, block.to_bytes(32, "little")) for block in prompt]
        keys = keys_of(names)
        counts = sightings.see(keys)
        admission.look_up(keys, counts, 1)
        parent: int | None = None
        for depth, block in enumerate(prompt):
            if block in policy:
                policy.touch(block)
            else:
                free = capacity - policy.used_bytes
                if admitting is Admitting.JUDGED:
                    above = names[depth - 1] if depth else None
                    verdict = admission.decide(
                        Offer(names[depth], above, 1, 1.0), Room(free, 0, 1 << 40)
                    )
                    is_admitted = verdict is Verdict.ADMITTED
                else:
                    repeats = admitting is Admitting.EVERYTHING or counts[depth] >= REPEATED
                    is_admitted = repeats or free > 0
                if not is_admitted:
                    break
                policy.insert(block, 1, parent)
                num_writes += 1
            parent = block
    return num_hits, num_writes


def measure(prompts: Prompts) -> list[dict[str, Any]]:
    """One row for each scan, capacity and way of admitting."""
    num_blocks = sum(len(prompt) for prompt in prompts)
    rows: list[dict[str, Any]] = []
    for num_scanned in _SCANS:
        for capacity in _CAPACITIES:
            for admitting in Admitting:
                num_hits, num_writes = replay(prompts, capacity, num_scanned, admitting)
                row = {
                    "scanned_prompts_between": num_scanned,
                    "capacity_in_blocks": capacity,
                    "admits": admitting.value,
                    "hit_rate": num_hits / num_blocks,
                    "blocks_written": num_writes,
                }
                print(*(f"{key}={value}" for key, value in row.items()), flush=True)
                rows.append(row)
    return rows


def main() -> int:
    """Replay, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.admission", description=__doc__)
    parser.add_argument("trace", type=Path, help="file with one JSON object a line")
    options = parser.parse_args()
    rows = measure(read_prompts(options.trace))
    file = write_result("admission", {"trace": options.trace.name, "rows": rows})
    print(f"written: {file.relative_to(file.parents[2])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
