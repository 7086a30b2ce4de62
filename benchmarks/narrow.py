"""Accuracy and positions of narrow windows and of a limit on commits, on the held-out problems of models in the box.

    python -m benchmarks.narrow --out benchmarks/results/narrow-cpu.json

    python -m benchmarks.narrow --models tiny-llada2 --limits --in-flight 1 8 32

Positions are those that steps computed for a request, prompts included, over its committed positions. With
`--in-flight`, tokens a second are measured instead. All settings take turns, so that other load on the machine meets
all of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

import torch

import dinfer
from benchmarks.provenance import begun, command_line, save
from benchmarks.throughput import closed_loop
from dinfer.demo.problems import generate, is_correct
from dinfer.recipe.registry import CACHES

DECODER = {"name": "threshold", "threshold": 0.9}  # presets may edit, which a narrow window does not allow
NEW = 96  # max_new_tokens
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


def pipeline(base: dinfer.Pipeline, cache: Any, options: dict[str, int]) -> dinfer.Pipeline:
    """The model's preset with this cache and `DECODER`."""
    recipe = dinfer.compose(
        base.model, iteration=base.recipe.iteration, decoder=DECODER, cache=cache,
        sampling={"name": "standard", **options},
    )  # fmt: skip
    return dinfer.Pipeline(recipe, base.tokenizer, base.engine.runtime)


def timed(base: dinfer.Pipeline, settings: list[tuple[Any, dict[str, int]]], in_flight: int, repeats: int) -> Any:
    """Tokens a second of each setting, in turns: by the clock, and by the processor time of this process."""
    problems, rates = generate("heldout", 2 * in_flight, 0), [list[tuple[float, float]]() for _ in settings]
    pipes = [pipeline(base, *setting) for setting in settings]
    asked = [pipe.requests([pipe.encode(p.question) for p in problems], NEW, None) for pipe in pipes]
    for turn in range(repeats + 1):
        for pipe, requests, own in zip(pipes, asked, rates, strict=True):
            began = time.process_time()
            found = closed_loop(pipe.engine, requests, in_flight)
            own += [(found["tokens_per_s"], found["tokens"] / (time.process_time() - began))] * (turn > 0)
    for (cache, options), own in zip(settings, rates, strict=True):
        by_clock, by_processor = (sorted(round(rate, 1) for rate in one) for one in zip(*own, strict=True))
        yield {
            "cache": cache, **options, "in_flight": in_flight, "repeats": repeats,
            "tokens_per_s": by_clock, "median": round(median(by_clock), 1),
            "per_processor_s": by_processor, "median_per_processor_s": round(median(by_processor), 1),
        }  # fmt: skip


def figures(pipe: dinfer.Pipeline, count: int) -> dict[str, Any]:
    """Accuracy and cost of a recipe on held-out problems."""
    problems = generate("heldout", count, 0)
    results = pipe.generate([problem.question for problem in problems], max_new_tokens=NEW)
    counts = [result.counts for result in results]
    right = sum(is_correct(problem, result.text) for problem, result in zip(problems, results, strict=True))
    committed, positions = (sum(getattr(c, name) for c in counts) for name in ("committed", "positions"))
    return {
        "problems": count, "accuracy": round(100 * right / count, 1),
        "forwards": round(sum(c.forwards for c in counts) / count, 2),
        "positions_per_committed": round(positions / committed, 2),
        "positions_per_token": round(positions / sum(c.tokens for c in counts), 2),
    }  # fmt: skip


def main() -> None:
    parser = command_line(__doc__, device="cpu")
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--windows", nargs="*", default=WINDOWS, metavar="AHEAD,BACK")
    parser.add_argument("--limits", nargs="*", type=int, default=(8, 11), help="settings of sampling.leftmost")
    parser.add_argument("--count", type=int, default=500, help="held-out problems")
    parser.add_argument("--rows", type=int, default=32, help="requests in flight")
    parser.add_argument("--in-flight", nargs="*", type=int, default=(), help="measure speed with so many requests")
    parser.add_argument("--repeats", type=int, default=9, help="of each measurement of speed")
    given = parser.parse_args()
    report = begun(given, torch.device(given.device)) | {"runs": []}
    for model in given.models:
        base = dinfer.load(model, device=given.device, dtype="float32", runtime=dinfer.Runtime(rows=given.rows))
        settings = [*recipes(CACHES.name_of(base.recipe.cache), given.windows, given.limits)]
        speeds = (run for count in given.in_flight for run in timed(base, settings, count, given.repeats))
        solved = ({"cache": one[0], **one[1], **figures(pipeline(base, *one), given.count)} for one in settings)
        for run in speeds if given.in_flight else solved:
            print(run := {"model": model} | run, flush=True)
            report["runs"].append(run)
            save(report, given.out)


if __name__ == "__main__":
    main()
