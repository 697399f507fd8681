from __future__ import annotations

import random

from engine_workers.cache_server.admission_trial import AdmissionTrial
from engine_workers.cache_server.sightings import Sightings, keys_of
from tests.engine_workers.cache_server.block_names import name_of

BLOCK_BYTES = 1_000
CAPACITY_BLOCKS = 800


class Lookups:
    """Feeds a trial as a cache server does."""

    def __init__(self) -> None:
        self.trial = AdmissionTrial(CAPACITY_BLOCKS * BLOCK_BYTES)
        self._sightings = Sightings(counters_bits=18)

    def look_up(self, first_number: int, num_blocks: int) -> None:
        numbers = range(first_number, first_number + num_blocks)
        keys = keys_of([name_of(number) for number in numbers])
        self.trial.look_up(keys, self._sightings.see(keys), BLOCK_BYTES)


def test_new_content_is_refused_where_it_pushes_out_what_repeats() -> None:
    lookups, choice = Lookups(), random.Random(1)
    assert lookups.trial.takes_everything
    for step in range(2_000):
        lookups.look_up(1_000_000 + 20 * step, 20)
        lookups.look_up(20 * choice.randrange(45), 20)
    assert not lookups.trial.takes_everything


def test_new_content_is_taken_where_each_prompt_comes_back_once() -> None:
    lookups = Lookups()
    for step in range(2_000):
        lookups.look_up(20 * step, 20)
        if step >= 20:
            lookups.look_up(20 * (step - 20), 20)
    assert lookups.trial.takes_everything


def test_the_answer_follows_the_work() -> None:
    lookups, choice = Lookups(), random.Random(2)
    for step in range(2_000):
        lookups.look_up(1_000_000 + 20 * step, 20)
        lookups.look_up(20 * choice.randrange(45), 20)
    assert not lookups.trial.takes_everything
    for step in range(2_000):
        lookups.look_up(2_000_000 + 20 * step, 20)
        if step >= 20:
            lookups.look_up(2_000_000 + 20 * (step - 20), 20)
    assert lookups.trial.takes_everything
