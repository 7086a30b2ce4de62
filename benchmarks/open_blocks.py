"""The time of a window step by the number of open blocks, and by the number of candidates.

    python -m benchmarks.open_blocks --out benchmarks/results/open-blocks-h200.json
    python -m benchmarks.open_blocks --shape small --device cpu --blocks 1,2                      # dry run

Weights are random; one request uses the dual cache. Every block commits a token at each step, and the next block opens
at once, so most steps have all blocks open. Steps with candidates (`runtime.speculate`) have one block open. The time
is that of the most frequent window step with CUDA graphs, the ratio is to the first run, and the parts of the step are
those of `benchmarks.parts` (on a GPU).
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.feeds import random_prompts
from benchmarks.parts import by_kernel, by_part, profiled
from benchmarks.provenance import begun, save
from benchmarks.shapes import SHAPES, shape
from benchmarks.step import timed_run
from dinfer import Pipeline, Runtime, compose
from dinfer.loading.checkpoint import random_network


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llada-8b")
    parser.add_argument("--blocks", type=lambda text: [int(part) for part in text.split(",")], default=[1, 2, 4])
    parser.add_argument("--candidates", type=lambda text: [int(part) for part in text.split(",")], default=[1, 3, 5, 7])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(args)
    device = torch.device(given.device)
    cuda = device.type == "cuda"
    family, spec = shape(given.shape)
    torch.manual_seed(0)
    model = random_network(family, spec, dtype=torch.bfloat16 if cuda else torch.float32, device=device)
    prompts = random_prompts(spec, 1, given.prompt)
    report: dict[str, Any] = {**begun(given, device), "runs": []}
    points = [*((blocks, 0) for blocks in given.blocks), *((1, candidates) for candidates in given.candidates)]
    for blocks, candidates in points:
        iteration = {
            "name": "multi_block",
            "block": 32,
            "blocks": blocks,
            "add_at": 0.0,
            "force_at": 0.0,
            "stop": "off",
        }
        recipe = compose(model, iteration=iteration, decoder="threshold", cache="dual")
        pipe = Pipeline(recipe, None, Runtime(graphs=cuda, speculate=candidates))
        generate = partial(pipe.generate_ids, prompts, max_new_tokens=given.new)
        run, shapes = timed_run(pipe, generate)
        parts = {}
        if cuda:
            spans, count = profiled(pipe.engine, generate, shapes)
            parts = {part: row["own_us"] for part, row in by_part(by_kernel(spans, count), run["step_ms"]).items()}
        base = report["runs"][0]["step_ms"] if report["runs"] else run["step_ms"]
        kept = {name: run[name] for name in ("step_ms", "host_ms", "width", "refused_graphs", "steps")}
        about = {"blocks": blocks, "candidates": candidates}
        report["runs"].append(about | {"ratio": round(run["step_ms"] / base, 4), **kept, "parts_us": parts})
        print({k: v for k, v in report["runs"][-1].items() if k != "steps"}, flush=True)
        save(report, given.out)


if __name__ == "__main__":
    main()
