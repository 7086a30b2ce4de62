"""The forwards that candidates save, with the same tokens: `runtime.speculate` on held-out problems.

    python -m benchmarks.speculation --device cuda --out benchmarks/results/speculation-h200

Each recipe runs without candidates and with K of them. A row of the report has the forwards of all problems, their
ratio, and the number of answers with the same tokens.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch

import dinfer
from benchmarks.provenance import provenance
from benchmarks.quality import write
from dinfer.demo.problems import generate

BLOCK = {"name": "blockwise", "block": 32}
THRESHOLD = {"name": "threshold", "threshold": 0.9}
# Model, iteration, decoder, cache: recipes; docs/engine.md shows some.
RECIPES: list[tuple[str, Any, Any, str]] = [
    ("tiny", BLOCK, THRESHOLD, "dual"),
    ("tiny", BLOCK, THRESHOLD, "none"),
    ("tiny", BLOCK, {"name": "fixed", "steps": 32}, "dual"),
    ("tiny-llada2", {"name": "block_diffusion"}, THRESHOLD, "block"),
    ("tiny", BLOCK, {"name": "entropy_bound"}, "none"),
]


def solved(
    base: dinfer.Pipeline, recipe: Any, count: int, questions: list[str], given: argparse.Namespace
) -> tuple[list[Any], float]:
    """The results of all problems, and their seconds."""
    runtime = dinfer.Runtime(rows=given.rows, max_length=256, speculate=count, graphs=base.model.device.type == "cuda")
    pipe = dinfer.Pipeline(recipe, base.tokenizer, runtime)
    if runtime.graphs:
        pipe.generate(questions[:3], max_new_tokens=given.new)  # compiles kernels and captures graphs
    began = time.perf_counter()
    return pipe.generate(questions, max_new_tokens=given.new), time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=60, help="held-out problems")
    parser.add_argument("--new", type=int, default=96, help="max_new_tokens")
    parser.add_argument("--rows", type=int, default=1, help="requests in flight: seconds depend on it, forwards do not")
    parser.add_argument("--candidates", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--only", type=int, nargs="+", help="numbers of recipes; all if left out")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="path without suffix")
    given = parser.parse_args()
    device, rows, bases = torch.device(given.device), list[dict[str, Any]](), dict[str, dinfer.Pipeline]()
    questions = [problem.question for problem in generate("heldout", given.count, 0)]
    for number, (model, iteration, decoder, cache) in enumerate(RECIPES):
        if given.only is not None and number not in given.only:
            continue
        base = bases.get(model) or bases.setdefault(model, dinfer.load(model, device=device, dtype="float32"))
        recipe = dinfer.compose(base.model, iteration=iteration, decoder=decoder, cache=cache)
        plain, without = solved(base, recipe, 0, questions, given)
        for candidates in given.candidates:
            results, seconds = solved(base, recipe, candidates, questions, given)
            forwards, fewer = (sum(r.counts.forwards for r in some) for some in (plain, results))
            row = {
                "model": model, "decoder": " ".join(map(str, decoder.values())), "cache": cache,
                "candidates": candidates, "forwards_without": forwards, "forwards": fewer,
                "divided_by": round(forwards / fewer, 3),
                "same_tokens": sum(a.canvas == b.canvas for a, b in zip(plain, results, strict=True)),
                "problems": given.count, "seconds_without": round(without, 3), "seconds": round(seconds, 3),
            }  # fmt: skip
            rows.append(row)
            print(row, flush=True)
            if given.out:
                write(given.out, rows, {"setting": vars(given) | {"out": str(given.out)}} | provenance(device))


if __name__ == "__main__":
    main()
