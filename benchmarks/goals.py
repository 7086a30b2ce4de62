"""The throughput that is to be reached, row by row, from one session: each beside its goal and its limit.

    python -m benchmarks.goals --out benchmarks/results/goals-h200.json
    python -m benchmarks.goals --out /tmp/goals.json --only mini-64 mini-fp8-64      # some rows
    python -m benchmarks.goals --out /tmp/dry.json --dry-run                         # small shapes on a CPU

A row is a run of `benchmarks.throughput`, whose arguments stand in `ROWS`, in a process of its own: one that fails or
has no room ends alone. All share their compiled kernels, of which the first has none: so `start` comes first, and
`start-again` is a second start. Rows are added to the file as they end. A file that is there is gone on with: `--again`
repeats what it holds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
STEADY = "--spread --stagger --settle --gather"
LONG = "--spread --settle --in-flight 1,8 --new 256 --rounds 1"
SDAR = "--block 4 --rate 2 --prompt 512 --new 256"
DUAL = "--shape llada-8b --prompt 128 --new 256 --rate 4"
SMALL = {"llada-8b": "small", "llada2-mini": "small-llada2", "sdar-4b": "small-sdar", "sdar-8b": "small-sdar"}


@dataclass(frozen=True, slots=True)
class Row:
    """A run of `benchmarks.throughput`, which of its figures is meant, and what that is to be."""

    arguments: str
    figure: str
    goal: float | None = None


ROWS = {
    "start": Row(f"--shape llada2-mini {STEADY} --in-flight 1 --new 64 --rounds 1", "first block, s", 8.0),
    "start-again": Row(f"--shape llada2-mini {STEADY} --in-flight 1 --new 64 --rounds 1", "first block, s", 2.0),
    **{
        f"mini-{name}{rows}": Row(f"--shape llada2-mini {STEADY} --in-flight {rows} {more}", "steady tokens/s", goal)
        for name, more, goals in (
            ("", "", {64: 11000, 128: 14500, 256: 18000}),
            ("fp8-", "--quantize fp8", {64: 17000, 128: 23000, 256: 28000}),
        )
        for rows, goal in goals.items()
    },
    "8b-batch8": Row(f"{DUAL} --in-flight 8 --rounds 1", "ms a forward", 13.8),
    "8b-fp8-batch8": Row(f"{DUAL} --in-flight 8 --rounds 1 --quantize fp8", "ms a forward", 8.0),
    "8b-64": Row(f"{DUAL} --in-flight 64 --stagger", "share of the limit", 0.75),
    "sdar-4b-1": Row(f"--shape sdar-4b {SDAR} --in-flight 1", "step, ms", 2.5),
    "sdar-4b-128": Row(f"--shape sdar-4b {SDAR} {STEADY.removeprefix('--spread ')} --in-flight 128", "steady tokens/s",
                       14000),
    "sdar-8b-1": Row(f"--shape sdar-8b {SDAR} --in-flight 1", "step, ms", 4.3),
    "sdar-8b-128": Row(f"--shape sdar-8b {SDAR} {STEADY.removeprefix('--spread ')} --in-flight 128", "steady tokens/s",
                       8500),
    "tiny-256": Row("--model tiny --prompts problems --new 96 --length 256 --decoder threshold --dtype float32 "
                    "--in-flight 256 --rounds 8", "GPU busy", 0.9),
    "mini-16k": Row(f"--shape llada2-mini {LONG} --prompt 16128", "prefill, share of the limit", 0.6),
    "mini-32k": Row(f"--shape llada2-mini {LONG} --prompt 32512", "prefill, share of the limit", 0.6),
}  # fmt: skip


def figure(row: Row, report: dict[str, Any]) -> tuple[float | None, float | None]:
    """The figure of the last run, and its limit."""
    run = report["runs"][-1]
    limit, usual = run["limit"], run["limit"]["usual"]
    share = limit["all"]["limit_s"] / run["seconds"]
    forwards = run["most_forwards"]
    found: dict[str, tuple[float | None, float | None]] = {
        "first block, s": (report["cold"]["first_block_s"], None),
        "steady tokens/s": (run["steady_tokens_per_s"], limit["tokens_per_s"]),
        "ms a forward": (1e3 * run["seconds"] / forwards, 1e3 * limit["all"]["limit_s"] / forwards),
        "share of the limit": (share, 1.0),
        "step, ms": (usual["median_ms"], usual["limit_ms"]),
        "GPU busy": (run["device_share"], 1.0),
        "prefill, share of the limit": (limit["prefill"].get("share"), 1.0),
    }
    return found[row.figure]


def told(name: str, row: Row, report: dict[str, Any]) -> str:
    """A line for each number in flight: the figure, goal and limit, and what the steps took."""
    value, limit = figure(row, report)
    lines = [f"{name}: {row.figure} {_number(value)}, goal {_number(row.goal)}, limit {_number(limit)}, "
             f"first block {report['cold']['first_block_s']:.1f} s"]  # fmt: skip
    for run in report["runs"]:
        least, usual, prefill = run["limit"], run["limit"]["usual"], run["limit"]["prefill"]
        keys = usual["keys_gb"]
        lines += [
            f"    {run['in_flight']} in flight: {run['tokens_per_s']:.0f} tokens/s, limit {least['tokens_per_s']:.0f}; "
            f"device busy {100 * run['device_share']:.0f}%; prefill "
            f"{prefill.get('positions_per_s', 0):.0f} positions/s, {100 * prefill.get('share', 0):.0f}% of the limit",
            f"    {usual['phase']} step of {usual['rows']:.0f} x {usual['width']}: {usual['median_ms']:.2f} ms; by "
            f"bytes {usual['bytes_ms']:.2f} ms, multiply-adds {usual['flops_ms']:.2f} ms; keys {keys:.2f} GB",
        ]
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.2f}"


def line(row: Row, dry: bool) -> list[str]:
    """The arguments of `benchmarks.throughput`; those that come last hold."""
    given = row.arguments.split()
    if dry:
        names = [SMALL.get(part, part) for part in given]
        given = [*names, "--device", "cpu", "--in-flight", "3", "--prompt", "64", "--new", "32"]
    return given


def run(arguments: list[str], scratch: Path, limit: float) -> tuple[dict[str, Any], str | None]:
    """What a run of `benchmarks.throughput` reports, as far as it came, and why it failed."""
    out = scratch / "row.json"
    out.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.throughput", *arguments, "--kept-kernels", "--out", str(out)]
    environment = os.environ | {"TRITON_CACHE_DIR": str(scratch / "kernels")}
    error = None
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit, check=False
        )
        error = done.stderr[-2000:] or f"ended with {done.returncode}" if done.returncode else None
    except subprocess.TimeoutExpired:
        error = f"took longer than {limit:.0f} s"
    return json.loads(out.read_text()) if out.is_file() else {}, error


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--again", action="store_true", help="repeat rows that the file has")
    parser.add_argument("--limit", type=float, default=300, help="seconds that a row may take")
    parser.add_argument("--dry-run", action="store_true")
    given = parser.parse_args(args)
    found: dict[str, Any] = json.loads(given.out.read_text()) if given.out.is_file() else {}
    with tempfile.TemporaryDirectory(prefix="dinfer-goals-") as scratch:
        for name in given.only:
            if name in found and "error" not in found[name] and not given.again:
                continue
            row, began = ROWS[name], time.perf_counter()
            report, error = run(line(row, given.dry_run), Path(scratch), given.limit)
            if error is None:
                value, limit = figure(row, report)
                report |= {"figure": row.figure, "value": value, "goal": row.goal, "limit": limit}
            found[name] = report | ({"error": error} if error else {}) | {"wall_s": time.perf_counter() - began}
            given.out.write_text(json.dumps(found, indent=1) + "\n")
            print(f"{name}: {error}" if error else told(name, row, report), flush=True)
    if failed := [name for name in given.only if "error" in found[name]]:
        sys.exit(f"benchmarks.goals: {', '.join(failed)} failed")


if __name__ == "__main__":
    main()
