"""Temperatures that make probabilities of options agree with how often they are right (Guo et al., 2017).

`logps` are log-probabilities of the options of each question, `right` the number of the right option of each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

LEAST, MOST = 1 / 50, 50.0  # temperatures
BINS = 10
GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, slots=True)
class Calibrated:
    """How probabilities agree with what is right."""

    temperature: float
    questions: int
    accuracy: float  # of the most probable option
    log_loss: float  # nats
    ece: float  # expected calibration error of the most probable option, in `BINS` bins of equal numbers

    @classmethod
    def of(cls, logps: Sequence[Sequence[float]], right: Sequence[int], temperature: float) -> Calibrated:
        shares = [tempered(row, temperature) for row in logps]
        best = [max(range(len(row)), key=row.__getitem__) for row in shares]
        hits = [float(b == r) for b, r in zip(best, right, strict=True)]
        sure = [row[b] for row, b in zip(shares, best, strict=True)]
        loss = log_loss(logps, right, temperature)
        return cls(temperature, len(right), sum(hits) / len(hits), loss, expected_error(sure, hits))


def tempered(logps: Sequence[float], temperature: float) -> list[float]:
    """Probabilities of the options at a temperature; their sum is 1."""
    most = max(logps)
    weights = [math.exp((value - most) / temperature) for value in logps]
    return [weight / sum(weights) for weight in weights]


def log_loss(logps: Sequence[Sequence[float]], right: Sequence[int], temperature: float) -> float:
    """Mean of minus the log-probability of the right option, in nats."""
    told = (tempered(row, temperature)[r] for row, r in zip(logps, right, strict=True))
    return sum(-math.log(max(share, 1e-300)) for share in told) / len(right)


def fit(logps: Sequence[Sequence[float]], right: Sequence[int]) -> float:
    """The temperature of the least log loss, by golden section; the loss is convex in its inverse."""
    low, high = 1 / MOST, 1 / LEAST

    def loss(inverse: float) -> float:
        return log_loss(logps, right, 1 / inverse)

    # In the logarithm of the inverse it has one minimum, too, and the ends are as far from 1.
    a, b = math.log(low), math.log(high)
    left, at = b - GOLDEN * (b - a), a + GOLDEN * (b - a)
    f_left, f_at = loss(math.exp(left)), loss(math.exp(at))
    while b - a > 1e-4:
        if f_left <= f_at:
            b, at, f_at = at, left, f_left
            left = b - GOLDEN * (b - a)
            f_left = loss(math.exp(left))
        else:
            a, left, f_left = left, at, f_at
            at = a + GOLDEN * (b - a)
            f_at = loss(math.exp(at))
    return math.exp(-(a + b) / 2)


def expected_error(sure: Sequence[float], hits: Sequence[float]) -> float:
    """Mean distance between probability and share of hits, over bins of as many questions each."""
    order = sorted(range(len(sure)), key=sure.__getitem__)
    bins = [order[i * len(order) // BINS : (i + 1) * len(order) // BINS] for i in range(BINS)]
    return sum(abs(sum(sure[i] - hits[i] for i in one)) for one in bins) / len(sure)
