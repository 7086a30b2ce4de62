"""Runs the work of `make demo` at this commit and at another, in turns: seconds, their ratio, and equal answers.

    git worktree add /tmp/base 5453251
    python -m benchmarks.demo --base /tmp/base --threads 2 --out benchmarks/results/demo-cpu.json

Each run is a new process, whose first problems are warm-up. CPU time counts all its threads, so that other programs
disturb little. It also counts threads that wait: with `--threads 2` and idle cores, wall time says more.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

DECODERS = {
    "fixed, steps=32": {"name": "fixed", "steps": 32},
    "threshold 0.9": {"name": "threshold", "threshold": 0.9},
}
HERE = Path(__file__).resolve().parents[1]
NEW = 128


def solve(work: dict[str, Any]) -> dict[str, Any]:
    """The figures of one process, with the `dinfer` that it imports."""
    import torch

    import dinfer

    torch.set_num_threads(work["threads"])
    pipe = dinfer.load(
        "tiny", device="cpu", cache="dual", iteration={"name": "blockwise", "block": 32}, decoder=work["decoder"],
        runtime=dinfer.Runtime(rows=32),
    )  # fmt: skip
    pipe.generate(work["problems"][:2], max_new_tokens=NEW)
    began, cpu = time.perf_counter(), time.process_time()
    results = pipe.generate(work["problems"], max_new_tokens=NEW)
    return {
        "wall": time.perf_counter() - began, "cpu": time.process_time() - cpu,
        "forwards": sum(result.counts.forwards for result in results), "texts": [result.text for result in results],
    }  # fmt: skip


def run(checkout: Path, work: dict[str, Any]) -> dict[str, Any]:
    """Runs a process with the package of a checkout."""
    environment = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": str(work["threads"])}
    done = subprocess.run(
        [sys.executable, __file__, "--child"], cwd=checkout, env=environment, input=json.dumps(work),
        capture_output=True, text=True, timeout=1800,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{checkout}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, help="a checkout of the other commit")
    parser.add_argument("--count", type=int, default=64, help="problems")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(solve(json.loads(sys.stdin.read()))))
        return
    if given.base is None:
        raise SystemExit("--base: give the folder of a checkout of the other commit")
    import torch

    from benchmarks.provenance import provenance
    from dinfer.demo.problems import generate

    problems = [problem.question for problem in generate("heldout", given.count, 4)]
    runs = []
    for name, decoder in DECODERS.items():
        work = {"decoder": decoder, "threads": given.threads, "problems": problems}
        pairs = [(run(given.base, work), run(HERE, work)) for _ in range(given.rounds)]
        same = sum(a == b for a, b in zip(pairs[0][0]["texts"], pairs[0][1]["texts"], strict=True))
        one: dict[str, Any] = {"decoder": name, "problems": given.count, "equal answers": same}
        one["forwards"] = [side["forwards"] for side in pairs[0]]
        for clock in ("wall", "cpu"):
            base, here = ([pair[side][clock] for pair in pairs] for side in (0, 1))
            one[clock] = {"base": base, "here": here, "ratio": statistics.median(here) / statistics.median(base)}
        runs.append(one)
        print(json.dumps(one), flush=True)
    commit = subprocess.run(["git", "-C", given.base, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    report = {
        "base": commit.stdout.strip(), "threads": given.threads, "runs": runs, "load": os.getloadavg(),
        "cpu": torch.backends.cpu.get_cpu_capability(), **provenance(torch.device("cpu")),
    }  # fmt: skip
    if given.out is not None:
        given.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
