"""The throughput that is to be reached: runs of `benchmarks.throughput`, whose levels are rows beside goal and limit.

    python -m benchmarks.goals --out benchmarks/results                 # all, about 14 minutes on one H200
    python -m benchmarks.goals --out benchmarks/results --only mini     # one run
    python -m benchmarks.goals --out /tmp/dry --dry-run                 # small shapes on a CPU

Each run is a process of its own and writes `goals-NAME-h200.json` in the folder after each number in flight. So one
that fails or is cut short costs no other, and leaves what it has measured. A file that is whole is left as it is:
`--again` measures it anew. `mini` and `mini-fp8` are also the curve of tokens a second and latency over 1 to 512 in
flight: their levels come in the order of what is wanted most. Compiled kernels are shared; `TRITON_CACHE_DIR` keeps
them for later calls. `python -m benchmarks.report` draws the curve and writes the tables.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
STEADY = "--stagger --favour throughput --rounds 3"
MINI = f"--shape llada2-mini --spread {STEADY} --in-flight 64,128,256,1,8,32,512 --rounds 3,3,3,6,4,3,3 --warm-up 20"
LONG = "--shape llada2-mini --spread --favour throughput --in-flight 1,8 --new 256 --rounds 1"
SDAR = "--block 4 --rate 2 --prompt 512 --new 256"
DUAL = "--shape llada-8b --prompt 128 --new 256 --rate 4"
RUNS = {  # what `benchmarks.throughput` is asked
    "mini": MINI,
    "mini-fp8": f"{MINI} --quantize fp8",
    "8b-batch8": f"{DUAL} --in-flight 8 --rounds 1",
    "8b-fp8-batch8": f"{DUAL} --in-flight 8 --rounds 1 --quantize fp8",
    "8b-64": f"{DUAL} --in-flight 64 --stagger --rounds 3",
    "sdar-4b-1": f"--shape sdar-4b {SDAR} --in-flight 1",
    "sdar-4b-128": f"--shape sdar-4b {SDAR} {STEADY} --in-flight 128",
    "sdar-8b-1": f"--shape sdar-8b {SDAR} --in-flight 1",
    "sdar-8b-128": f"--shape sdar-8b {SDAR} {STEADY} --in-flight 128",
    "tiny-256": "--model tiny --prompts problems --new 96 --length 256 --decoder threshold --dtype float32 "
    "--in-flight 256 --rounds 8",
    "mini-16k": f"{LONG} --prompt 16128",
    "mini-32k": f"{LONG} --prompt 32512",
}


@dataclass(frozen=True, slots=True)
class Row:
    """A figure of a run at a number in flight that is to be reached. A goal below 1 is a share of the limit."""

    work: str
    run: str
    in_flight: int
    figure: str
    goal: float


ROWS = (
    *(Row("LLaDA2-mini, bf16", "mini", rows, "steady tokens/s", goal)
      for rows, goal in ((64, 11000), (128, 14500), (256, 18000))),
    *(Row("LLaDA2-mini, fp8", "mini-fp8", rows, "steady tokens/s", goal)
      for rows, goal in ((64, 17000), (128, 23000), (256, 28000))),
    Row("LLaDA-8B, dual cache, bf16", "8b-batch8", 8, "ms a forward", 13.8),
    Row("LLaDA-8B, dual cache, fp8", "8b-fp8-batch8", 8, "ms a forward", 8.0),
    Row("LLaDA-8B, dual cache, bf16", "8b-64", 64, "tokens/s", 0.75),
    Row("SDAR-4B, blocks of 4", "sdar-4b-1", 1, "step, ms", 2.5),
    Row("SDAR-4B, blocks of 4", "sdar-4b-128", 128, "steady tokens/s", 14000),
    Row("SDAR-8B, blocks of 4", "sdar-8b-1", 1, "step, ms", 4.3),
    Row("SDAR-8B, blocks of 4", "sdar-8b-128", 128, "steady tokens/s", 8500),
    Row("`tiny`, float32", "tiny-256", 256, "GPU busy", 0.9),
    *(Row(f"LLaDA2-mini, prompts of {words}", run, 8, "prefill, share of the limit", 0.6)
      for run, words in (("mini-16k", "16k"), ("mini-32k", "32k"))),
)  # fmt: skip


def level(report: dict[str, Any], in_flight: int) -> dict[str, Any] | None:
    """What a run has measured with so many in flight, if it has come so far."""
    return next((run for run in report["runs"] if run["in_flight"] == in_flight), None)


def figure(name: str, run: dict[str, Any], limit: str = "limit") -> tuple[float | None, float | None]:
    """A figure of a level, and its limit: `limit`, or `limit_warm` of a card that has multiplied for seconds."""
    limits, usual, forwards = run[limit], run[limit]["usual"], run["most_forwards"]
    found: dict[str, tuple[float | None, float | None]] = {
        "steady tokens/s": (run["steady_tokens_per_s"], limits["tokens_per_s"]),
        "ms a forward": (1e3 * run["seconds"] / forwards, 1e3 * limits["all"]["limit_s"] / forwards),
        "tokens/s": (run["tokens_per_s"], limits["tokens_per_s"]),
        "step, ms": (usual["median_ms"], usual["limit_ms"]),
        "GPU busy": (run["device_share"], 1.0),
        "prefill, share of the limit": (limits["prefill"].get("share"), 1.0),
    }
    return found[name]


def told(row: Row, run: dict[str, Any]) -> str:
    value, limit = (number(value) for value in figure(row.figure, run))
    return f"{row.work}, {row.in_flight} in flight: {row.figure} {value}, goal {wanted(row)}, limit {limit}"


def wanted(row: Row) -> str:
    return number(row.goal) if row.goal >= 1 else f"{row.goal:.0%} of the limit"


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.2f}"


def line(name: str, dry: bool) -> list[str]:
    """The arguments of `benchmarks.throughput`; those that come last hold."""
    given = RUNS[name].split()
    if dry:
        from benchmarks.shapes import SMALLER  # needs torch

        small = [SMALLER.get(part, part) for part in given]
        given = [*small, "--device", "cpu", "--prompt", "32", "--new", "32", "--rounds", "1"]
    return given


def file_of(folder: Path, name: str) -> Path:
    return folder / f"goals-{name}-h200.json"


def report_of(folder: Path, name: str) -> dict[str, Any] | None:
    """What a run has written, as far as it came."""
    file = file_of(folder, name)
    return json.loads(file.read_text()) if file.is_file() else None


def measured(name: str, given: argparse.Namespace, kernels: str) -> str | None:
    """Runs `benchmarks.throughput`. Returns why it failed."""
    command = [sys.executable, "-m", "benchmarks.throughput", *line(name, given.dry_run), "--kept-kernels"]
    command += ["--out", str(file_of(given.out, name).resolve())]
    environment = os.environ | {"TRITON_CACHE_DIR": kernels}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=given.limit, check=False
        )
    except subprocess.TimeoutExpired:
        return f"took longer than {given.limit:.0f} s"
    return (done.stderr[-2000:] or f"ended with {done.returncode}") if done.returncode else None


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--again", action="store_true", help="measure anew what is there")
    parser.add_argument("--limit", type=float, default=400, help="seconds that a run may take")
    parser.add_argument("--dry-run", action="store_true")
    given = parser.parse_args(args)
    given.out.mkdir(parents=True, exist_ok=True)
    failed = []
    with tempfile.TemporaryDirectory(prefix="dinfer-kernels-") as scratch:
        for name in given.only:
            report = report_of(given.out, name)
            if given.again or report is None or len(report["runs"]) < len(report["setting"]["in_flight"]):
                error = measured(name, given, os.environ.get("TRITON_CACHE_DIR", scratch))
                if error is not None:
                    failed.append(name)
                    print(f"{name}: {error}", flush=True)
                report = report_of(given.out, name)
            for row in ROWS:
                if row.run == name and report is not None and (run := level(report, row.in_flight)) is not None:
                    print(told(row, run), flush=True)
    if failed:
        sys.exit(f"benchmarks.goals: {', '.join(failed)} failed")


if __name__ == "__main__":
    main()
