"""Accuracy and positions of narrow windows and of a limit on commits, on the held-out problems of models in the box.

    python -m benchmarks.narrow --out benchmarks/results/narrow-cpu.json

Positions are those that steps computed for a request, prompts included, over its committed positions.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import dinfer
from benchmarks.provenance import begun, save
from dinfer.demo.problems import generate, is_correct

DECODER = {"name": "threshold", "threshold": 0.9}
MODELS = {"tiny-llada2": ("block_diffusion", "block"), "tiny": ("blockwise", "dual")}
WINDOWS: list[dict[str, int]] = [{}, {"back": 8}]  # {}: ahead=8, back=4


def recipes(cache: str) -> Iterator[tuple[Any, dict[str, int]]]:
    """A cache and the options of the requests."""
    yield cache, {}
    for window in WINDOWS:
        yield {"name": f"narrow_{cache}", **window}, {}
    for leftmost in (8, 11):
        yield cache, {"leftmost": leftmost}


def measured(base: dinfer.Pipeline, iteration: str, cache: Any, options: dict[str, int], count: int) -> dict[str, Any]:
    """The figures of one recipe."""
    recipe = dinfer.compose(
        base.model, iteration={"name": iteration, "block": 32}, decoder=DECODER, cache=cache,
        sampling={"name": "standard", **options},
    )  # fmt: skip
    pipe, problems = dinfer.Pipeline(recipe, base.tokenizer, base.engine.runtime), generate("heldout", count, 0)
    results = pipe.generate([problem.question for problem in problems], max_new_tokens=96)
    counts = [result.counts for result in results]
    right = sum(is_correct(problem, result.text) for problem, result in zip(problems, results, strict=True))
    committed, positions = (sum(getattr(c, name) for c in counts) for name in ("committed", "positions"))
    return {
        "cache": cache, **options, "problems": count, "accuracy": round(100 * right / count, 1),
        "forwards": round(sum(c.forwards for c in counts) / count, 2),
        "positions_per_committed": round(positions / committed, 2),
        "positions_per_token": round(positions / sum(c.tokens for c in counts), 2),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=500, help="held-out problems")
    parser.add_argument("--rows", type=int, default=32, help="requests in flight")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    report = begun(given, torch.device(given.device)) | {"runs": []}
    for model, (iteration, cache) in MODELS.items():
        runtime = dinfer.Runtime(rows=given.rows)
        base = dinfer.load(model, device=given.device, dtype="float32", runtime=runtime)
        for setting, options in recipes(cache):
            run = {"model": model} | measured(base, iteration, setting, options, given.count)
            print(run, flush=True)
            report["runs"].append(run)
            save(report, given.out)


if __name__ == "__main__":
    main()
