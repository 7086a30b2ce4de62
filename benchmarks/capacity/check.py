"""Compares the simulator with measurements of the same closed loop.

python -m benchmarks.capacity.check --steps FILE.json --measured FILE.json
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from benchmarks.capacity.cluster import Cluster, Router
from benchmarks.capacity.denoising import Denoising
from benchmarks.capacity.replica import FrontEnd, Setting
from benchmarks.capacity.steps import StepTimes, Unmeasured
from benchmarks.capacity.traffic import Asked
from benchmarks.provenance import command_line, provenance
from benchmarks.throughput import lengths


def compared(times: StepTimes, setting: dict[str, Any], run: dict[str, Any], front: FrontEnd) -> dict[str, Any]:
    """A closed loop, measured and simulated, of an engine, or of clients and a server."""
    denoising = Denoising.at_rate(setting["rate"], setting["block"])
    how = Setting(
        rows=run["in_flight"], gather=setting.get("gather", setting.get("favour") == "throughput"),
        front=front,
    )  # fmt: skip
    cluster = Cluster(times, denoising, how, Router(), replicas=1, seed=0)
    found = cluster.closed_loop(asked(setting, run), run["in_flight"])
    pairs = {
        "tokens_per_s": (run["tokens_per_s"], found["tokens_per_s"]),
        "first_block_s": (run.get("first_block_s", {}).get("median"), found["first_block_s"]["p50"]),
        "first_text_s": (run.get("first_piece_ms", {}).get("p50", 0) / 1e3 or None, found["first_text_s"]["p50"]),
        "latency_s": (run.get("latency_s", {}).get("median"), found["latency_s"]["p50"]),
    }
    return {"beyond": found["beyond"]} | {
        name: {"measured": measured, "simulated": simulated, "off": simulated / measured - 1}
        for name, (measured, simulated) in pairs.items()
        if measured is not None
    }


def asked(setting: dict[str, Any], run: dict[str, Any]) -> list[Asked]:
    """The requests of a run."""
    rounds = -(-run["requests"] // run["in_flight"])
    each = lengths(run["in_flight"], rounds, setting["new"], setting["stagger"])
    return [Asked(0.0, setting["prompt"], new) for new in each[: run["requests"]]]


def main(args: list[str] | None = None) -> None:
    parser = command_line(__doc__)
    parser.add_argument("--steps", type=Path, nargs="+", required=True)
    parser.add_argument("--reach", type=float, default=0.0, help="share by which a step may exceed what was measured")
    parser.add_argument("--measured", type=Path, nargs="+", required=True)
    parser.add_argument("--front-end", type=Path, help="the file of its CPU times, for servers")
    given = parser.parse_args(args)
    front = FrontEnd.read(given.front_end) if given.front_end else FrontEnd()
    times, rows = StepTimes.read(*given.steps, reach=given.reach), list[dict[str, Any]]()
    for path in given.measured:
        report = json.loads(path.read_text())
        engine = [("engine", run, FrontEnd()) for run in report["runs"] if "drafts" not in run]
        sent = [*report.get("streams", ()), *(run for run in report["runs"] if "drafts" in run)]  # by serving.load
        streams = [run | {"first_piece_ms": run["ttfb_ms"]} for run in sent if not run["drafts"]]
        served = [("guidellm", run, front) for run in report.get("served", ())]
        for what, run, own in engine + served + [("streams", run, front) for run in streams]:
            row: dict[str, Any] = {"file": path.name, "of": what, "in_flight": run["in_flight"]}
            try:
                row |= compared(times, report["setting"], run, own)
            except Unmeasured as error:
                row |= {"unmeasured": str(error)}
            rows.append(row)
            print(row, flush=True)
    if given.out is not None:
        found = {"setting": vars(given) | {"out": None}, **provenance(torch.device("cpu")), "runs": rows}
        given.out.write_text(json.dumps(found, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
