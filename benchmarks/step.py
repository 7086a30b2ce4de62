"""The time of a denoise step by part: a real generation with random weights, eagerly and as CUDA graphs.

    python -m benchmarks.step --out benchmarks/results/step-llada-8b-h200.json
    python -m benchmarks.step --shape small --device cpu --new 64          # dry run

CUDA events around each launch of the engine time the steps without waiting. The rest of a run's time is the host's. The
limit is the larger of two times: to read the weights of a step and the keys and values of its rows once, and to do its
multiply-adds, at rates measured in the same run. A step without a network times decoding, commits and cursors. The
kernels of some window steps are summed by part (`benchmarks.parts`). With `--spread` tokens choose their experts
independently of each other (`benchmarks.feeds`).
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import torch

from benchmarks.clock import Clock, lap, settled
from benchmarks.feeds import Hollow, apart, random_prompts
from benchmarks.limits import limits, rates
from benchmarks.parts import by_kernel, by_part, profiled, told
from benchmarks.provenance import begun, command_line, save
from benchmarks.shapes import SHAPES, random_model
from dinfer import Pipeline, Runtime, compose
from dinfer.core.engine.engine import Engine
from dinfer.core.engine.runtime import Kv
from dinfer.core.layers.transformer import Experts
from dinfer.core.memory import KVPool
from dinfer.core.recipe.recipe import Recipe
from dinfer.core.step.shape import StepShape


def experts_read(recipe: Recipe, prompts: list[list[int]]) -> float:
    """The number of experts that the tokens of a window step choose in a layer, on average over layers and steps."""
    counts, route = [], Experts.route

    def counted(self: Experts, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        chosen_NC, weights_NC = route(self, *given)
        if chosen_NC.shape[0] == len(prompts) * recipe.iteration.block:  # neither a prefill nor a block's first step
            counts.append(chosen_NC.unique().numel())
        return chosen_NC, weights_NC

    Experts.route = counted  # type: ignore[method-assign]
    try:
        rank = recipe.ranks.rank
        runtime = Runtime(
            rows=len(prompts), graphs=False, tensor_parallel=rank.ranks, expert_parallel=rank.expert_parallel
        )
        run = Pipeline(recipe, None, runtime)
        run.generate_ids(prompts, max_new_tokens=2 * recipe.iteration.block)
    finally:
        Experts.route = route  # type: ignore[method-assign]
    return statistics.mean(counts)


def timed_run(pipe: Pipeline, run: Callable[[], Any]) -> tuple[dict[str, Any], list[StepShape]]:
    """Warms up, then times every step of another run. Returns the figures and the shapes of these steps."""
    clock, canvases = Clock(pipe.engine), list[list[Any]]()

    def timed() -> None:
        clock.restart()
        with clock:
            canvases.append([result.canvas for result in run()])

    (_, wall, _), about = settled(partial(lap, timed, pipe.engine))
    steps = clock.table()
    usual = max(steps, key=lambda row: (row["phase"] == "WINDOW", row["phase"] == "FULL", row["launches"]))
    launches = sum(row["launches"] for row in steps)
    return {
        **about,
        "graphs": pipe.engine.runner.captured,
        "refused_graphs": [*pipe.engine.runner.refused.values()],
        "step_ms": usual["median_ms"],
        "host_ms": (1e3 * wall - sum(row["total_ms"] for row in steps)) / launches,
        "lanes": usual["lanes"],
        "width": usual["width"],
        "steps": steps,
        "repeats_itself": canvases[0] == canvases[-1],
        "canvas": canvases[-1],
    }, clock.shapes


def pool(engine: Engine) -> KVPool:
    """Keys and values of an engine that has run."""
    return engine.runner.state.kv


def arguments(args: list[str] | None) -> argparse.Namespace:
    parser = command_line(__doc__, device="cuda")
    parser.add_argument("--shape", choices=SHAPES, default="llada-8b")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--iteration", default="blockwise")
    parser.add_argument("--cache", default="dual")
    parser.add_argument("--quantize", choices=("fp8", "int8", "int4"))
    parser.add_argument("--kv", choices=get_args(Kv), default="model", help="runtime.kv")
    parser.add_argument("--spread", action="store_true", help="tokens choose experts independently")
    return parser.parse_args(args)


def main(args: list[str] | None = None) -> None:
    given = arguments(args)
    device = torch.device(given.device)
    cuda = device.type == "cuda"
    report = begun(given, device)
    card = rates(device, given.quantize) if cuda else None
    model = random_model(given.shape, device, quantized=given.quantize)
    spec = model.spec
    iteration = {"name": given.iteration, "block": given.block, "stop": "off"}
    plain = compose(model, iteration=iteration, decoder="threshold", cache=given.cache)
    recipe = apart(plain) if given.spread else plain
    prompts = random_prompts(spec, given.batch, given.prompt)

    weights = torch.cuda.memory_allocated() if cuda else 0
    for graphs in (False, True)[: 2 if cuda else 1]:
        pipe = Pipeline(recipe, None, Runtime(rows=given.batch, graphs=graphs, kv=given.kv))
        run = partial(pipe.generate_ids, prompts, max_new_tokens=given.new)
        torch.cuda.reset_peak_memory_stats() if cuda else None  # the pipeline before is gone
        name = "graph" if graphs else "eager"
        report[name], shapes = timed_run(pipe, run)
        if cuda:
            report[name]["beyond_weights_gb"] = (torch.cuda.max_memory_allocated() - weights) / 1e9
    canvases = [report[name].pop("canvas") for name in ("eager", "graph") if name in report]
    report["graph_equals_eager"] = canvases[0] == canvases[-1] if cuda else None
    save(report, given.out)  # now, since what follows may fail
    found = report[name]
    report["experts_read"] = experts_read(recipe, prompts) if spec.experts else None

    seen = given.prompt + given.new  # a block-causal model sees up to its block, which is the middle one on average
    keys = given.prompt + (given.new + given.block) / 2 if spec.causal_block else seen
    report["limit"] = limits(
        model, pool(pipe.engine), rows=given.batch, width=found["width"], block=given.block, keys=keys,
        experts=report["experts_read"], rates=card,
    )  # fmt: skip
    if cuda:
        report["limit"]["reached"] = report["limit"]["limit_ms"] / found["step_ms"]

    hollow = Pipeline(replace(plain, model=Hollow(model)), None, Runtime(rows=given.batch, graphs=cuda, kv=given.kv))
    rest, _ = timed_run(hollow, partial(hollow.generate_ids, prompts, max_new_tokens=given.new))
    whole = found["step_ms"] + found["host_ms"]
    report["without_network"] = {
        "step_ms": rest["step_ms"], "host_ms": found["host_ms"], "share": (rest["step_ms"] + found["host_ms"]) / whole,
    }  # fmt: skip
    save(report, given.out)

    spans, steps = profiled(pipe.engine, run, shapes)
    rows = by_kernel(spans, steps)
    parts = by_part(rows, found["step_ms"])
    report["profile"] = {"steps": steps, "parts": parts, "kernels": rows}
    save(report, given.out)
    print(json.dumps(report | {"profile": None}, indent=1, default=str))
    print(told(parts))


if __name__ == "__main__":
    main()
