"""What a set of measured recipes is worth together: the Pareto front, and the area under accuracy and parallelism."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

Row = TypeVar("Row", bound=Mapping[str, Any])

ALPHA = 3.0  # how steeply lost accuracy weighs in the area
SLACK = 5.0  # points of accuracy that a point of the area may lose against its slowest one


def front(rows: Sequence[Row], speed: str = "tpf") -> list[Row]:
    """The rows that no other row beats in both `accuracy` and `speed`, by rising speed.

    Of rows with equal figures, one is kept. Error bars play no part: neighbours on the front may be equal.
    """
    best: list[Row] = []
    for row in sorted(rows, key=lambda row: (-row[speed], -row["accuracy"])):
        if not best or row["accuracy"] > best[-1]["accuracy"]:
            best.append(row)
    return best[::-1]


def aup(
    points: Sequence[tuple[float, float]], *, best: float | None = None, alpha: float = ALPHA, slack: float = SLACK
) -> float:
    """Accuracy under parallelism of one method's points (tokens per forward, accuracy in percent).

    With the points in order of parallelism p, and those of less accuracy than the first one's less `slack` left out:

        AUP = p_1 y_1 + sum over i > 1 of (p_i - p_{i-1}) (y_i W(y_i) + y_{i-1} W(y_{i-1})) / 2,
        W(y) = min(exp(-alpha (1 - y / best)), 1)

    `best`: the highest accuracy of any method compared, so that areas may be compared; None: of these points. Source:
    d3LLM (Qian et al. 2026, github.com/hao-ai-lab/d3LLM), whose alpha and slack are the defaults. Where several points
    have the same parallelism, the best of them counts. Raises ValueError for no points, or figures out of range.
    """
    if not points:
        raise ValueError("an area needs at least one point")
    for parallelism, accuracy in points:
        if not parallelism > 0 or not 0 <= accuracy <= 100:
            raise ValueError(f"({parallelism}, {accuracy}) is no point: (tokens per forward above 0, percent)")
    highest: dict[float, float] = {}
    for parallelism, accuracy in points:
        highest[parallelism] = max(accuracy, highest.get(parallelism, 0.0))
    order = sorted(highest.items())
    kept = [(parallelism, accuracy) for parallelism, accuracy in order if accuracy >= order[0][1] - slack]
    top = max(accuracy for _, accuracy in kept) if best is None else best
    weighted = [accuracy * min(math.exp(-alpha * (1 - accuracy / top)), 1.0) if top else 0.0 for _, accuracy in kept]
    area = kept[0][0] * kept[0][1]
    for i in range(1, len(kept)):
        area += (kept[i][0] - kept[i - 1][0]) * (weighted[i] + weighted[i - 1]) / 2
    return area
