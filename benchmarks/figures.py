"""Draws figures of README.md and docs from the files in benchmarks/results: speed, and accuracy against parallelism.

    python -m benchmarks.figures

Needs matplotlib (`pip install dinfer[plot]`).
"""

from __future__ import annotations

import json
from typing import Any

from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.peers.table import SHOWN, measured
from benchmarks.report import RESULTS, ROOT
from benchmarks.several_table import rows_of
from dinfer.analysis.metrics import wilson
from dinfer.analysis.plots import front

IMAGES = ROOT / "docs" / "images"
CACHE = "dual"


def speed(report: dict[str, Any]) -> Figure:
    """Tokens a second of whole generations, of ours and of the published dInfer."""
    figure = Figure(figsize=(7, 2.4), layout="constrained")
    axes = figure.subplots()
    names = list(SHOWN)[::-1]
    rates = [report["runs"][SHOWN[name]]["tokens_per_s"] for name in names]
    bars = axes.barh(names, rates, color=["C0" if name.startswith("ours") else "0.7" for name in names])
    axes.bar_label(bars, [f"{rate:,.0f}" for rate in rates], padding=3)
    axes.set(xlabel=f"tokens a second, LLaDA-8B's shape on one {report['hardware']}", xlim=(0, 1.12 * max(rates)))
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def curve(axes: Axes, rows: list[dict[str, Any]], label: str) -> None:
    """Accuracy against tokens per forward: a point for each row, with 95% Wilson intervals."""
    spans = [wilson(row["accuracy"] * row["problems"] / 100, row["problems"]) for row in rows]
    below = [row["accuracy"] - low for row, (low, _) in zip(rows, spans, strict=True)]
    above = [high - row["accuracy"] for row, (_, high) in zip(rows, spans, strict=True)]
    places = [row["tpf"] for row in rows], [row["accuracy"] for row in rows]
    axes.errorbar(*places, yerr=[below, above], marker="o", ms=4, lw=1.2, elinewidth=0.8, capsize=2, label=label)


def accuracy(rows: list[dict[str, Any]]) -> Figure:
    """A curve for each decoder, with a point for each setting."""
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.subplots()
    for decoder in dict.fromkeys(row["decoder"] for row in rows):
        own = sorted(
            (row for row in rows if (row["decoder"], row["cache"]) == (decoder, CACHE)), key=lambda r: r["tpf"]
        )
        curve(axes, own, decoder)
        for row in own:
            words = row["options"].partition("=")[2]
            axes.annotate(words, (row["tpf"], row["accuracy"]), (5, 4), textcoords="offset points", fontsize=7)
    axes.set(xlabel="tokens per forward", ylabel="accuracy, %", ylim=(40, 100))
    axes.legend(title=f"decoder, cache={CACHE}", frameon=False)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def several() -> Figure:
    """Curves of the first model and its adapter: one block, and up to four."""
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.subplots()
    one = json.loads((RESULTS / "tiny-everything-h200.json").read_text())["rows"]
    adapter, more = rows_of(RESULTS, "tiny-d2f"), rows_of(RESULTS, "tiny")
    curves = {
        "tiny, one block, every recipe": front(one),
        "tiny, up to four blocks": front([row for row in more if row["iteration"] == "multi_block"]),
        "tiny-d2f, one block": front([row for row in adapter if row["iteration"] == "blockwise"]),
        "tiny-d2f, up to four blocks": front([row for row in adapter if row["iteration"] == "multi_block"]),
    }
    for name, rows in curves.items():
        curve(axes, rows, name)
    axes.set(xlabel="tokens per forward", ylabel="accuracy, %", ylim=(70, 100))
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def main() -> None:
    rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "dinfer", "font.family": "sans-serif"})
    found = {
        "speed": speed(measured()),
        "accuracy": accuracy(json.loads((RESULTS / "tiny-quality-h200.json").read_text())["rows"]),
        "several-blocks": several(),
    }
    for name, figure in found.items():
        figure.savefig(IMAGES / f"{name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
