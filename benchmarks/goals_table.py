"""What `benchmarks.goals` and `benchmarks.startup` have measured: tables and a figure of the pages on performance."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.goals import ROWS, RUNS, Row, figure, level, number, report_of, wanted

CURVES = {"bf16": "mini", "fp8": "mini-fp8"}
STARTS = {  # when kernels are compiled, and the file
    "at its first launch": "startup-llada2-mini-h200.json",
    "ahead, beside each other": "startup-llada2-mini-ahead-h200.json",
}


def measured(results: Path, before: bool = False) -> dict[str, dict[str, Any]]:
    """The files of `benchmarks.goals` that are there, by run."""
    return {name: report for name in RUNS if (report := report_of(results, name, before)) is not None}


def goals(results: Path) -> str:
    """Every figure that is to be reached beside its goal and its limit, then a figure of the curve."""
    reports, before = measured(results), measured(results, before=True)
    if not reports:
        return "Not measured yet: `python -m benchmarks.goals --out benchmarks/results` does it."
    some, commits = next(iter(reports.values())), sorted({report["commit"] for report in reports.values()})
    lines = [
        f"One {some['hardware']}, torch {some['torch']}, commit{'s' * (len(commits) > 1)} {', '.join(commits)}. "
        "*Limit*: the figure if every step took the least time that its bytes or its multiply-adds allow, at rates of "
        "the card from the same run, "
        "and the host none. *Warm*: the same at the rate of a card that has multiplied for two seconds and is at its "
        "power limit, as under load. -: not measured.",
        *older(reports, before, results),
        "",
        f"| work | in flight | figure | {'before | ' if before else ''}measured | goal | limit | of the limit | warm "
        "| of that |",
        "| --- |" + " --- |" * (9 if before else 8),
    ]
    for row in ROWS:
        run = level(reports[row.run], row.in_flight) if row.run in reports else None
        value, limit = (None, None) if run is None else figure(row.figure, run)
        cells = [row.work, str(row.in_flight), row.figure]
        if before:
            then = level(before[row.run], row.in_flight) if row.run in before else None
            cells.append("-" if then is None else number(figure(row.figure, then)[0]))
        cells += [number(value), wanted(row)]
        cells += [number(limit), share(row, value, limit)]
        value, limit = (None, None) if run is None or "limit_warm" not in run else figure(row.figure, run, "limit_warm")
        lines.append(f"| {' | '.join([*cells, number(limit), share(row, value, limit)])} |")
    return "\n".join(lines)


def older(reports: dict[str, Any], before: dict[str, Any], results: Path) -> list[str]:
    """Where the figures of an older commit are from, and whether its answers are the same."""
    if not before:
        return []
    some = next(iter(before.values()))
    times = [
        " to ".join(f"{minute:%d %B, %H:%M}" for minute in (min(dates), max(dates)))
        for dates in ([datetime.fromisoformat(one["date"]) for one in each.values()] for each in (before, reports))
    ]
    lines = [
        "",
        f"*Before*: commit {some['commit']}, one {some['hardware']}, torch {some['torch']}, under the same load and "
        f"counted in the same way. Its runs began {times[0]} UTC, those of *measured* {times[1]} UTC.",
    ]
    file = results / "before-tokens-h200.json"
    if not file.is_file():
        return lines
    found = json.loads(file.read_text())
    count, rows = (found["setting"][name] for name in ("count", "rows"))
    told = "; ".join(
        f"`{row['model']}`, {row['dtype']}: {row['same']} ({row['same_at_half']}), "
        f"{row['correct'][0]} and {row['correct'][1]} right"
        for row in found["rows"]
    )
    return [
        *lines,
        "",
        f"Answers to {count} held-out problems, `threshold` 0.9, commits {found['before']} and {found['commit']}, "
        f"{rows} in flight: how many have the same tokens (in brackets: at {found['commit']} with {rows} and with "
        f"{rows // 2} in flight), and how many are right at each. {told}.",
    ]


def share(row: Row, value: float | None, limit: float | None) -> str:
    """What part of its limit a figure is. Of a time, the limit is the least."""
    if not value or not limit:
        return "-"
    return f"{limit / value if 'ms' in row.figure else value / limit:.0%}"


def long_prompts(results: Path) -> str:
    """Prefills and steps of long prompts."""
    reports = measured(results)
    lines = [
        "| LLaDA2-mini, prompts of | in flight | prefill, positions/s | usual step | by bytes | keys and values read |",
        "| --- |" + " --- |" * 5,
    ]
    for length in ("16k", "32k"):
        for run in reports.get(f"mini-{length}", {"runs": []})["runs"]:
            usual = run["limit"]["usual"]
            lines.append(
                f"| {length} | {run['in_flight']} | {run['limit']['prefill'].get('positions_per_s', 0):,.0f} "
                f"| {usual['median_ms']:.2f} ms | {usual['bytes_ms']:.2f} ms | {usual['keys_gb']:.2f} GB |"
            )
    return "\n".join(lines)


def curve(results: Path) -> str:
    """Tokens a second and latency of LLaDA2-mini over the requests in flight."""
    lines = [
        "| LLaDA2-mini, in flight | tokens/s, steady | limit | a request, median | worst | GPU busy |",
        "| --- |" + " --- |" * 5,
    ]
    for title, runs in levels(measured(results)).items():
        for run in runs:
            steady, latency = run["steady_tokens_per_s"], run["latency_s"]
            lines.append(
                f"| {title}, {run['in_flight']} | {number(steady)} | {number(run['limit']['tokens_per_s'])} "
                f"| {latency['median']:.2f} s | {latency['max']:.2f} s | {100 * run['device_share']:.0f}% |"
            )
    return "\n".join(lines)


def levels(reports: dict[str, dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Of each format of LLaDA2-mini, what was measured, by the number in flight."""
    there = {title: reports[name]["runs"] for title, name in CURVES.items() if name in reports}
    return {title: sorted(runs, key=lambda run: run["in_flight"]) for title, runs in there.items()}


