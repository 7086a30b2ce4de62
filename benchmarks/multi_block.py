"""Accuracy and tokens per forward of recipes with several open blocks and with one, for one model.

    python -m benchmarks.multi_block --model tiny --adapter dinfer/demo/checkpoints/tiny-d2f --block 32 \
        --device cuda --out benchmarks/results/multi-block-tiny-d2f

Every recipe solves problems of the training split and held-out problems. The former choose the best recipe: the most
tokens per forward with an accuracy of at least `--least`. OUT.json has both tables, and the area under accuracy and
parallelism (`dinfer.analysis.plots.aup`) of every iteration on held-out problems.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch

import dinfer
from benchmarks.provenance import provenance
from benchmarks.quality import options_of, samples_of, sifted, with_problems, write
from dinfer.analysis.metrics import measure as metrics_of
from dinfer.analysis.plots import aup, front
from dinfer.demo.problems import Problem, generate
from dinfer.loading.checkpoint import family_of, read_config
from dinfer.loading.files import locate
from dinfer.step.spec import ModelSpec

SURE: list[dict[str, Any]] = [
    *({"name": "threshold", "threshold": bar} for bar in (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)),
    *({"name": "entropy_bound", "bound": bound} for bound in (0.1, 0.2, 0.4, 0.8)),
    *({"name": "hierarchical", "threshold": bar, "low_threshold": bar / 2} for bar in (0.7, 0.9)),
    {"name": "factor", "factor": 1.0},
]
EDITS: list[dict[str, Any]] = [
    *(
        {"name": "joint_threshold", "threshold": bar, "edit_threshold": edit}
        for bar, edit in product((0.3, 0.4, 0.5, 0.6, 0.7, 0.9), (0.0, 0.5))
    ),
    *({"name": "dmax", "threshold": bar} for bar in (0.3, 0.5, 0.7)),
]
MOVES: list[dict[str, Any]] = [
    {"name": "insert_delete", "threshold": bar, "edit_threshold": edit}
    for bar, edit in product((0.3, 0.4, 0.5, 0.6, 0.7, 0.9), (0.0, 0.5))
]


def recipes(spec: ModelSpec, edits: bool, blocks: int = 4) -> Iterator[tuple[Any, Any, Any]]:
    """Configurations of iteration, decoder and cache for a model. `edits`: it was trained to edit."""
    aligned = spec.causal_block is not None and not spec.prompt_block
    block = spec.causal_block or 32
    cache = "block" if spec.causal_block else "none"
    decoders = SURE + (EDITS if edits else []) + (MOVES if spec.moving_ids else [])
    several = {"name": "multi_block", "blocks": blocks, "block": block, "align": aligned}
    for decoder in decoders:
        mixed = {"name": "dmax"} if decoder["name"] == "dmax" else {}
        yield several | mixed, decoder, cache
        yield several | {"add_at": 0.0, "force_at": 0.0} | mixed, decoder, cache
        if decoder["name"] == "threshold" and decoder["threshold"] >= 0.7:
            yield several | {"name": "lopa"}, decoder, cache
    one: dict[str, Any] = {"name": "block_diffusion"} if aligned else {"name": "blockwise", "block": block}
    yield from ((one, {"name": "fixed", "steps": block}, cache), *((one, decoder, cache) for decoder in decoders))


def load(name: str, adapter: str | None, block: int, device: str, rows: int) -> dinfer.Pipeline:
    """A model in the box, as a pipeline, with an adapter."""
    given: dict[str, Any] = {"name": family_of(read_config(locate(name))), "checkpoint": name}
    given |= {"adapter": adapter} if adapter else {}
    given |= {"block": block} if block else {}
    return dinfer.load(given, cache="none", device=device, dtype="float32", runtime=dinfer.Runtime(rows=rows))


def lines(
    base: dinfer.Pipeline, sets: list[list[Problem]], new_tokens: int, recipe: tuple[Any, Any, Any]
) -> list[dict[str, Any]]:
    """The table line of each set of problems. One batch solves all sets."""
    iteration, decoder, cache = recipe
    composed = dinfer.compose(base.model, iteration=iteration, decoder=decoder, cache=cache)
    pipe = dinfer.Pipeline(composed, base.tokenizer, base.engine.runtime)
    problems = [problem for part in sets for problem in part]
    began = time.perf_counter()
    samples = samples_of(problems, pipe.generate([problem.question for problem in problems], max_new_tokens=new_tokens))
    seconds = time.perf_counter() - began
    names = {
        "iteration": iteration["name"], "iteration_options": options_of(iteration),
        "decoder": decoder["name"], "options": options_of(decoder), "cache": cache,
    }  # fmt: skip
    found = []
    for part in sets:
        own, samples = samples[: len(part)], samples[len(part) :]
        found.append(names | metrics_of(own, seconds / len(sets)).row())
    return found


def line(recipe: tuple[Any, Any, Any]) -> str:
    """A recipe in words, with all options."""
    iteration, decoder, cache = recipe
    return " ".join([iteration["name"], options_of(iteration), decoder["name"], options_of(decoder), cache])


def chosen(rows: list[dict[str, Any]], least: float) -> int | None:
    """The index of the fastest row with an accuracy of at least `least`."""
    good = [at for at, row in enumerate(rows) if row["accuracy"] >= least]
    return max(good, key=lambda at: rows[at]["tpf"], default=None)


def areas(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The area under accuracy and parallelism of the front of each iteration: with all decoders, and with threshold."""
    best = max(row["accuracy"] for row in rows)
    found = {}
    for iteration in sorted({row["iteration"] for row in rows}):
        own = [row for row in rows if row["iteration"] == iteration]
        for name, part in (
            (iteration, own),
            (f"{iteration} threshold", [r for r in own if r["decoder"] == "threshold"]),
        ):
            if part:
                found[name] = round(aup([(row["tpf"], row["accuracy"]) for row in front(part)], best=best), 1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="a model in the box")
    parser.add_argument("--adapter", help="folder of an adapter that is merged into it")
    parser.add_argument("--block", type=int, default=0, help="its attention blocks from the prompt's end (D2F)")
    parser.add_argument("--edits", action="store_true", help="decoders that edit too")
    parser.add_argument("--blocks", type=int, default=4, help="blocks open at once, at most")
    parser.add_argument("--heldout", action="store_true", help="the held-out problems alone: nothing is chosen")
    parser.add_argument("--only", default="", help="a regular expression: only recipes whose line has it")
    parser.add_argument("--least", type=float, default=95.0, help="accuracy of the recipe that is chosen, in percent")
    given = with_problems(parser).parse_args()
    base = load(given.model, given.adapter, given.block, given.device, given.rows)
    wanted = (one for one in recipes(base.model.spec, given.edits, given.blocks) if re.search(given.only, line(one)))
    legal, refused = sifted(base.model, wanted)
    sets = {"validation": ("train", given.seed + 987_654), "heldout": ("heldout", given.seed)}
    if given.heldout:
        del sets["validation"]
    problems = {name: generate(split, given.count, seed) for name, (split, seed) in sets.items()}
    tables: dict[str, list[dict[str, Any]]] = {"validation": [], "heldout": []}
    for recipe in legal:
        rows = dict(zip(sets, lines(base, [*problems.values()], given.new, recipe), strict=True))
        for name, row in rows.items():
            tables[name].append(row)
        figures = [f"{name} {row['accuracy']:5.1f}% {row['tpf']:6.3f}" for name, row in rows.items()]
        print(line(recipe), *figures, sep="  ", flush=True)
        about = {
            "setting": vars(given) | {"out": str(given.out)}, "refused": refused,
            "chosen": chosen(tables["validation"], given.least), "areas": areas(tables["heldout"]),
            "validation": tables["validation"],
        }  # fmt: skip
        write(given.out, tables["heldout"], about | provenance(torch.device(given.device)))


if __name__ == "__main__":
    main()
