"""The simulator beside what was measured: the same closed loop, and by how much it is off.

python -m benchmarks.capacity.check --steps FILE.json --measured FILE.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.capacity.cluster import Cluster, Router
from benchmarks.capacity.denoising import Denoising
from benchmarks.capacity.replica import Setting
from benchmarks.capacity.steps import StepTimes, Unmeasured
from benchmarks.capacity.traffic import Asked


def compared(
    times: StepTimes, report: dict[str, Any], run: dict[str, Any], *, per_request: float = 0.0, per_piece: float = 0.0
) -> dict[str, Any]:
    """One closed loop, measured and simulated. `report`: the file that `run` is of."""
    setting = report["setting"]
    denoising = Denoising.at_rate(setting["rate"], setting["block"])
    how = Setting(rows=run["in_flight"], gather=setting["gather"], per_request=per_request, per_piece=per_piece)
    cluster = Cluster(times, denoising, how, Router(), replicas=1, seed=0)
    found = cluster.closed_loop(asked(setting, run), run["in_flight"])
    row = {"in_flight": run["in_flight"], "measured": round(run["tokens_per_s"], 1)}
    row |= {"simulated": round(found["tokens_per_s"], 1), "off": found["tokens_per_s"] / run["tokens_per_s"] - 1}
    row["first_block_s"] = run.get("first_block_s", {}).get("median"), found["first_block_s"]["p50"]
    row["latency_s"] = run.get("latency_s", {}).get("median"), found["latency_s"]["p50"]
    return row


def asked(setting: dict[str, Any], run: dict[str, Any]) -> list[Asked]:
    """The requests of a run; with `stagger`, the first ones are of all lengths, as in benchmarks.throughput."""
    prompt, new, some = setting["prompt"], setting["new"], max(setting["new"] // 16, 1)
    short = run["in_flight"] if setting["stagger"] else 0
    return [Asked(0.0, prompt, some * (1 + i % 16) if i < short else new) for i in range(run["requests"])]


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=Path, required=True)
    parser.add_argument("--measured", type=Path, required=True)
    given = parser.parse_args(args)
    times, report = StepTimes.read(given.steps), json.loads(given.measured.read_text())
    for run in report["runs"]:
        try:
            print(compared(times, report, run))
        except Unmeasured as error:
            print(f"{run['in_flight']} in flight: {error}")


if __name__ == "__main__":
    main()
