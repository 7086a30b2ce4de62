"""Accuracy and cost of recipes on the held-out problems of a model in the box.

    python -m benchmarks.quality --preset foundation --device cuda --out benchmarks/results/tiny-quality-h200
    python -m benchmarks.quality --model tiny-llada2 --device cuda --out benchmarks/results/tiny-llada2-quality-h200
    python -m benchmarks.quality --preset further --out benchmarks/results/tiny-further-cpu

It writes OUT.json, with command, commit, hardware and refused recipes, and OUT.csv. Counts are those of
`dinfer.Counts`: tokens from the first stop token on do not count, and forwards are summed over the problems. On a GPU
every iteration and cache runs once before timing, so that no wall time includes compilation. `docs/metrics.md` defines
the columns.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

import dinfer
from benchmarks.provenance import provenance
from dinfer.analysis.metrics import Metrics, Sample
from dinfer.analysis.metrics import measure as metrics_of
from dinfer.demo.problems import Problem, generate, is_correct
from dinfer.step.spec import ModelSpec

BLOCK = 32
FREQUENCIES = "benchmarks/results/tiny-token-counts.json"
FOUNDATION = [
    *({"name": "fixed", "steps": steps} for steps in (32, 16, 8, 4)),
    *({"name": "threshold", "threshold": threshold} for threshold in (0.99, 0.95, 0.9, 0.8, 0.7, 0.5)),
]
# LLaDA2.1's presets Speed and Quality, a more careful setting, and Quality without edits
EDITING = [
    {"name": "joint_threshold", "threshold": threshold, "edit_threshold": edit}
    for threshold, edit in ((0.5, 0.0), (0.7, 0.5), (0.9, 0.5), (0.7, 1.0))
]
# Decoders, caches and settings beyond "everything", each with its published or own default
SURE = {"name": "threshold", "threshold": 0.9}
CALIBRATED: list[dict[str, Any]] = [  # tokens a step as with `fixed` in 16 and 8 steps
    {"name": "calibrated", "frequencies": FREQUENCIES, "threshold": 100.0, "least": least} for least in (2, 4)
]


def further(spec: ModelSpec) -> Iterator[tuple[Any, Any, Any]]:
    """Recipes that need another iteration or cache than others, or options of a cache."""
    if spec.causal_block is not None:
        yield {"name": "block_diffusion"}, {"name": "s2d2"}, "block"
        return
    block, full = {"name": "blockwise", "block": BLOCK}, {"name": "full"}
    yield block, SURE, {"name": "prefix", "suffix": 32}
    yield block, SURE, "d2cache"
    yield block, {"name": "calibrated"}, "dual"
    yield block, CALIBRATED[1], "dual"
    yield full, {"name": "prophet"}, "dual"
    yield full, {"name": "daedal"}, "none"
    yield block, {"name": "entropy_bound", "limits": "each", "bound": 0.5}, "dual"
    yield block, CALIBRATED[0], "dual"


@dataclass(frozen=True, slots=True)
class Row:
    """One recipe."""

    iteration: str
    decoder: str
    options: str
    cache: str
    metrics: Metrics

    def to_dict(self) -> dict[str, Any]:
        """The line of the table: recipe and figures."""
        recipe = {name: getattr(self, name) for name in ("iteration", "decoder", "options", "cache")}
        return recipe | self.metrics.row()


def recipes(preset: str, spec: ModelSpec) -> Iterator[tuple[Any, Any, Any]]:
    """Configurations of iteration, decoder and cache of a preset.

    "foundation": two decoders at several settings, and for block-causal models decoders that edit. "everything": every
    decoder at one setting with every iteration and every cache, then the other settings of "foundation". "further":
    those of `further`.
    """
    foundation = product([{"name": "blockwise", "block": BLOCK}], FOUNDATION, ["none", "prefix", "dual"])
    if spec.causal_block is not None:
        foundation = product([{"name": "block_diffusion"}], FOUNDATION + EDITING, ["none", "block"])
    if preset != "everything":
        yield from further(spec) if preset == "further" else foundation
        return
    iterations: list[Any] = [
        {"name": name} | ({"block": BLOCK} if name not in ("full", "block_diffusion") else {})
        for name in dinfer.ITERATIONS.names()
    ]
    decoders: list[Any] = [{"name": "fixed", "steps": 32}, {"name": "threshold", "threshold": 0.9}]
    decoders += [{"name": name} for name in dinfer.DECODERS.names() if name not in ("fixed", "threshold")]
    yield from product(iterations, decoders, dinfer.CACHES.names())
    yield from (recipe for recipe in foundation if recipe[1] not in decoders)


def label(recipe: tuple[Any, Any, Any]) -> str:
    """A recipe in words: iteration, decoder, its options, cache."""
    iteration, decoder, cache = recipe
    return " ".join([iteration["name"], decoder["name"], options_of(decoder), words(cache)])


def words(cache: Any) -> str:
    """A cache in words: its name, and its options if there are any."""
    return cache if isinstance(cache, str) else f"{cache['name']} {options_of(cache)}"


def options_of(part: dict[str, Any]) -> str:
    """The options of a component in words, with the names of files."""
    return " ".join(
        f"{key}={Path(value).name if key == 'frequencies' else value}" for key, value in part.items() if key != "name"
    )


def token_counts(pipe: dinfer.Pipeline) -> dict[str, Any]:
    """The counts of each token in 2,000 solutions of the training split, for decoder.frequencies."""
    texts = [problem.solution for problem in generate("train", 2000, 987_654)]
    counts = Counter(token for text in texts for token in pipe.tokenizer.encode(text, add_special_tokens=False))
    return {"total": counts.total(), "counts": {str(token): count for token, count in sorted(counts.items())}}


def sifted(model: Any, wanted: Iterable[tuple[Any, Any, Any]]) -> tuple[list[tuple[Any, Any, Any]], dict[str, int]]:
    """The recipes that compose, and the number of refused ones by reason."""
    legal, refused = [], Counter[str]()
    for recipe in wanted:
        iteration, decoder, cache = recipe
        try:
            dinfer.compose(model, iteration=iteration, decoder=decoder, cache=cache)
        except dinfer.IncompatibleRecipe as error:
            refused[str(error)] += 1
        else:
            legal.append(recipe)
    return legal, dict(refused)


def samples_of(problems: Sequence[Problem], results: Sequence[Any]) -> list[Sample]:
    """The cost of each answer, and whether it is right."""
    pairs = zip(problems, results, strict=True)
    return [Sample.of(r.counts, r.stopped, float(is_correct(problem, r.text))) for problem, r in pairs]


def measure(base: dinfer.Pipeline, problems: list[Problem], new_tokens: int, recipe: tuple[Any, Any, Any]) -> Row:
    """Solves all problems with one recipe."""
    iteration, decoder, cache = recipe
    composed = dinfer.compose(base.model, iteration=iteration, decoder=decoder, cache=cache)
    pipe = dinfer.Pipeline(composed, base.tokenizer, base.engine.runtime)
    began = time.perf_counter()
    results = pipe.generate([problem.question for problem in problems], max_new_tokens=new_tokens)
    seconds = time.perf_counter() - began
    return Row(
        iteration=iteration["name"],
        decoder=decoder["name"],
        options=options_of(decoder),
        cache=words(cache),
        metrics=metrics_of(samples_of(problems, results), seconds),
    )


def with_problems(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the arguments for problems, device and output."""
    parser.add_argument("--count", type=int, default=500, help="held-out problems")
    parser.add_argument("--seed", type=int, default=0, help="of the problem generator")
    parser.add_argument("--new", type=int, default=96, help="max_new_tokens")
    parser.add_argument("--rows", type=int, default=500, help="requests in flight")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="path without suffix")
    return parser


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="a model in the box, or a folder with one trained likewise")
    parser.add_argument("--preset", choices=("foundation", "everything", "further"), default="foundation")
    parser.add_argument("--only", default="", help="a regular expression: only recipes whose line has it")
    given = with_problems(parser).parse_args()

    device = torch.device(given.device)
    problems = generate("heldout", given.count, given.seed)
    base = dinfer.load(given.model, device=device, dtype="float32", runtime=dinfer.Runtime(rows=given.rows))
    if given.preset == "further" and base.model.spec.causal_block is None:
        Path(FREQUENCIES).write_text(json.dumps(token_counts(base)) + "\n")
    wanted = (recipe for recipe in recipes(given.preset, base.model.spec) if re.search(given.only, label(recipe)))
    legal, refused = sifted(base.model, wanted)
    if device.type == "cuda":
        for parts in {json.dumps((recipe[0], recipe[2])) for recipe in legal}:
            iteration, cache = json.loads(parts)
            measure(base, problems, given.new, (iteration, {"name": "threshold", "threshold": 0.5}, cache))
    rows = []
    for recipe in legal:
        row = measure(base, problems, given.new, recipe)
        rows.append(row)
        print(
            f"{row.iteration:10} {row.decoder:16} {row.options:16} {row.cache:18} {row.metrics.accuracy:5.1f}% "
            f"NFE {row.metrics.nfe:6.2f}  TPF {row.metrics.tpf:6.3f}  {row.metrics.seconds:6.2f} s",
            flush=True,
        )
        if given.out:
            setting = {"setting": vars(given) | {"out": str(given.out)}, "refused": refused}
            write(given.out, [row.to_dict() for row in rows], setting | provenance(device))


def write(out: Path, table: list[dict[str, Any]], about: dict[str, Any]) -> None:
    """Writes OUT.json and OUT.csv. Call it after every row, so that an aborted run leaves figures."""
    out.with_suffix(".json").write_text(json.dumps(about | {"rows": table}, indent=1) + "\n")
    with out.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(table[0]))
        writer.writeheader()
        writer.writerows(table)


if __name__ == "__main__":
    main()
