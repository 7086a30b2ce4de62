"""The tables of benchmarks/results/capacity.md, from the files in benchmarks/results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

USUAL = 0.8  # of the capacity of a card
NETWORK = 100e9  # bits a second of one network card
POLICIES = {"turns": "in turn", "two_choices": "the less loaded of two", "least": "the least loaded"}
NAMES = {
    "tokens_per_s": "tokens/s",
    "first_text_s": "first text",
    "first_block_s": "first block",
    "latency_s": "answer",
}


def checked(report: dict[str, Any]) -> str:
    """Measurements and simulations."""
    keys = ("tokens_per_s", "first_block_s", "first_text_s", "latency_s")
    lines = [
        "| measured | in flight | " + " | ".join(f"{NAMES[key]}: measured, simulated" for key in keys) + " |",
        "| --- | --- |" + " --- |" * len(keys),
    ]
    for row in report["runs"]:
        what = f"{row['of']}, `{row['file'].removesuffix('.json')}` | {row['in_flight']}"
        if "unmeasured" in row:
            lines.append(f"| {what} | not simulated: {row['unmeasured'].partition(': ')[0]} |" + " |" * (len(keys) - 1))
            continue
        beyond = f" ({row['beyond']:.0%} of its steps are larger than measured)" if row["beyond"] else ""
        lines.append(f"| {what}{beyond} | " + " | ".join(_pair(key, row.get(key)) for key in keys) + " |")
    return "\n".join(lines)


def _pair(key: str, pair: dict[str, float] | None) -> str:
    if pair is None:
        return "-"
    form = "{:.0f}" if key == "tokens_per_s" else "{:.3f} s"
    return f"{form.format(pair['measured'])}, {form.format(pair['simulated'])} ({100 * pair['off']:+.1f}%)"


def spread(seconds: dict[str, float]) -> str:
    """Median and 99th percentile."""
    return f"{seconds['p50']:.2f} s, {seconds['p99']:.2f} s"


def loads(report: dict[str, Any]) -> str:
    """One card at its usual load, and at its capacity."""
    lines = [
        "| rows | most, requests/s | at 80% of it: tokens/s | first block, median and 99% | answer, median and 99% "
        "| card-hours a million tokens |",
        "| --- |" + " --- |" * 5,
    ]
    for row in report["curves"]:
        if row["share"] == USUAL:
            lines.append(
                f"| {row['rows']} | {row['most']:.1f} | {row['tokens_per_s']:.0f} "
                f"| {spread(row['first_block_s'])} | {spread(row['latency_s'])} "
                f"| {1e6 / 3600 / row['tokens_per_s']:.3f} |"
            )
    return "\n".join(lines)


def cards(report: dict[str, Any]) -> str:
    """Many cards under the same load a card, and the load on shared parts."""
    lines = [
        "| cards | tokens/s | first block, 99%: in turn | less loaded of two | one proxy | controller | to clients |",
        "| --- |" + " --- |" * 6,
    ]
    for count in dict.fromkeys(row["cards"] for row in report["scale"]):
        own = {row["policy"]: row for row in report["scale"] if row["cards"] == count}
        row = [*own.values()][-1]
        shared, late = row["shared"], [f"{own[p]['first_block_s']['p99']:.2f} s" if p in own else "-" for p in own]
        late += ["-"] * (2 - len(late))
        lines.append(
            f"| {count:,} | {row['tokens_per_s']:,.0f} | {late[0]} | {late[1]} | {shared['proxy']:.1f} cores "
            f"| {shared['controller']:.2f} cores | {shared['bits_per_s'] / 1e9:.3f} Gbit/s |"
        )
    first, last = (row for row in (report["scale"][0], report["scale"][-1]))
    alone, many = first["shared"], last["shared"]
    each = (many["controller"] - alone["controller"]) / (last["cards"] - first["cards"])
    lines.append(
        f"| full with, if all grows in proportion | | | | {many['cards_of_proxy']:.1f} cards "
        f"| {(1 - alone['controller']) / each:,.0f} replicas "
        f"| {last['cards'] * NETWORK / many['bits_per_s']:,.0f} cards at {NETWORK / 1e9:.0f} Gbit/s |"
    )
    return "\n".join(lines)


def traced(report: dict[str, Any]) -> str:
    """Many cards under a trace."""
    lines = [
        "| cards | requests go | requests/s | tokens/s | first block, median and 99% | answer, median and 99% |",
        "| --- |" + " --- |" * 5,
    ]
    for row in report["trace"]:
        lines.append(
            f"| {row['cards']} | {POLICIES[row['policy']] if row['cards'] > 1 else '-'} | {row['requests_per_s']:.0f} "
            f"| {row['tokens_per_s']:,.0f} | {spread(row['first_block_s'])} | {spread(row['latency_s'])} |"
        )
    return "\n".join(lines)


def degrees(report: dict[str, Any]) -> str:
    """Eight cards as replicas of one, two, four or eight."""
    loads = (0.1, 0.3, 0.5, 0.7, 0.9)
    lines = [
        "| eight cards | an answer alone | most, requests/s | "
        + " | ".join(f"at {share:.0%}" for share in loads)
        + " |",
        "| --- |" + " --- |" * (2 + len(loads)),
    ]
    for row in report["rows"]:
        own = {load["share"]: load["latency_s"] for load in row["loads"]}
        cells = [f"{own[share]['p50']:.2f} s" if share in own else "too much" for share in loads]
        count = report["of_cards"] // row["cards"]
        lines.append(
            f"| {row['shape']}, {row['format']}: {count} x {row['cards']}{'' if row['measured'] else ' *'} "
            f"| {row['alone_s']:.2f} s | {row['most']:.0f} | {' | '.join(cells)} |"
        )
    return "\n".join(lines)


def layouts(report: dict[str, Any]) -> str:
    """Two cards as one replica or as two, one request in each."""
    shares = sorted({load["share"] for row in report["rows"] for load in row["loads"]})
    lines = [
        "| two cards | an answer alone | most, tokens/s | " + " | ".join(f"at {share:.0%}" for share in shares) + " |",
        "| --- |" + " --- |" * (2 + len(shares)),
    ]
    for row in report["rows"]:
        loads = {load["share"]: load["latency_s"] for load in row["loads"]}
        cells = [spread(loads[share]) if share in loads else "too much" for share in shares]
        kind = "one replica" if "2 cards" in row["case"] else "a replica each"
        lines.append(
            f"| {row['case']}: {kind} | {row['alone_s']:.2f} s | {row['tokens_per_s']:.0f} | {' | '.join(cells)} |"
        )
    return "\n".join(lines)


def experts(reports: list[dict[str, Any]]) -> str:
    """Steps on two cards, with experts divided and dealt out whole, by the number of requests."""
    took: dict[int, dict[str, float]] = {}
    for found in (found for report in reports for found in report.values() if isinstance(found, dict)):
        case = found.get("case")
        if case and (case["shape"], case["cards"], case["quantize"], case["sums"]) == ("llada2-mini", 2, None, "fused"):
            took.setdefault(case["rows"], {})[case["experts"]] = found["with_host_ms"]
    lines = ["| requests | divided experts | whole experts |", "| --- | --- | --- |"]
    for rows, each in sorted(took.items()):
        cells = [f"{each[kind]:.2f} ms" if kind in each else "-" for kind in ("divided", "dealt out")]
        lines.append(f"| {rows} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def sections(results: Path) -> dict[str, str]:
    """The generated sections of benchmarks/results/capacity.md by name."""
    names = ("check", "llada2-mini", "layouts", "trace", "degrees")
    check, scaling, layout, trace, degree = (
        json.loads((results / f"scaling-{name}-h200.json").read_text()) for name in names
    )
    setting = scaling["setting"]
    steps = ", ".join(f"`{Path(path).stem}`" for path in setting["steps"])
    about = (
        f"LLaDA2-mini's shape, {setting['prompt']} tokens in and {setting['new']} out, {setting['tokens_per_step']} "
        f"tokens a step, `runtime.gather`, Poisson arrivals; step times of {steps}. `{scaling['command']}`."
    )
    of_two_cards = sorted(
        results.glob("scaling-check-two-cards*.json"), reverse=True
    )  # the newest has the shortest name
    pairs = [pair for path in of_two_cards for pair in json.loads(path.read_text())["runs"]]
    divided = ["tensor-parallel-fused-h200.json", *sorted(path.name for path in results.glob("tensor-parallel-rows*"))]
    return {
        "experts": experts([json.loads((results / name).read_text()) for name in divided]),
        "checked": checked(check),
        "checked_two_cards": checked({"runs": pairs}),
        "loads": f"{about}\n\n{loads(scaling)}",
        "cards": cards(scaling),
        "layouts": layouts(layout),
        "trace": f"`{trace['command']}`.\n\n{traced(trace)}",
        "degrees": degrees(degree),
    }