def draw_curve(results: Path, images: Path) -> None:
    """Draws tokens a second, and seconds of a request, over the requests in flight, if they are measured."""
    reports = {name: report for name in CURVES.values() if (report := report_of(results, name)) is not None}
    if not reports:
        return
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "dinfer"})
    drawn = Figure(figsize=(8, 3.4), layout="constrained")
    speed, latency = drawn.subplots(1, 2)
    counts = sorted({run["in_flight"] for report in reports.values() for run in report["runs"]})
    for color, (title, runs) in zip(("C0", "C1"), levels(reports).items(), strict=False):
        count = [run["in_flight"] for run in runs]
        rates = [run["steady_tokens_per_s"] or run["tokens_per_s"] for run in runs]
        speed.plot(count, rates, marker="o", ms=4, color=color, label=title)
        speed.plot(count, [run["limit"]["tokens_per_s"] for run in runs], ls="--", lw=1, color=color)
        latency.plot(count, [run["latency_s"]["median"] for run in runs], marker="o", ms=4, color=color, label=title)
        latency.plot(count, [run["latency_s"]["max"] for run in runs], ls=":", lw=1, color=color)
    speed.set(ylabel="tokens a second (dashed: limit)", yscale="log")
    latency.set(ylabel="seconds a request (dotted: worst)", yscale="log")
    for axes in (speed, latency):
        axes.set(xlabel=f"requests in flight, one {next(iter(reports.values()))['hardware']}", xscale="log")
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    speed.legend(frameon=False)
    drawn.savefig(images / "curve.svg", metadata={"Date": None})


def startup(results: Path) -> str:
    """From weights on the card to the first block: nothing compiled before, and once more on the same machine."""
    found = {
        title: json.loads((results / file).read_text()) for title, file in STARTS.items() if (results / file).is_file()
    }
    if not found:
        return "Not measured yet: `python -m benchmarks.startup` does it."
    some = next(iter(found.values()))
    lines = [
        f"LLaDA2-mini's shape, bf16, {some['hardware']}, torch {some['torch']}. Seconds from "
        "weights on the card; to be reached: 8 s, the second time 2 s. The last column is what "
        f"{some['setting']['in_flight']} requests at once take after that, for the first time.",
        "",
        "| a kernel is compiled | commit | start | first block | kernels | several requests |",
        "| --- |" + " --- |" * 5,
    ]
    for title, report in found.items():
        for name, words in (("cold", "first"), ("warm", "second")):
            if name in report:
                phases = {phase["phase"]: phase for phase in report[name]["phases"]}
                one, several = phases["one request"], phases["all in flight"]
                times = f"{one['first_block_s']:.1f} s | {one['kernels']} | {several['seconds']:.1f} s"
                lines.append(f"| {title} | {report['commit']} | {words} | {times} |")
    return "\n".join(lines)
