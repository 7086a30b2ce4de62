"""What each group of kernels and each optimisation of the host gains: a step with all on, then with each alone off.

    python -m benchmarks.ablation --out benchmarks/results/ablation-h200.json
    python -m benchmarks.ablation --cases small,small-llada2 --device cpu --only canvas,lookahead        # dry run

Weights are random. Each variant has its own engine, with CUDA graphs on a GPU. It runs the same requests once
to warm up and three times with a clock: `step_ms` is the median of the most frequent window step on the device,
`wall_ms` that of the whole run with the host. Ratios compare with all on, which runs first and last. `spread` says how
far repeated runs are apart: a ratio within it says nothing, and is not told. A ratio of 1.05 means
that a step takes 5% longer without. `memory_gb` is the peak beyond the weights. The report records the error of a
variant that fails, and is written after every variant.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import PropertyMock, patch

import torch

from benchmarks.clock import Clock
from benchmarks.feeds import apart, random_prompts, usual
from benchmarks.provenance import command_line, provenance, save
from benchmarks.shapes import random_model
from benchmarks.tables import lost
from dinfer import Pipeline, Runtime
from dinfer.core.kernels.dispatch import GROUPS, VARIABLE
from dinfer.core.recipe.recipe import Recipe
from dinfer.core.step.contracts import ModelSpec
from dinfer.speed import scheduler
from dinfer.speed.abilities import open_positions
from dinfer.speed.grouping import PrefillBatching
from dinfer.speed.scheduler import Lookahead

BLOCK = 32
ALL = "all on"
RUNS = 3  # of each variant; the median counts
WARM = 6  # runs at most before, until none captures a graph
HOST = ("lookahead", "settle", "gather", "scored", "early")
"""Optimisations of the host. "early", the launch of kernels while others run, comes last: it recompiles all kernels."""


@dataclass(frozen=True, slots=True)
class Case:
    """A network and the requests that it runs."""

    shape: str
    quantize: str | None = None
    rows: int = 1  # that run at a time
    requests: int = 1
    prompt: int = 128
    new: int = 64
    options: dict[str, Any] = field(default_factory=dict)
    decoder: str = "threshold"


CASES = {
    "llada-8b": Case("llada-8b"),
    "llada-8b-drawn": Case("llada-8b", options={"sampling.temperature": 1.0}),
    "llada-8b-batch8": Case("llada-8b", rows=8, requests=8),
    "llada-8b-fp8": Case("llada-8b", "fp8"),
    "llada-8b-int4": Case("llada-8b", "int4"),
    "llada2-mini": Case("llada2-mini", prompt=384),
    "llada2-mini-64": Case("llada2-mini", rows=64, requests=96, prompt=384),
    "llada2-mini-joint": Case("llada2-mini", prompt=384, decoder="joint_threshold"),
    "llada2-mini-fixed": Case("llada2-mini", prompt=384, decoder="fixed"),
    "llada2-mini-fp8": Case("llada2-mini", "fp8", prompt=384),
    "small": Case("small", prompt=8),
    "small-llada2": Case("small-llada2", rows=2, requests=3, prompt=8),
    "small-llada2-joint": Case("small-llada2", rows=2, requests=3, prompt=8, decoder="joint_threshold"),
}


def applies(name: str, case: Case, spec: ModelSpec) -> bool:
    """Whether a case uses what `name` turns off."""
    batches = case.requests > 1
    conditions = {
        "experts": spec.experts is not None, "router": spec.experts is not None, "packed": case.quantize == "int4",
        "draw": bool(case.options), "settle": batches, "gather": batches,
        "scored": case.rows * BLOCK >= open_positions.MANY,
    }  # fmt: skip
    return conditions.get(name, True)


@contextmanager
def without(name: str) -> Iterator[None]:
    """Within, one group or optimisation is off."""
    with ExitStack() as stack:
        if name in GROUPS:
            stack.enter_context(patch.dict(os.environ, {VARIABLE: f"triton,-{name}"}))
        elif name == "early":
            stack.enter_context(patch.dict(os.environ, {"DINFER_EARLY": "0"}))
        elif name == "lookahead":
            stack.enter_context(patch.object(Lookahead, "pays", PropertyMock(return_value=False)))
        elif name == "scored":
            stack.enter_context(patch.object(open_positions, "MANY", sys.maxsize))
        elif name == "settle":
            stack.enter_context(patch.object(scheduler, "narrow_width", lambda *row: None))
        elif name == "gather":
            stack.enter_context(patch.object(PrefillBatching, "holds", lambda *rows: False))
        yield


def network(case: Case, device: torch.device) -> Recipe:
    """The recipe of a case. Its tokens choose experts independently of each other."""
    recipe = usual(random_model(case.shape, device, quantized=case.quantize), case.decoder, BLOCK)
    return apart(recipe) if recipe.model.spec.experts else recipe


def measured(recipe: Recipe, case: Case, new: int) -> tuple[dict[str, Any], list[list[int]]]:
    """The figures of one variant, and its tokens."""
    device = recipe.model.device
    cuda = device.type == "cuda"
    pipe = Pipeline(recipe, None, Runtime(rows=case.rows, graphs=cuda, favour="throughput"))
    prompts = random_prompts(recipe.model.spec, case.requests, case.prompt)
    # Many requests have different lengths, so that rows enter and leave at different times.
    lengths = [new // 4 * (1 + i % 4) if case.requests > case.rows else new for i in range(case.requests)]
    held = torch.cuda.memory_allocated(device) if cuda else 0
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)

    def run() -> list[list[int]]:
        results = pipe.generate_ids(prompts, max_new_tokens=lengths, options=case.options)
        if cuda:
            torch.cuda.synchronize(device)
        return [result.canvas for result in results]

    for i in range(WARM):  # runs shapes eagerly, then captures them; some are captured once they have come up often
        captured = pipe.engine.runner.captured
        run()
        if i and pipe.engine.runner.captured == captured:
            break
    steps, walls = list[float](), list[float]()
    for _ in range(RUNS):
        with Clock(pipe.engine) as clock:
            began = time.perf_counter()
            tokens = run()
            walls.append(round(1e3 * (time.perf_counter() - began), 3))
        windows = [row for row in clock.table() if row["phase"] == "WINDOW"]
        usual = max(windows, key=lambda row: row["launches"])
        steps.append(usual["median_ms"])
    found = {
        "step_ms": statistics.median(steps), "wall_ms": statistics.median(walls), "step_runs": steps,
        "wall_runs": walls, "window_steps": usual["launches"], "lanes": usual["lanes"], "width": usual["width"],
        "memory_gb": round((torch.cuda.max_memory_allocated(device) - held) / 1e9, 4) if cuda else None,
    }  # fmt: skip
    if pipe.engine.runner.refused:
        found["refused_graphs"] = [*pipe.engine.runner.refused.values()]
    return found, tokens


def compared(rows: dict[str, dict[str, Any]]) -> None:
    """Adds the ratios to all on, as measured so far, and how far repeated runs are apart."""
    base = [row for name, row in rows.items() if name.startswith(ALL)]
    for key in ("step", "wall"):
        times = [one for row in base for one in row[f"{key}_runs"]]
        for row in (row for row in rows.values() if f"{key}_runs" in row):
            own = times if row is base[0] else row[f"{key}_runs"]
            row[f"{key}_ratio"] = round(row[f"{key}_ms"] / statistics.median(times), 4)
            row[f"{key}_spread"] = round(max(own) / min(own) - 1, 4)


def free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def ablated(recipe: Recipe, case: Case, names: list[str], new: int) -> Iterator[dict[str, dict[str, Any]]]:
    """Measures all on, then without each of `names`, then all on again. Yields the figures so far after each."""
    rows: dict[str, dict[str, Any]] = {}
    early = [name for name in names if name == "early"]
    reference = None
    for name in [ALL, *(name for name in names if name != "early"), f"{ALL}, again", *early]:
        try:
            with without(name):
                rows[name], tokens = measured(recipe, case, new)
            reference = reference or tokens
            rows[name]["same_tokens"] = tokens == reference
        except RuntimeError as error:  # a variant that does not run or finds no memory is a result too
            if name.startswith(ALL):
                raise
            rows[name] = {"error": str(error).strip().split("\n")[0]}
        free(recipe.model.device)
        compared(rows)
        yield rows


def beyond(rows: dict[str, dict[str, Any]]) -> dict[str, str]:
    """What steps and runs lose without each thing, as far as that is more than repeated runs differ."""
    found = {name: lost(row, rows[ALL]) for name, row in rows.items() if "error" not in row}
    return {name: words for name, words in found.items() if words.strip("·/ ")}


def listed(text: str) -> list[str]:
    return text.split(",")


def arguments(args: list[str] | None) -> argparse.Namespace:
    parser = command_line(__doc__, device="cuda")
    parser.add_argument("--cases", "--shapes", type=listed, help=f"of {', '.join(CASES)}; default: all but the small")
    parser.add_argument("--only", type=listed, help=f"what to turn off, of {', '.join((*GROUPS, *HOST))}; default: all")
    parser.add_argument("--new", type=int, help="max_new_tokens, a multiple of 4; default: 64, two blocks")
    given = parser.parse_args(args)
    given.cases = given.cases or [name for name in CASES if not name.startswith("small")]
    given.only = given.only or [*GROUPS, *HOST]
    for option, values, known in (("cases", given.cases, CASES), ("only", given.only, (*GROUPS, *HOST))):
        if unknown := [value for value in values if value not in known]:
            parser.error(f"--{option}: {', '.join(unknown)} not known; use {', '.join(known)}")
    if given.new is not None and (given.new < 4 or given.new % 4):
        parser.error(f"--new {given.new} must be a multiple of 4, at least 4")
    return given


def main(args: list[str] | None = None) -> None:
    given = arguments(args)
    device = torch.device(given.device)
    setting = {"cases": given.cases, "only": given.only, "new": given.new}
    report: dict[str, Any] = {"setting": setting, **provenance(device), "cases": {}}
    recipe, made = None, None
    for name in sorted(given.cases, key=[*CASES].index):  # cases of one network are neighbours
        case = CASES[name]
        if made != (case.shape, case.quantize, case.decoder):
            recipe = None
            free(device)
            recipe, made = network(case, device), (case.shape, case.quantize, case.decoder)
        names = [one for one in given.only if applies(one, case, recipe.model.spec)]
        for rows in ablated(recipe, case, names, given.new or case.new):
            report["cases"][name] = rows
            last = [*rows][-1]
            kept = {k: v for k, v in rows[last].items() if k.endswith(("ms", "ratio", "spread", "error"))}
            print(name, last, kept, flush=True)
            save(report, given.out)
        print(f"{name}, beyond the spread of repeated runs:", beyond(report["cases"][name]), flush=True)


if __name__ == "__main__":
    main()
