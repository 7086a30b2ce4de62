"""Measures the input of the simulator: times of steps by shape with their spread, and the host's times.

    python -m benchmarks.capacity.measure --shape llada2-mini --spread --favour throughput --out FILE.json
    python -m benchmarks.capacity.measure --shape small-llada2 --device cpu --in-flight 1,2 --prompts-of 40 --new 64

For each prompt length and each number in flight, all requests enter at once and run in step, so that each shape comes
up often. The first run is eager, the second captures graphs, and the next three are timed. The same without a network
gives the host's time of a round. Other arguments are those of benchmarks.throughput.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks import throughput
from benchmarks.clock import Clock, milliseconds
from benchmarks.feeds import Hollow, random_prompts
from benchmarks.provenance import provenance
from dinfer import Pipeline
from dinfer.core.engine.runtime import Runtime
from dinfer.core.engine.scheduler.grouping import PrefillBatching
from dinfer.core.recipe.recipe import Recipe

QUANTILES = (5, 25, 50, 75, 95)  # percent
WARM_UP, TIMED = 2, 3  # runs


def quantiles(values: list[float]) -> list[float]:
    """The times at `QUANTILES`, in milliseconds."""
    at = statistics.quantiles(values, n=100, method="inclusive")
    return [round(at[percent - 1], 4) for percent in QUANTILES]


def table(clock: Clock, canvas: int) -> list[dict[str, Any]]:
    """Mean and quantiles of the time of each shape that every run had, without the launches that captured a graph."""
    if clock.cuda:
        torch.cuda.synchronize()
    found = defaultdict(list)
    for place, (shape, _, begin, end) in enumerate(clock.marks):
        if place not in clock.captures:
            found[shape.phase.name, shape.lanes, shape.width].append(milliseconds(begin, end))
    return [
        {
            "phase": phase, "lanes": lanes, "width": width, "canvas": canvas, "launches": len(taken),
            "mean_ms": round(statistics.fmean(taken), 4), "quantiles_ms": quantiles(taken),
        }
        for (phase, lanes, width), taken in sorted(found.items()) if len(taken) >= TIMED
    ]  # fmt: skip


def timed(pipe: Pipeline, prompts: list[list[int]], new: int) -> tuple[Clock, float]:
    """The clock of the timed runs, and their wall time in seconds."""
    requests = pipe.requests(prompts, new, None)
    for _ in range(WARM_UP):
        throughput.closed_loop(pipe.engine, requests, len(requests))
    with Clock(pipe.engine) as clock:
        began = time.perf_counter()
        for _ in range(TIMED):
            throughput.closed_loop(pipe.engine, requests, len(requests))
        return clock, time.perf_counter() - began


def sweep(recipe: Recipe, runtime: Runtime, prompt: int, given: argparse.Namespace, report: dict[str, Any]) -> None:
    """All numbers in flight at one length of prompts. Saves after each, so that an aborted run leaves figures."""
    canvas, most = prompt + given.new, max(given.in_flight)
    room = max(min(most, given.room // canvas), 1)
    pipe = Pipeline(recipe, None, replace(runtime, rows=room, max_length=canvas))
    prompts = random_prompts(recipe.model.spec, room, prompt)
    for rows in sorted({min(rows, room) for rows in given.in_flight}):
        clock, wall = timed(pipe, prompts[:rows], given.new)
        found = table(clock, canvas)
        launched = sum(milliseconds(begin, end) for *_, begin, end in clock.marks)
        count = sum(shape.phase.name != "PREFILL" for shape in clock.shapes)
        report["steps"] += found
        report["rounds"].append({"rows": rows, "canvas": canvas, "gap_ms": round((1e3 * wall - launched) / count, 4)})
        save(report, given.out)
        print(report["rounds"][-1], [row for row in found if row["lanes"] >= rows][-3:], flush=True)


def host(recipe: Recipe, runtime: Runtime, given: argparse.Namespace) -> list[dict[str, Any]]:
    """The wall time of a round without a network: the host's time, and the rest of a step."""
    hollow: Any = Hollow(recipe.model)
    prompt = min(given.prompts_of)
    plain = replace(recipe, model=hollow)
    runtime = replace(runtime, tensor_parallel=1, expert_parallel=False)  # since there is no network to divide
    pipe = Pipeline(plain, None, replace(runtime, rows=max(given.in_flight), max_length=prompt + given.new))
    prompts, found = random_prompts(recipe.model.spec, max(given.in_flight), prompt), []
    for rows in given.in_flight:
        clock, wall = timed(pipe, prompts[:rows], given.new)
        count = sum(shape.phase.name != "PREFILL" for shape in clock.shapes)
        found.append({"rows": rows, "round_ms": round(1e3 * wall / count, 4)})
    return found


def save(report: dict[str, Any], out: Path | None) -> None:
    """JSON with a line for each step, so that a diff is readable."""
    if out is None:
        return
    lists = ("steps", "rounds", "host")
    head = json.dumps({name: value for name, value in report.items() if name not in lists}, indent=1, default=str)
    parts = [
        f' "{name}": [\n' + ",\n".join(f"  {json.dumps(row)}" for row in report[name]) + "\n ]"
        for name in lists if name in report
    ]  # fmt: skip
    out.write_text(head[:-2] + ",\n" + ",\n".join(parts) + "\n}\n")


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--prompts-of", type=lambda text: [int(part) for part in text.split(",")], default=[512, 2048, 8064],
        help="lengths of prompts",
    )  # fmt: skip
    parser.add_argument("--room", type=int, default=262144, help="most positions of all canvases together")
    own, rest = parser.parse_known_args(args)
    given = throughput.arguments(rest)
    given.prompts_of, given.room = own.prompts_of, own.room
    device = torch.device(given.device)
    report: dict[str, Any] = {"setting": vars(given) | {"out": None}, **provenance(device), "steps": [], "rounds": []}
    made = throughput.pipeline(given, device)
    recipe, runtime = made.recipe, made.engine.runtime
    del made
    with patch.object(PrefillBatching, "holds", lambda *rows: False):  # no prefill waits for others
        for prompt in given.prompts_of:
            sweep(recipe, runtime, prompt, given, report)
            gc.collect()
        report["host"] = host(recipe, runtime, given)
    save(report, given.out)


if __name__ == "__main__":
    main()
