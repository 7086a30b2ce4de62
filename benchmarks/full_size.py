"""Models of full size with random weights, end to end: memory, time, and the time to the first block.

    python -m benchmarks.full_size --out benchmarks/results/full-size-h200.json
    python -m benchmarks.full_size --shapes small small-llada2 --device cpu          # dry run

Weights are drawn on the device, in bfloat16. A pipeline with default runtime answers one prompt twice. The first answer
includes compilation and graph capture. With random weights hardly any confidence reaches the threshold, so a forward
commits one token: the figures are about memory and time, not quality.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.feeds import random_prompts
from benchmarks.provenance import begun, save
from benchmarks.shapes import SHAPES, shape
from benchmarks.step import pool
from dinfer import Pipeline, Runtime, compose
from dinfer.loading.checkpoint import random_network

RECIPES = {  # by whether the model is block-causal
    False: {"iteration": {"name": "blockwise", "block": 32, "stop": "off"}, "cache": "dual"},
    True: {"iteration": {"name": "block_diffusion", "block": 32, "stop": "off"}, "cache": "block"},
}


def measured(name: str, device: torch.device, prompt: int, new: int) -> dict[str, Any]:
    """Parameters, bytes, peak, times and counts of two generations of a model."""
    cuda = device.type == "cuda"
    family, spec = shape(name)
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if cuda else 0
    torch.manual_seed(0)
    model = random_network(family, spec, dtype=torch.bfloat16 if cuda else torch.float32, device=device)
    recipe = compose(model, decoder="threshold", **RECIPES[spec.causal_block is not None])
    pipe = Pipeline(recipe, None, Runtime(rows=1, graphs=cuda))
    weights = sum(p.nbytes for p in model.parameters())
    ids = random_prompts(spec, 1, prompt)[0]
    runs = [generation(pipe, ids, new) for _ in range(2)]
    kv = pool(pipe.engine)
    cached = kv.k_JPTGE.nbytes + kv.v_JPTGE.nbytes
    found: dict[str, Any] = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "weights_gb": weights / 1e9,
        "kv_gb": cached / 1e9,
        "recipe": {kind: str(getattr(recipe, kind)) for kind in ("iteration", "decoder", "cache")},
        "first": runs[0],
        "second": runs[1],
        "same_tokens": runs[0].pop("canvas") == runs[1].pop("canvas"),
    }
    if cuda:
        peak = torch.cuda.max_memory_allocated() - before
        found |= {"peak_gb": peak / 1e9, "beyond_weights_and_kv_gb": (peak - weights - cached) / 1e9}
    return found


def generation(pipe: Pipeline, ids: list[int], new: int) -> dict[str, Any]:
    """Seconds to the end of the first block and of the answer, and counts."""
    request, began = pipe.requests([ids], new, None), time.perf_counter()
    updates = [(update, time.perf_counter() - began) for update in pipe.engine.run(request)]
    end, regions = updates[-1][0].completion, [update.region for update, _ in updates]
    if end is None:
        raise RuntimeError("the last update has no completion")
    return {
        "first_block_s": max(seconds for update, seconds in updates if update.region == regions[0]),
        "total_s": updates[-1][1],
        "forwards": end.counts.forwards,
        "committed": end.counts.committed,
        "canvas": end.canvas,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["llada-8b", "llada2-mini"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    device = torch.device(given.device)
    report: dict[str, Any] = {**begun(given, device), "models": {}}
    for name in given.shapes:
        report["models"][name] = measured(name, device, given.prompt, given.new)
        print(name, json.dumps(report["models"][name], indent=1), flush=True)
        gc.collect()
        save(report, given.out)


if __name__ == "__main__":
    main()
