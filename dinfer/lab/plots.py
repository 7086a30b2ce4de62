"""What measured recipes are worth together: Pareto front, area under accuracy and parallelism, and a figure of both."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
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


AXES = {"tpf": "tokens per forward (TPF)", "tps": "tokens per second (TPS)"}
MARKS = "os^Dvp*XPh<>"
FEW = 100  # problems; with fewer, an interval is wider than most differences between recipes


def methods(rows: Sequence[Mapping[str, Any]], by: Sequence[str]) -> dict[str, list[Mapping[str, Any]]]:
    """The rows of each method, by a name of what `by` says of it, left out what is the same for all."""
    columns = [name for name in by if len({row.get(name) for row in rows}) > 1] or list(by[:1])
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault(", ".join(str(row.get(name, "?")) for name in columns), []).append(row)
    return found


def areas(rows: Sequence[Mapping[str, Any]], by: Sequence[str]) -> dict[str, float]:
    """The area under accuracy and parallelism of each method, the best first, all against the best accuracy of any."""
    best = max(row["accuracy"] for row in rows)
    found = {
        name: aup([(row["tpf"], row["accuracy"]) for row in own], best=best) for name, own in methods(rows, by).items()
    }
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def draw(tasks: Mapping[str, Sequence[Mapping[str, Any]]], path: Path, *, by: Sequence[str]) -> None:
    """A line of panels for each task, written to `path` in the format of its ending. Raises ImportError, ValueError.

    A row needs `accuracy`, `accuracy_low`, `accuracy_high` (percent) and `tpf`; `tps` where there is a panel for it.
    """
    from matplotlib.figure import Figure  # an extra; needs no display

    speeds = [name for name in AXES if all(row.get(name) is not None for rows in tasks.values() for row in rows)]
    figure = Figure(figsize=(6.4 * len(speeds) + 2.2, 4.6 * len(tasks)), layout="constrained")
    panels = figure.subplots(len(tasks), len(speeds), squeeze=False)
    for line, (task, rows) in zip(panels, tasks.items(), strict=True):
        names = areas(rows, by)
        for axes, speed in zip(line, speeds, strict=True):
            _panel(axes, rows, speed, names, by)
            axes.set_title(task)
        line[-1].legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1), title="method (AUP)", title_fontsize=8)
    figure.savefig(path, dpi=130)


def _panel(
    axes: Any, rows: Sequence[Mapping[str, Any]], speed: str, names: Mapping[str, float], by: Sequence[str]
) -> None:
    own = methods(rows, by)
    for index, (name, area) in enumerate(names.items()):
        order = sorted(own[name], key=lambda row: row[speed])
        low = [max(row["accuracy"] - row["accuracy_low"], 0) for row in order]
        high = [max(row["accuracy_high"] - row["accuracy"], 0) for row in order]
        axes.errorbar(
            [row[speed] for row in order], [row["accuracy"] for row in order], yerr=[low, high],
            marker=MARKS[index % len(MARKS)], ms=5, lw=0.8, elinewidth=0.8, capsize=2, color=f"C{index % 10}",
            label=f"{name} ({area:.0f})",
        )  # fmt: skip
        few = [row for row in order if row.get("problems", FEW) < FEW]
        axes.plot(
            [row[speed] for row in few], [row["accuracy"] for row in few], MARKS[index % len(MARKS)],
            ms=5, mfc="white", mec=f"C{index % 10}", zorder=3,
        )  # fmt: skip
    if any(row.get("problems", FEW) < FEW for row in rows):
        axes.plot([], [], "o", ms=5, mfc="white", mec="0.35", label=f"hollow: fewer than {FEW} problems")
    best = front(rows, speed)
    axes.plot(
        [row[speed] for row in best], [row["accuracy"] for row in best],
        color="0.35", lw=5, alpha=0.3, zorder=0, label="Pareto front",
    )  # fmt: skip
    axes.set_xlabel(AXES[speed])
    axes.set_ylabel("accuracy, %, with 95% Wilson intervals")
    axes.grid(alpha=0.3)
