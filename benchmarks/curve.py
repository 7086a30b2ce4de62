"""Tokens a second and latency over 1 to 512 requests in flight, in bfloat16 and float8: a file, and its figure.

    python -m benchmarks.curve --out benchmarks/results/curve-llada2-mini-h200.json
    python -m benchmarks.curve --out benchmarks/results/curve-llada2-mini-h200.json --draw docs/images/curve.svg
    python -m benchmarks.curve --out /tmp/dry.json --draw /tmp/dry.svg --dry-run          # small shapes on a CPU

Each format is a run of `benchmarks.throughput` with a closed loop, in a process of its own; what a format has reached
when its time is over counts. With `--draw` a file that is there is drawn, and nothing runs. The lines are steady tokens
a second, and the median and the worst latency of a request; dashed, what they would be if every step took the least
time that its bytes or its multiply-adds allow.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.goals import STEADY, run

FORMATS = {"bf16": [], "fp8": ["--quantize", "fp8"]}
IN_FLIGHT = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
DRY = ["--shape", "small-llada2", "--device", "cpu", "--in-flight", "1,2", "--prompt", "32", "--new", "32"]


def drawn(report: dict[str, Any]) -> Any:
    """Two panels: tokens a second, and seconds of a request, over the requests in flight."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.4), layout="constrained")
    speed, latency = figure.subplots(1, 2)
    for color, (name, found) in zip(("C0", "C1"), report["formats"].items(), strict=False):
        runs = found["runs"]
        count = [run["in_flight"] for run in runs]
        rates = [run["steady_tokens_per_s"] or run["tokens_per_s"] for run in runs]
        speed.plot(count, rates, marker="o", ms=4, color=color, label=name)
        speed.plot(count, [run["limit"]["tokens_per_s"] for run in runs], ls="--", lw=1, color=color)
        latency.plot(count, [run["latency_s"]["median"] for run in runs], marker="o", ms=4, color=color, label=name)
        latency.plot(count, [run["latency_s"]["max"] for run in runs], ls=":", lw=1, color=color)
    speed.set(ylabel="tokens a second (dashed: limit)", yscale="log")
    latency.set(ylabel="seconds of a request, median (dotted: worst)", yscale="log")
    for axes in (speed, latency):
        axes.set(xlabel=f"requests in flight, one {report['hardware']}", xscale="log")
        axes.set_xticks(IN_FLIGHT, [str(count) for count in IN_FLIGHT])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    speed.legend(frameon=False)
    return figure


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--draw", type=Path, help="an image file")
    parser.add_argument("--only", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--in-flight", default=",".join(map(str, IN_FLIGHT)))
    parser.add_argument("--limit", type=float, default=560, help="seconds that a format may take")
    parser.add_argument("--dry-run", action="store_true")
    given = parser.parse_args(args)
    report: dict[str, Any] = json.loads(given.out.read_text()) if given.out.is_file() else {"formats": {}}
    for name in given.only if given.draw is None or not report["formats"] else ():
        work = ["--shape", "llada2-mini", "--in-flight", given.in_flight, *STEADY.split(), *FORMATS[name]]
        with tempfile.TemporaryDirectory(prefix="dinfer-curve-") as scratch:
            found, error = run([*work, *(DRY if given.dry_run else [])], Path(scratch), given.limit)
        if "runs" not in found:
            raise SystemExit(f"benchmarks.curve: {name}: {error}")
        report["formats"][name] = found | {"error": error}
        report["hardware"] = found["hardware"]
        given.out.write_text(json.dumps(report, indent=1) + "\n")
        print(name, [(one["in_flight"], round(one["tokens_per_s"])) for one in found["runs"]], error or "", flush=True)
    if given.draw is not None:
        from matplotlib import rcParams

        rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "dinfer"})
        drawn(report).savefig(given.draw, metadata={"Date": None} if given.draw.suffix == ".svg" else None)


if __name__ == "__main__":
    main()
