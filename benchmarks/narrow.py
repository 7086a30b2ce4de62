"""Accuracy and positions of narrow windows and of a limit on commits, on the held-out problems of models in the box.

    python -m benchmarks.narrow --out benchmarks/results/narrow-cpu.json

Positions are those that steps computed for a request, prompts included, over its committed positions.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import dinfer
from benchmarks.provenance import begun, save
from dinfer.demo.problems import generate, is_correct
from dinfer.recipe.registry import CACHES

DECODER = {"name": "threshold", "threshold": 0.9}  # presets may edit, which a narrow window does not allow
MODELS = ("tiny-llada2", "tiny", "tiny-d2f", "tiny-llada2-multi-block")
WINDOWS = ("8,4", "8,8")  # ahead, back


def recipes(cache: str, windows: Sequence[str], limits: Sequence[int]) -> Iterator[tuple[Any, dict[str, int]]]:
    """A cache and the options of the requests."""
    yield cache, {}
    for window in windows:
        ahead, back = map(int, window.split(","))
        yield {"name": f"narrow_{cache}", "ahead": ahead, "back": back}, {}
    for leftmost in limits:
        yield cache, {"leftmost": leftmost}


def measured(base: dinfer.Pipeline, cache: Any, options: dict[str, int], count: int) -> dict[str, Any]:
    """The figures of the model's preset with this cache and `DECODER`."""
    sampling = {"name": "standard", **options}
    recipe = dinfer.compose(
        base.model, iteration=base.recipe.iteration, decoder=DECODER, cache=cache, sampling=sampling
    )
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
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--windows", nargs="*", default=WINDOWS, metavar="AHEAD,BACK")
    parser.add_argument("--limits", nargs="*", type=int, default=(8, 11), help="settings of sampling.leftmost")
    parser.add_argument("--count", type=int, default=500, help="held-out problems")
    parser.add_argument("--rows", type=int, default=32, help="requests in flight")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    report = begun(given, torch.device(given.device)) | {"runs": []}
    for model in given.models:
        base = dinfer.load(model, device=given.device, dtype="float32", runtime=dinfer.Runtime(rows=given.rows))
        for setting, options in recipes(CACHES.name_of(base.recipe.cache), given.windows, given.limits):
            run = {"model": model} | measured(base, setting, options, given.count)
            print(run, flush=True)
            report["runs"].append(run)
            save(report, given.out)


if __name__ == "__main__":
    main()
