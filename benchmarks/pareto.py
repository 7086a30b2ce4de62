"""Draws accuracy against tokens per forward from tables of one model, with the Pareto front.

    cd benchmarks/results
    python -m benchmarks.pareto tiny-everything-h200.json tiny-further-cpu.json multi-block-tiny-h200.json \
        multi-block-tiny-cpu.json ../../docs/images/tiny-pareto.png

The tables are of `benchmarks.quality` and `benchmarks.multi_block`, on the same problems. It needs matplotlib
(`pip install dinfer[plot]`).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from dinfer.analysis.plots import front

SHAPES = {"blockwise": "o", "smooth": "s", "full": "^", "multi_block": "D", "lopa": "P"}
GOOD = 20  # points of accuracy below the best that the right panel shows


def draw(rows: list[dict[str, Any]], title: str, out: Path) -> None:
    """Draws a mark for each recipe: colour by decoder, shape by iteration.

    The line is the front; its recipes are numbered in both panels and named below. The right panel is the upper part of
    the left one.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker
    from matplotlib.lines import Line2D

    figure, panels = pyplot.subplots(1, 2, figsize=(11, 6.5), layout="constrained")
    decoders = sorted({row["decoder"] for row in rows})
    colours = {name: pyplot.get_cmap("tab20")(i) for i, name in enumerate(decoders)}
    best = front(rows)
    low = max(row["accuracy"] for row in rows) - GOOD
    for axes, floor in zip(panels, (0.0, low), strict=True):
        for row in (row for row in rows if row["accuracy"] >= floor):
            marker, colour = SHAPES[row["iteration"]], colours[row["decoder"]]
            axes.scatter(row["tpf"], row["accuracy"], s=24, marker=marker, color=colour, alpha=0.75, linewidths=0)
        shown = [row for row in best if row["accuracy"] >= floor]
        axes.plot([row["tpf"] for row in shown], [row["accuracy"] for row in shown], color="0.25", lw=1, zorder=0)
        for row in shown:
            name = str(best.index(row) + 1)
            axes.annotate(name, (row["tpf"], row["accuracy"]), fontsize=8, xytext=(4, 3), textcoords="offset points")
        axes.set(xlabel="tokens per forward (log scale)", ylabel="accuracy, %", xscale="log")
        axes.xaxis.set_major_formatter(ticker.ScalarFormatter())
        axes.xaxis.set_minor_formatter(ticker.NullFormatter())
        least, most = axes.get_xlim()
        axes.set_xticks([tick for tick in (0.5, 0.7, 1, 1.5, 2, 3, 4, 6, 8, 12, 16) if least < tick < most])
        axes.grid(alpha=0.3)
    marks = [Line2D([], [], marker="o", ls="", color=colours[name], label=name) for name in decoders]
    marks += [
        Line2D([], [], marker=shape, ls="", color="0.5", mfc="none", label=name) for name, shape in SHAPES.items()
    ]
    panels[0].legend(handles=marks, fontsize=7, ncols=2, loc="center left", bbox_to_anchor=(0.01, 0.45))
    names = [f"{i:>2}  {label(row)}: {row['accuracy']:.1f}%, {row['tpf']:.2f}" for i, row in enumerate(best, 1)]
    half = -(-len(names) // 2)
    lines = [f"{left:<70}{right}" for left, right in zip(names, [*names[half:], ""], strict=False)]
    figure.suptitle(title)
    figure.supxlabel("\n".join(lines[:half]), fontsize=8, family="monospace", x=0.02, ha="left")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=130)


def label(row: dict[str, Any]) -> str:
    """A recipe in words."""
    opened = row.get("iteration_options", "").replace("blocks=4 block=32 align=False", "")
    parts = (row["iteration"], opened.strip(), row["decoder"], row["options"], f"cache={row['cache']}")
    return " ".join(part for part in parts if part)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", type=Path, nargs="+")
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    rows = [row for table in given.tables for row in json.loads(table.read_text())["rows"]]
    if len({row["problems"] for row in rows}) > 1:
        parser.error("the tables are of different numbers of problems")
    draw(rows, f"The model in the box, {rows[0]['problems']} held-out problems, {len(rows)} recipes", given.out)


if __name__ == "__main__":
    main()
