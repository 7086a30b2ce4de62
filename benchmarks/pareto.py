"""Draws accuracy against tokens per forward from a table of `benchmarks.quality`, with the Pareto front.

    python -m benchmarks.pareto benchmarks/results/tiny-everything-h200.json docs/images/tiny-pareto.png

Needs matplotlib (`pip install dinfer[plot]`).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def front(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows that no other row beats in both accuracy and tokens per forward, by tokens per forward."""
    best: list[dict[str, Any]] = []
    for row in sorted(rows, key=lambda r: (-r["tpf"], -r["accuracy"])):
        if not best or row["accuracy"] > best[-1]["accuracy"]:
            best.append(row)
    return best[::-1]


def draw(rows: list[dict[str, Any]], title: str, out: Path) -> None:
    """One mark a recipe: colour by decoder, shape by iteration; the line is the front, labelled."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    figure, axes = pyplot.subplots(figsize=(9, 5.5), layout="constrained")
    decoders, shapes = sorted({row["decoder"] for row in rows}), {"blockwise": "o", "smooth": "s", "full": "^"}
    colours = dict(zip(decoders, pyplot.get_cmap("tab20").colors, strict=False))
    for decoder in decoders:
        for iteration, shape in shapes.items():
            some = [row for row in rows if row["decoder"] == decoder and row["iteration"] == iteration]
            label = decoder if iteration == "blockwise" else None
            xs, ys = [row["tpf"] for row in some], [row["accuracy"] for row in some]
            axes.scatter(xs, ys, s=26, marker=shape, color=colours[decoder], alpha=0.8, label=label, linewidths=0)
    best = front(rows)
    axes.plot([row["tpf"] for row in best], [row["accuracy"] for row in best], color="0.25", lw=1, zorder=0)
    for row in best:
        name = f"{row['decoder']}, {row['cache']}" + (
            "" if row["iteration"] == "blockwise" else f", {row['iteration']}"
        )
        axes.annotate(name, (row["tpf"], row["accuracy"]), fontsize=6, xytext=(4, 3), textcoords="offset points")
    axes.set(xlabel="tokens per forward (log scale)", ylabel="accuracy, %", xscale="log", title=title)
    axes.margins(x=0.12)
    axes.xaxis.set_major_formatter(ticker.ScalarFormatter())
    axes.xaxis.set_minor_formatter(ticker.ScalarFormatter())
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, ncols=2, title="decoder (o blockwise, \u25a1 smooth, \u25b3 full)", title_fontsize=7)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=140)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    report = json.loads(given.table.read_text())
    count = report["rows"][0]["problems"]
    draw(report["rows"], f"The model in the box, {count} held-out problems", given.out)


if __name__ == "__main__":
    main()
