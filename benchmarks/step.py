"""Time of one denoising step: a real generation with random weights, eagerly and as CUDA graphs.

    python -m benchmarks.step --out benchmarks/results/step-llada-8b-h200.json
    python -m benchmarks.step --shape small --device cpu          # dry run

Steps are timed by CUDA events around each launch of the engine; the limit is the time that reading the weights of the
layers and of the head once takes at the copy bandwidth measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.shapes import SHAPES, shape
from benchmarks.surroundings import surroundings
from dinfer import Pipeline, Runtime, compose
from dinfer.checkpoint import random_network
from dinfer.compose import Recipe
from dinfer.layers.linear import QUANTIZED, quantize, quantized_dtype
from dinfer.layers.mlp import Experts
from dinfer.protocols import Model, StepShape


def copy_bandwidth(device: torch.device) -> float:
    """Bytes read and written per second by a device-to-device copy of 4 GB."""
    source = torch.empty(2**31, dtype=torch.bfloat16, device=device).normal_()
    target = torch.empty_like(source)
    seconds = [_event_seconds(lambda: target.copy_(source)) for _ in range(10)]
    return 2 * source.nbytes / statistics.median(seconds)


def weight_bytes(model: Model, experts: float | None) -> float:
    """Bytes of the weights that one step reads: all but unread experts, and the embedding but for a few rows.

    `experts`: how many of a layer's are read.
    """
    parameters = dict(model.named_parameters())  # type: ignore[attr-defined]
    tied, spec = "head.weight" not in parameters, model.spec.experts
    share = 1.0 if spec is None or experts is None else experts / spec.experts
    return sum(
        p.nbytes * (share if name.endswith((".gate_up", ".down")) else 1.0)
        for name, p in parameters.items()
        if tied or name != "embedding.weight"
    )


def experts_read(recipe: Recipe, prompts: list[list[int]]) -> float:
    """How many experts of a layer the tokens of a window step choose between them, on average of layers and steps."""
    counts, route = [], Experts.route

    def counted(self: Experts, logits_NX: torch.Tensor, pos_BW: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        chosen_NC, weights_NC = route(self, logits_NX, pos_BW)
        if logits_NX.shape[0] <= 64 * len(prompts):  # no prefill
            counts.append(chosen_NC.unique().numel())
        return chosen_NC, weights_NC

    Experts.route = counted  # type: ignore[method-assign]
    Pipeline(recipe, None, Runtime(rows=len(prompts), graphs=False)).generate_ids(prompts, max_new_tokens=64)
    Experts.route = route  # type: ignore[method-assign]
    return statistics.mean(counts)


def _event_seconds(work: Any) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def timed_run(pipe: Pipeline, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
    """Generates twice, the first time as warm-up, and times every step of the second."""
    cuda = pipe.model.device.type == "cuda"
    began = time.perf_counter()
    pipe.generate_ids(prompts, max_new_tokens=new_tokens)
    warm_up = time.perf_counter() - began

    launcher, seconds = pipe.engine.launcher, defaultdict(list)
    launch = launcher.launch

    def timed(step_shape: StepShape, slots: list[int]) -> None:
        if cuda:
            seconds[step_shape.phase].append(_event_seconds(lambda: launch(step_shape, slots)))
        else:
            start = time.perf_counter()
            launch(step_shape, slots)
            seconds[step_shape.phase].append(time.perf_counter() - start)

    launcher.launch = timed  # type: ignore[method-assign]
    results = pipe.generate_ids(prompts, max_new_tokens=new_tokens)
    launcher.launch = launch  # type: ignore[method-assign]
    began = time.perf_counter()
    again = pipe.generate_ids(prompts, max_new_tokens=new_tokens)
    wall = time.perf_counter() - began
    return {
        "warm_up_s": warm_up,
        "graphs": launcher.captured,
        "steps": {phase.name: len(values) for phase, values in seconds.items()},
        "step_ms": {phase.name: 1e3 * statistics.median(values) for phase, values in seconds.items()},
        "wall_ms_per_step": 1e3 * wall / sum(map(len, seconds.values())),
        "repeats_itself": [r.canvas for r in results] == [r.canvas for r in again],
        "canvas": [r.canvas for r in again],
    }


def kernels(pipe: Pipeline, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """GPU time by kernel over a short generation, most first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        pipe.generate_ids(prompts, max_new_tokens=8)
    events = sorted(profile.key_averages(), key=lambda e: -e.device_time_total)
    return [{"kernel": e.key[:90], "calls": e.count, "us": round(e.device_time_total)} for e in events[:25]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llada-8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--iteration", default="blockwise")
    parser.add_argument("--cache", default="dual")
    parser.add_argument("--quantize", choices=QUANTIZED)
    parser.add_argument("--profile", action="store_true", help="print GPU time by kernel")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()

    device = torch.device(given.device)
    cuda = device.type == "cuda"
    report: dict[str, Any] = {"setting": vars(given) | {"out": None}, **surroundings(device)}
    family, spec = shape(given.shape)
    bandwidth = copy_bandwidth(device) if cuda else None
    torch.manual_seed(0)
    torch.cuda.empty_cache()
    model = random_network(family, spec, dtype=torch.bfloat16 if cuda else torch.float32, device=device)
    if given.quantize:
        quantize(model, quantized_dtype(given.quantize))
    recipe = compose(
        model, iteration={"name": given.iteration, "block": given.block}, decoder="threshold", cache=given.cache
    )
    generator = torch.Generator().manual_seed(1)
    low = min(spec.eos_id, spec.mask_id)
    prompts = torch.randint(low, (given.batch, given.prompt), generator=generator).tolist()
    experts = experts_read(recipe, prompts) if spec.experts else None
    report |= {"experts_read": experts, "weights_gb": weight_bytes(model, experts) / 1e9}
    if bandwidth:
        report["copy_tb_per_s"] = bandwidth / 1e12
        report["limit_ms"] = 1e3 * weight_bytes(model, experts) / bandwidth
    for graphs in (False, True)[: 2 if cuda else 1]:
        memory = torch.cuda.memory_allocated() if cuda else 0
        torch.cuda.reset_peak_memory_stats() if cuda else None
        pipe = Pipeline(recipe, None, Runtime(rows=given.batch, graphs=graphs))
        name = "graph" if graphs else "eager"
        report[name] = timed_run(pipe, prompts, given.new)
        if cuda:
            report[name]["beyond_weights_gb"] = (torch.cuda.max_memory_allocated() - memory) / 1e9
        if given.profile and cuda:
            for row in kernels(pipe, prompts):
                print(f"{row['us']:8d} us {row['calls']:6d} x  {row['kernel']}")
    canvases = [report[name].pop("canvas") for name in ("eager", "graph") if name in report]
    report["graph_equals_eager"] = canvases[0] == canvases[-1] if cuda else None
    text = json.dumps(report, indent=1, default=str)
    print(text)
    if given.out:
        given.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
