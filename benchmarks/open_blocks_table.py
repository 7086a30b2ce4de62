"""Tables of open blocks and candidates for benchmarks/results/blocks.md: what a step costs and what it gains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

WANTED = {(2, 0): 1.06, (4, 0): 1.12, (1, 4): 1.12}  # by blocks and candidates: the highest ratio to the first step
SCRIPTED = 2.46  # tokens per forward of one block, as in the comparisons of speed
BLOCK = 32
SPECULATION = ("speculation-tiny",)


def load(results: Path, name: str) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((results / f"{name}.json").read_text())
    return report


def open_blocks(results: Path) -> str:
    """The step of each run, the gain of candidates, and tokens a second with one block and with several."""
    report = load(results, "open-blocks-h200")
    about = (
        f"One request of the shape {report['setting']['shape']} with random weights in bfloat16, the dual cache, "
        f"prompt {report['setting']['prompt']} + {report['setting']['new']} new, blocks of {BLOCK}, CUDA graphs, "
        f"{report['hardware']}, torch {report['torch']}, commit {report['commit']}."
    )
    return "\n\n".join([about, steps(report), parts(report), candidates(results, report), rates(results, report)])


def steps(report: dict[str, Any]) -> str:
    """The time of a window step, and its ratio to that of one block."""
    lines = ["| open blocks | candidates | positions | window step | of the first | wanted |", "| --- |" + " --- |" * 5]
    for run in report["runs"]:
        wanted = WANTED.get((run["blocks"], run["candidates"]))
        lines.append(
            f"| {run['blocks']} | {run['candidates']} | {positions(run)} | {run['step_ms']:.2f} ms "
            f"| {run['ratio']:.2f} | {'-' if wanted is None else f'{wanted:.2f}'} |"
        )
    return "\n".join(lines)


def parts(report: dict[str, Any]) -> str:
    """What the parts of a step take more than in the step with one block."""
    first, *others = report["runs"]
    names = [name for name, us in first["parts_us"].items() if us]
    lines = [
        "Where the rest of the time goes: microseconds more than in the first step, by part.",
        "",
        "| open blocks | candidates | " + " | ".join(names) + " |",
        "| --- | --- |" + " --- |" * len(names),
    ]
    for run in others:
        cells = [f"{run['parts_us'][name] - first['parts_us'][name]:+.0f}" for name in names]
        lines.append(f"| {run['blocks']} | {run['candidates']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def positions(run: dict[str, Any]) -> int:
    """Positions that a step computes for its row."""
    return int(run["width"] * (1 + run["candidates"]))


def candidates(results: Path, report: dict[str, Any]) -> str:
    """By how much candidates divide forwards and multiply the step, and the gain."""
    timed = {run["candidates"]: run for run in report["runs"] if run["candidates"]}
    alike = {positions(run) // BLOCK - 1: run for run in report["runs"] if not run["candidates"] and run["blocks"] > 1}
    rows = [row for name in SPECULATION for row in load(results, name)["rows"] if row["cache"] == "dual"]
    lines = [
        "What candidates gain: they divide the forwards of `tiny` (`threshold` 0.9, `dual`, 60 held-out problems) by "
        "one number, and multiply the step above by another. *as blocks*: the step with so many candidates was not "
        "timed, and the time is that of as many positions in open blocks.",
        "",
        "| candidates | positions | forwards divided by | step multiplied by | both | step timed |",
        "| --- |" + " --- |" * 5,
    ]
    for row in sorted(rows, key=lambda row: row["candidates"]):
        count = row["candidates"]
        run = timed.get(count) or alike.get(count)
        cells = ["-", "-", "no"]
        if run is not None:
            gain = row["divided_by"] / run["ratio"]
            cells = [f"{run['ratio']:.2f}", f"{gain:.2f} times as fast", "yes" if count in timed else "as blocks"]
        lines.append(f"| {count} | {BLOCK * (1 + count)} | {row['divided_by']:.2f} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def rates(results: Path, report: dict[str, Any]) -> str:
    """Tokens a second with one block, and with several at the TPF ratio of a small model."""
    runs = {run["blocks"]: run for run in report["runs"] if not run["candidates"]}
    tiny = [row for row in load(results, "tiny-everything-h200")["rows"] if row["cache"] == "none"]
    untrained = next(row for row in tiny if row["iteration"] == "blockwise" and row["options"] == "threshold=0.9")
    measured = by_blocks(load(results, "multi-block-tiny-d2f-h200")["rows"])
    measured |= by_blocks(load(results, "multi-block-tiny-d2f-two-cpu")["rows"])
    new = report["setting"]["new"]
    lines = [
        "Tokens a second, from these step times, the host and the refreshes of the dual cache included. TPF is "
        f"scripted: random weights decode nothing. One block has {SCRIPTED}, as in the other comparisons. **The other "
        "lines are projections and no measurement**: they multiply it by a ratio of TPF that was measured on the model "
        "of 5.5 million parameters in the box. No adapter of LLaDA-8B was decoded.",
        "",
        "| open blocks | ratio of TPF | TPF | tokens/s | which ratio |",
        "| --- |" + " --- |" * 4,
        f"| 1 | 1 | {SCRIPTED} | {rate(runs[1], SCRIPTED, new):.0f} | as scripted |",
    ]
    for blocks, tpf in sorted(measured.items()):
        if blocks == 1 or blocks not in runs:
            continue
        for below, words in (
            (measured[1], "`tiny-d2f`, against itself with one block"),
            (untrained["tpf"], "`tiny-d2f`, against `tiny` with one block: training counts, too"),
        ):
            raised = SCRIPTED * tpf / below
            lines.append(
                f"| {blocks} | {tpf:.2f} / {below:.2f} = {tpf / below:.2f} | {raised:.2f} "
                f"| {rate(runs[blocks], raised, new):.0f} | {words}; `threshold` 0.9 |"
            )
    return "\n".join(lines)


def by_blocks(rows: list[dict[str, Any]]) -> dict[int, float]:
    """TPF at threshold 0.9 with the iteration's defaults, by open blocks."""
    found = {}
    for row in rows:
        if row["options"] != "threshold=0.9" or "add_at" in row["iteration_options"]:
            continue
        options = dict(option.split("=") for option in row["iteration_options"].split())
        if row["iteration"] in ("blockwise", "multi_block"):
            found[int(options.get("blocks", 1))] = float(row["tpf"])
    return found


def rate(run: dict[str, Any], tpf: float, new: int) -> float:
    """Tokens a second of a generation of `new` tokens with as many refreshes as the run."""
    full = next(step for step in run["steps"] if step["phase"] == "FULL")
    forwards = new / tpf
    refreshes = min(full["launches"], forwards)
    taken = refreshes * full["median_ms"] + (forwards - refreshes) * run["step_ms"] + forwards * run["host_ms"]
    return 1e3 * new / float(taken)
