"""Draws the figures of README.md and docs/performance.md from the files in benchmarks/results.

    python -m benchmarks.figures

Needs matplotlib (`pip install dinfer[plot]`).
"""

from __future__ import annotations

from pathlib import Path

from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.report import RESULTS, beside, levels, load
from dinfer.lab.metrics import wilson

IMAGES = Path(__file__).parents[1] / "docs" / "images"
CACHE = "dual"
SHOWN = {  # the runs of the figure of speed
    "dInfer, torch.compile": "peer-dual",
    "ours": "ours-dual",
    "ours, fp8": "ours-fp8",
    "dInfer, torch.compile, batch 8": "peer-batch8",
    "ours, batch 8": "ours-batch8",
}


def panels(count: int, height: float = 3.2, grid: bool = True) -> tuple[Figure, list[Axes]]:
    """A figure with so many panels side by side."""
    figure = Figure(figsize=(7 if count == 1 else 8, height), layout="constrained")
    found = list(figure.subplots(1, count, squeeze=False)[0])
    for axes in found:
        axes.grid(alpha=0.3) if grid else None
        axes.spines[["top", "right"]].set_visible(False)
    return figure, found


def by_count(axes: Axes, counts: list[int]) -> None:
    """Gives a panel the requests in flight as its x axis."""
    axes.set_xscale("log")
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.minorticks_off()


def speed() -> Figure:
    """Tokens a second of whole generations, of ours and of the published dInfer."""
    report, (figure, (axes,)) = beside(), panels(1, 2.4, grid=False)
    names = list(SHOWN)[::-1]
    rates = [report["runs"][SHOWN[name]]["tokens_per_s"] for name in names]
    bars = axes.barh(names, rates, color=["C0" if name.startswith("ours") else "0.7" for name in names])
    axes.bar_label(bars, [f"{rate:,.0f}" for rate in rates], padding=3)
    axes.set(xlabel=f"tokens a second, LLaDA-8B's shape on one {report['hardware']}", xlim=(0, 1.12 * max(rates)))
    return figure


def accuracy() -> Figure:
    """Accuracy against tokens per forward with 95% Wilson intervals: a curve for each decoder."""
    rows, (figure, (axes,)) = load("tiny-quality-h200")["rows"], panels(1)
    for decoder in dict.fromkeys(row["decoder"] for row in rows):
        own = [row for row in rows if (row["decoder"], row["cache"]) == (decoder, CACHE)]
        own.sort(key=lambda row: row["tpf"])
        spans = [wilson(row["accuracy"] * row["problems"] / 100, row["problems"]) for row in own]
        bars = [[abs(row["accuracy"] - span[end]) for row, span in zip(own, spans, strict=True)] for end in (0, 1)]
        places = [row["tpf"] for row in own], [row["accuracy"] for row in own]
        axes.errorbar(*places, yerr=bars, marker="o", ms=4, lw=1.2, elinewidth=0.8, capsize=2, label=decoder)
        for row in own:
            words = row["options"].partition("=")[2]
            axes.annotate(words, (row["tpf"], row["accuracy"]), (5, 4), textcoords="offset points", fontsize=7)
    axes.set(xlabel="tokens per forward", ylabel="accuracy, %", ylim=(40, 100))
    axes.legend(title=f"decoder, cache={CACHE}", frameon=False)
    return figure


def curve(results: Path = RESULTS) -> Figure:
    """Tokens a second, and seconds of a request, over the requests in flight."""
    figure, (fast, late) = panels(2, 3.4)
    found = levels(results)
    counts = sorted({run["in_flight"] for runs in found.values() for run in runs})
    for color, (title, runs) in zip(("C0", "C1"), found.items(), strict=False):
        count = [run["in_flight"] for run in runs]
        rates = [run["steady_tokens_per_s"] or run["tokens_per_s"] for run in runs]
        fast.plot(count, rates, marker="o", ms=4, color=color, label=title)
        fast.plot(count, [run["limit"]["tokens_per_s"] for run in runs], ls="--", lw=1, color=color)
        late.plot(count, [run["latency_s"]["median"] for run in runs], marker="o", ms=4, color=color, label=title)
        late.plot(count, [run["latency_s"]["max"] for run in runs], ls=":", lw=1, color=color)
    fast.set(ylabel="tokens a second (dashed: limit)", yscale="log")
    late.set(ylabel="seconds a request (dotted: worst)", yscale="log")
    for axes in (fast, late):
        axes.set(xlabel="requests in flight, one card")
        by_count(axes, counts)
    fast.legend(frameon=False)
    return figure


def rival() -> Figure:
    """Tokens a second of an autoregressive model and of block diffusion, over the requests in flight."""
    report, (figure, (axes,)) = load("rival-sdar-8b-h200"), panels(1)
    lines = {"autoregressive": [(int(at), run["tokens_per_s"]) for at, run in report["causal"].items()]}
    for block, commits in (("8", 2), ("8", 4), ("32", 4)):
        if runs := report["blocks"].get(block):
            places = [(int(at), run[f"commits_{commits}"]["tokens_per_s"]) for at, run in runs.items()]
            lines[f"blocks of {block}, {commits} tokens a step"] = places
    for title, places in lines.items():
        axes.plot(*zip(*places, strict=True), marker="o", ms=4, label=title, color=None if "blocks" in title else "0.3")
    axes.set(xlabel="requests in flight", ylabel="tokens a second", yscale="log")
    by_count(axes, [int(at) for at in report["causal"]])
    axes.legend(frameon=False)
    return figure


def main() -> None:
    rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "dinfer", "font.family": "sans-serif"})
    for draw in (speed, accuracy, curve, rival):
        draw().savefig(IMAGES / f"{draw.__name__}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
