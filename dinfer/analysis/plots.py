"""Accuracy against speed, as a figure: a point a recipe with its error bar, a curve a method, and the Pareto front."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dinfer.analysis.pareto import aup, front

AXES = {"tpf": "tokens per forward (TPF)", "tps": "tokens per second (TPS)"}
MARKS = "os^Dvp*XPh<>"


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
    best = front(rows, speed)
    axes.plot(
        [row[speed] for row in best], [row["accuracy"] for row in best],
        color="0.35", lw=5, alpha=0.3, zorder=0, label="Pareto front",
    )  # fmt: skip
    axes.set_xlabel(AXES[speed])
    axes.set_ylabel("accuracy, %, with 95% Wilson intervals")
    axes.grid(alpha=0.3)
