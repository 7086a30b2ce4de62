"""How rounding weights, or keys and values, changes the answers of the models in the box.

    python -m benchmarks.quantized --device cuda --out benchmarks/results/quantized-h200

It solves held-out problems with `threshold` 0.9, in float32 except for what is rounded, without a cache and with the
model's best cache. Accuracy, NFE and TPF are those of benchmarks.quality. `same` is the percentage of answers that
equal those of the unrounded model, word for word, with the same cache. It writes OUT.json and OUT.csv after every row.
`--only int4` leaves out the other formats. On a GPU int4 rounds inputs where a step has at most 512 positions, as with
`--rows 2`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import torch

import dinfer
from benchmarks.provenance import provenance
from benchmarks.quality import samples_of, with_problems, write
from dinfer.analysis.metrics import measure
from dinfer.demo.problems import Problem, generate

RECIPES: dict[str, tuple[str, tuple[str, ...]]] = {  # the iteration of each model, and the caches
    "tiny": ("blockwise", ("none", "dual")),
    "tiny-llada2": ("block_diffusion", ("none", "block")),
}
ROUNDED = ((None, "model"), ("fp8", "model"), ("int8", "model"), ("int4", "model"), (None, "fp8"))  # quantize, kv
FIGURES = ("problems", "correct", "accuracy", "accuracy_low", "accuracy_high", "nfe", "tpf", "tokens")


def answers(model: str, cache: str, quantize: str | None, kv: Any, given: argparse.Namespace) -> list[Any]:
    """The results of one setting, in order of the problems."""
    iteration: dict[str, Any] = {"name": RECIPES[model][0]} | ({"block": 32} if model == "tiny" else {})
    pipe = dinfer.load(
        model, iteration=iteration, decoder={"name": "threshold", "threshold": 0.9}, cache=cache, quantize=quantize,
        device=given.device, dtype="float32", runtime=dinfer.Runtime(rows=given.rows, kv=kv),
    )  # fmt: skip
    return list(pipe.generate([problem.question for problem in given.problems], max_new_tokens=given.new))


def row_of(problems: Sequence[Problem], results: Sequence[Any], as_is: Sequence[Any], seconds: float) -> dict[str, Any]:
    """The figures of a setting."""
    figures = measure(samples_of(problems, results), seconds).row()
    same = sum(mine.text == theirs.text for mine, theirs in zip(results, as_is, strict=True))
    return {name: figures[name] for name in FIGURES} | {"same": 100 * same / len(results)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    formats = [quantize for quantize, _ in ROUNDED if quantize]
    parser.add_argument("--only", choices=formats, help="the one format to compare with the unrounded model")
    given = with_problems(parser).parse_args()
    chosen = ROUNDED if given.only is None else (ROUNDED[0], (given.only, "model"))
    setting = {name: str(value) if name == "out" else value for name, value in vars(given).items()}
    given.problems = generate("heldout", given.count, given.seed)
    rows: list[dict[str, Any]] = []
    for model, (_, caches) in RECIPES.items():
        for cache in caches:
            as_is: list[Any] = []
            for quantize, kv in chosen:
                began = time.perf_counter()
                results = answers(model, cache, quantize, kv, given)
                as_is = as_is or results
                figures = row_of(given.problems, results, as_is, time.perf_counter() - began)
                rows.append({"model": model, "cache": cache, "quantize": quantize, "kv": kv} | figures)
                print({name: value for name, value in rows[-1].items() if value is not None}, flush=True)
                if given.out:
                    write(given.out, rows, {"setting": setting} | provenance(torch.device(given.device)))


if __name__ == "__main__":
    main()
