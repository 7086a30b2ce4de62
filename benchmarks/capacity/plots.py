"""Draws the figures of benchmarks/results/capacity.md.

    python -m benchmarks.capacity.plots benchmarks/results/scaling-llada2-mini-h200.json \
        benchmarks/results/scaling-degrees-h200.json

Needs matplotlib (`pip install dinfer[plot]`).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from matplotlib import rcParams
from matplotlib.figure import Figure

IMAGES = Path(__file__).parents[2] / "docs" / "images"
NAMES = {"turns": "in turn", "two_choices": "the less loaded of two"}


def load(report: dict[str, Any]) -> Figure:
    """Times of one card over its throughput, with a line for each number of rows."""
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    axes = figure.subplots(1, 2)
    titles = {"first_block_s": "first block, s", "latency_s": "whole answer, s"}
    for place, (key, title) in zip(axes, titles.items(), strict=True):
        for index, rows in enumerate(dict.fromkeys(row["rows"] for row in report["curves"])):
            own = [row for row in report["curves"] if row["rows"] == rows and row["share"] < 1]
            rates = [row["tokens_per_s"] for row in own]
            place.plot(rates, [row[key]["p50"] for row in own], "o-", ms=3, color=f"C{index}", label=f"{rows} rows")
            place.plot(rates, [row[key]["p99"] for row in own], "--", lw=1, color=f"C{index}")
        place.set(xlabel="tokens a second of a card", title=title, yscale="log")
        place.grid(alpha=0.3, which="both")
        place.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, title="median; dashed: 99%")
    return figure


def cards(report: dict[str, Any]) -> Figure:
    """The load on shared parts, over the number of cards."""
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for policy, name in NAMES.items():
        own = [row for row in report["scale"] if row["policy"] == policy or row["cards"] == 1]
        left.plot([row["cards"] for row in own], [row["first_block_s"]["p99"] for row in own], "o-", ms=3, label=name)
    left.set(xscale="log", xlabel="cards", title="first block, 99%, s", ylim=(0, None))
    left.legend(frameon=False, title="requests go")
    own = [row for row in report["scale"] if row["policy"] == "two_choices" or row["cards"] == 1]
    for key, name in (("proxy", "one proxy of Ray Serve"), ("controller", "Ray Serve's controller")):
        right.plot([row["cards"] for row in own], [row["shared"][key] for row in own], "o-", ms=3, label=name)
    right.axhline(1, color="0.5", lw=1, ls="--")
    right.set(xscale="log", yscale="log", xlabel="cards", title="cores that it takes; it has one")
    right.legend(frameon=False)
    for place in (left, right):
        place.grid(alpha=0.3)
        place.spines[["top", "right"]].set_visible(False)
    return figure


def degrees(report: dict[str, Any]) -> Figure:
    """The time of an answer over the load on eight cards, with a line for each layout, dashed if extrapolated."""
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    kinds = list(dict.fromkeys((row["shape"], row["format"]) for row in report["rows"]))
    axes = figure.subplots(1, len(kinds))
    for place, kind in zip(axes, kinds, strict=True):
        for row in (row for row in report["rows"] if (row["shape"], row["format"]) == kind):
            name = f"{report['of_cards'] // row['cards']} x {row['cards']}"
            rates = [load["tokens_per_s"] / 1e3 for load in row["loads"]]
            times, style = [load["latency_s"]["p50"] for load in row["loads"]], "-" if row["measured"] else "--"
            place.plot(rates, times, f"o{style}", ms=3, color=f"C{row['cards'].bit_length()}", label=name)
        place.set(xlabel="thousand tokens a second", title=", ".join(kind), ylim=(0, None))
        place.grid(alpha=0.3)
        place.spines[["top", "right"]].set_visible(False)
    axes[0].set(ylabel="an answer, s")
    axes[-1].legend(frameon=False, title="replicas x cards", fontsize="small", loc="upper left")
    return figure


def main() -> None:
    rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "dinfer", "font.family": "sans-serif"})
    report, layouts = (json.loads(Path(name).read_text()) for name in sys.argv[1:3])
    figures = {"scaling-load": load(report), "scaling-cards": cards(report), "scaling-degrees": degrees(layouts)}
    for name, figure in figures.items():
        figure.savefig(IMAGES / f"{name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
