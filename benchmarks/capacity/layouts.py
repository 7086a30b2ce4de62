"""Two cards as one replica, by tensor parallelism, or as two: which is faster under which load.

    python -m benchmarks.capacity.layouts benchmarks/results/tensor-parallel-h200.json --out FILE.json

It takes the step times of benchmarks.tensor_parallel with one request at a time, so replicas have one row.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from random import Random
from typing import Any

import torch

from benchmarks.capacity.cluster import Cluster, Router
from benchmarks.capacity.denoising import Denoising
from benchmarks.capacity.limits import read
from benchmarks.capacity.replica import Setting
from benchmarks.capacity.steps import StepTimes
from benchmarks.capacity.traffic import Asked, poisson
from benchmarks.provenance import begun, save

BLOCK, PROMPT, NEW = 32, 128, 256  # of benchmarks.tensor_parallel
CARDS = 2
SHARES = (0.2, 0.5, 0.8)  # of the capacity of the better layout
SECONDS, WARM = 400, 20


def times(name: str, case: dict[str, Any], report: dict[str, Any]) -> StepTimes:
    """The steps of a case, by its name in the file: `llada2-mini, bf16, 2 cards`."""
    shape, cards = name.split(", ")[0], int(name.split(", ")[2].split()[0])
    steps = [row | {"canvas": PROMPT + NEW} for row in case["steps"]]
    setting = {"shape": shape, "block": BLOCK, "tensor_parallel": cards}
    rounds = [{"rows": 1, "canvas": PROMPT + NEW, "gap_ms": case["host_ms"]}]
    return StepTimes({**report, "setting": setting, "steps": steps, "rounds": rounds}, name)


def cluster(steps: StepTimes, rate: float, warm: float = 0.0) -> Cluster:
    denoising, setting = Denoising.at_rate(rate, BLOCK), Setting(rows=1)
    return Cluster(steps, denoising, setting, Router(policy="least"), replicas=CARDS // steps.cards, seed=0, warm=warm)


def compared(report: dict[str, Any], rate: float) -> list[dict[str, Any]]:
    """A row for each case and load. All cases of a shape get the same loads."""
    measured = {name: case for name, case in report.items() if isinstance(case, dict) and "steps" in case}
    cases = {name: case for name, case in measured.items() if case.get("case", {}).get("rows", 1) == 1}
    found = []
    for shape in dict.fromkeys(name.split(", ")[0] for name in cases):
        layouts = {name: times(name, case, report) for name, case in cases.items() if name.split(", ")[0] == shape}
        one = [Asked(0.0, PROMPT, NEW)]
        alone = {name: cluster(own, rate).closed_loop(one * 4, 1)["latency_s"]["p50"] for name, own in layouts.items()}
        most = {name: CARDS / own.cards / alone[name] for name, own in layouts.items()}
        for name, own in layouts.items():
            row: dict[str, Any] = {"case": name, "alone_s": alone[name], "tokens_per_s": most[name] * NEW, "loads": []}
            for share in SHARES:
                load = share * max(most.values())
                if load < most[name]:
                    work = poisson(load, PROMPT, NEW, SECONDS, Random(0))
                    row["loads"].append(cluster(own, rate, WARM).open_loop(work, SECONDS) | {"share": share})
            found.append(row)
            print(name, round(alone[name], 3), round(row["tokens_per_s"]), [r["latency_s"] for r in row["loads"]])
    return found


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", type=Path)
    parser.add_argument("--tokens-per-step", type=float, default=2.6)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(args)
    rows = compared(read(given.steps), given.tokens_per_step)
    report = {**begun(given, torch.device("cpu")), "rows": rows}
    save(report, given.out)


if __name__ == "__main__":
    main()
