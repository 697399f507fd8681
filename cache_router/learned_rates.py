"""Learns from measurements what computing and moving KV takes; immutable, a report makes a new one.

Least squares over what was measured, old measurements fading out, errors taken relative to what
was predicted: a short load that takes twice as long as predicted is as wrong as a long one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import sqrt

import numpy as np
from numpy.typing import NDArray

from cache_router.cost import PrefillRate, TransferRate, num_pairs

_Floats = NDArray[np.float64]

_KEPT_WEIGHT = 0.95
"""What a measurement still weighs when the next one comes: half after 13."""
_KEPT_WEIGHT_AFTER_CHANGE = 0.01
"""The same once two measurements in a row show that things have changed."""
_INERTIA = 0.02
"""How strongly a coefficient that the measurements do not determine stays where it is."""
_SURPRISE = 1.5
"""A measurement this many times what was predicted, or this part of it, is a surprise. One alone
counts no more than that: a machine that was suspended says nothing of the next load."""
_MAX_SURPRISE = 8.0
"""What a second surprise in the same direction counts at most."""


@dataclass(frozen=True, slots=True)
class _Fit:
    """Coefficients that make `features @ coefficients` seconds, all of them positive."""

    coefficients: tuple[float, ...]
    smallest: tuple[float, ...]
    """Below this a coefficient counts as nothing."""
    gram: tuple[tuple[float, ...], ...]
    """Faded sum of outer products of the features, each divided by what was predicted."""
    moment: tuple[float, ...]
    spread: float = 0.0
    last_surprise: int = 0
    """1 if the last measurement was surprisingly long, -1 if surprisingly short."""
    num_reports: int = 0

    @staticmethod
    def starting_at(coefficients: Sequence[float], smallest: Sequence[float]) -> _Fit:
        """Know nothing but a first guess."""
        size = len(coefficients)
        zeros = (0.0,) * size
        return _Fit(tuple(coefficients), tuple(smallest), (zeros,) * size, zeros)

    def learn(self, features: Sequence[float], seconds: float) -> _Fit:
        """Take one measurement in."""
        row = np.asarray(features, dtype=np.float64)
        before = np.asarray(self.coefficients)
        predicted = float(row @ before)
        ratio = seconds / predicted
        surprise = int(ratio > _SURPRISE) - int(ratio < 1 / _SURPRISE)
        has_changed = surprise != 0 and surprise == self.last_surprise
        limit = _MAX_SURPRISE if has_changed else _SURPRISE
        kept = _KEPT_WEIGHT_AFTER_CHANGE if has_changed else _KEPT_WEIGHT
        ratio = min(max(ratio, 1 / limit), limit)
        scaled = row / predicted
        gram = np.asarray(self.gram) * kept + np.outer(scaled, scaled)
        moment = np.asarray(self.moment) * kept + scaled * ratio
        inertia = _INERTIA * np.diag(gram)
        after = _positive_solution(
            gram + np.diag(inertia), moment + inertia * before, np.asarray(self.smallest)
        )
        # Correcting a first guess, or following a change, says nothing of the spread.
        error = 0.0 if has_changed or self.num_reports < len(before) else ratio - 1
        variance = self.spread**2 * _KEPT_WEIGHT + error**2 * (1 - _KEPT_WEIGHT)
        return _Fit(
            coefficients=tuple(after.tolist()),
            smallest=self.smallest,
            gram=tuple(tuple(line) for line in gram.tolist()),
            moment=tuple(moment.tolist()),
            spread=sqrt(variance),
            last_surprise=surprise,
            num_reports=self.num_reports + 1,
        )


def _positive_solution(gram: _Floats, moment: _Floats, smallest: _Floats) -> _Floats:
    """Solve `gram @ x = moment` with every x at least `smallest`, fixing what falls below it."""
    # Features differ by many orders of magnitude; in units of their own size they do not.
    unit = 1 / np.sqrt(np.diag(gram))
    gram, moment, smallest = gram * np.outer(unit, unit), moment * unit, smallest / unit
    solution = smallest.copy()
    free = np.ones(len(moment), dtype=bool)
    while free.any():
        fixed = ~free
        right = moment[free] - gram[np.ix_(free, fixed)] @ smallest[fixed]
        solution[free] = np.linalg.solve(gram[np.ix_(free, free)], right)
        too_small = free & (solution < smallest)
        if not too_small.any():
            break
        free &= ~too_small
        solution[too_small] = smallest[too_small]
    return solution * unit


@dataclass(frozen=True, slots=True)
class LearnedTransfer:
    """Latency and bandwidth of one tier, from how long transfers of some size took."""

    _fit: _Fit

    @staticmethod
    def starting_at(rate: TransferRate) -> LearnedTransfer:
        """Begin with a guess, `cost.typical_rate` for one."""
        return LearnedTransfer(_Fit.starting_at((rate.latency_s, rate.per_byte_s), (1e-6, 1e-12)))

    def learn(self, num_bytes: int, seconds: float) -> LearnedTransfer:
        """Take in that one transfer of `num_bytes` (above 0) took `seconds`."""
        return LearnedTransfer(self._fit.learn((1.0, float(num_bytes)), seconds))

    @property
    def rate(self) -> TransferRate:
        """What is known now."""
        latency_s, per_byte_s = self._fit.coefficients
        return TransferRate(latency_s, per_byte_s, self._fit.spread)

    @property
    def num_reports(self) -> int:
        """Measurements taken in; 0 is a guess."""
        return self._fit.num_reports


_GUESSED_PREFILL = PrefillRate()


@dataclass(frozen=True, slots=True)
class LearnedPrefill:
    """One kind of engine's prefill seconds by number of tokens and their position."""

    _fit: _Fit = field(
        default=_Fit.starting_at(
            (
                _GUESSED_PREFILL.fixed_s,
                _GUESSED_PREFILL.per_token_s,
                _GUESSED_PREFILL.per_pair_s,
            ),
            (1e-5, 1e-8, 1e-13),
        )
    )

    def learn(
        self, num_cached_tokens: int, num_computed_tokens: int, seconds: float
    ) -> LearnedPrefill:
        """Take in that computing `num_computed_tokens` (above 0) behind others took `seconds`."""
        pairs = num_pairs(num_cached_tokens, num_computed_tokens)
        return LearnedPrefill(self._fit.learn((1.0, float(num_computed_tokens), pairs), seconds))

    @property
    def rate(self) -> PrefillRate:
        """What is known now."""
        return PrefillRate(*self._fit.coefficients)

    @property
    def num_reports(self) -> int:
        """Measurements taken in; 0 is a guess."""
        return self._fit.num_reports
