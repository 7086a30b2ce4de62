"""Compares guidellm's measurements of a server with its engine alone (benchmarks.serving.full_size).

    python -m benchmarks.serving.ratio engine.json guidellm-1.json guidellm-64.json --out serving.json

`ratio` compares the throughput of all finished requests, from the first one's start to the last one's end. Then the
last requests have the card to themselves. `steady_ratio` compares what is written until the last request starts, while
all are in flight.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.provenance import save

TIMES = {"first_piece_ms": "time_to_first_token_ms", "between_tokens_ms": "inter_token_latency_ms"}


def steady(done: list[dict[str, Any]]) -> float | None:
    """Tokens a second until the last request starts, with a request's tokens spread evenly from the first on."""
    start, end = (bound(r["request_start_time"] for r in done) for bound in (min, max))
    tokens = 0.0
    for r in done:
        first = r["request_start_time"] + r["time_to_first_token_ms"] / 1e3
        share = (end - first) / max(r["request_end_time"] - first, 1e-9)
        tokens += r["output_tokens"] * min(max(share, 0.0), 1.0)
    return tokens / (end - start) if tokens else None


def row(benchmark: dict[str, Any], engine: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """The figures of one of guidellm's benchmarks. `engine`: the engine's own, by the number in flight."""
    done, totals = benchmark["requests"]["successful"], benchmark["metrics"]["request_totals"]
    seconds = max(r["request_end_time"] for r in done) - min(r["request_start_time"] for r in done)
    in_flight = benchmark["config"]["strategy"]["streams"]
    rate, alone = sum(r["output_tokens"] for r in done) / seconds, engine[in_flight]
    settled, own = steady(done), alone["steady_tokens_per_s"]
    times = {ours: benchmark["metrics"][theirs]["successful"]["percentiles"] for ours, theirs in TIMES.items()}
    return {
        "in_flight": in_flight, "requests": len(done), "failed": totals["errored"] + totals["incomplete"],
        "tokens_per_s": round(rate, 1), "engine_tokens_per_s": round(alone["tokens_per_s"], 1),
        "ratio": round(rate / alone["tokens_per_s"], 4),
        "steady_ratio": round(settled / own, 4) if settled and own else None,
        **{name: {key: round(found[key], 2) for key in ("p50", "p95", "p99")} for name, found in times.items()},
    }  # fmt: skip


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path)
    parser.add_argument("guidellm", type=Path, nargs="+")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(args)
    report = json.loads(given.engine.read_text())
    engine = {run["in_flight"]: run for run in report["runs"]}
    found = [json.loads(path.read_text()) for path in given.guidellm]
    rows = [row(benchmark, engine) for document in found for benchmark in document["benchmarks"]]
    result = report | {"guidellm": found[0]["metadata"]["guidellm_version"], "served": rows}
    for one in rows:
        print(one)
    save(result, given.out)


if __name__ == "__main__":
    main()
