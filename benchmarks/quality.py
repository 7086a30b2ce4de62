"""Accuracy and cost of recipes on the held-out problems of a model in the box.

    python -m benchmarks.quality --preset foundation --device cuda --out benchmarks/results/tiny-quality-h200
    python -m benchmarks.quality --model tiny-llada2 --device cuda --out benchmarks/results/tiny-llada2-quality-h200
    python -m benchmarks.quality --preset further --out benchmarks/results/tiny-further-cpu
    python -m benchmarks.quality --preset several --adapter tiny-d2f --block 32 --rows 1000 --device cuda --out OUT

It writes OUT.json, with command, commit, hardware and refused recipes. Counts are those of
`dinfer.Counts`: tokens from the first stop token on do not count, and forwards are summed over the problems. On a GPU
every iteration and cache runs once before timing, so that no wall time includes compilation. `docs/metrics.md` defines
the columns.
"""

from __future__ import annotations

import json
import re
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import cache, partial
from itertools import product
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

import torch

import dinfer
from benchmarks.provenance import begun, command_line, save
from dinfer.core.loading.checkpoint import family_of, read_config
from dinfer.core.loading.files import locate
from dinfer.core.terms.spec import ModelSpec
from dinfer.demo.problems import Problem, generate, is_correct
from dinfer.lab.metrics import Sample
from dinfer.lab.metrics import measure as metrics_of

Recipe = tuple[Any, Any, Any]  # iteration, decoder, cache
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


def further(spec: ModelSpec) -> Iterator[Recipe]:
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


def looking(spec: ModelSpec) -> Iterator[Recipe]:
    """A look ahead where no token is sure, Info-Gain as published in both forms, DAWN, and the threshold alone."""
    ahead: dict[str, Any] = {"name": "look_ahead", "block": BLOCK}
    yield {"name": "blockwise", "block": BLOCK}, SURE, "none"
    yield ahead, {"name": "when_sure"}, "none"
    yield ahead, {"name": "when_sure", "threshold": 0.8, "all": True}, "none"
    yield {"name": "blockwise", "block": BLOCK}, {"name": "dawn", "sink": 0.03}, "none"
    yield ahead | {"stop": "fill", "heat": 0.1}, {"name": "when_sure", "steps": 8}, "none"


def several(spec: ModelSpec, edits: bool, blocks: int) -> Iterator[Recipe]:
    """Recipes with several open blocks, and the same decoders with one. `edits`: the model was trained to edit."""
    aligned = spec.causal_block is not None and not spec.prompt_block
    block, cache = spec.causal_block or 32, "block" if spec.causal_block else "none"
    pairs = [*product((0.3, 0.4, 0.5, 0.6, 0.7, 0.9), (0.0, 0.5))]
    decoders: list[dict[str, Any]] = [
        *({"name": "threshold", "threshold": bar} for bar in (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)),
        *({"name": "entropy_bound", "bound": bound} for bound in (0.1, 0.2, 0.4, 0.8)),
        *({"name": "hierarchical", "threshold": bar, "low_threshold": bar / 2} for bar in (0.7, 0.9)),
        {"name": "factor", "factor": 1.0},
    ]
    for name in (*(["joint_threshold"] if edits else []), *(["insert_delete"] if spec.moving_ids else [])):
        decoders += ({"name": name, "threshold": bar, "edit_threshold": edit} for bar, edit in pairs)
    decoders += ({"name": "dmax", "threshold": bar} for bar in (0.3, 0.5, 0.7) if edits)
    sweep = {"name": "multi_block", "blocks": blocks, "block": block, "align": aligned}
    for decoder in decoders:
        mixed = {"name": "dmax"} if decoder["name"] == "dmax" else {}
        yield sweep | mixed, decoder, cache
        yield sweep | {"add_at": 0.0, "force_at": 0.0} | mixed, decoder, cache
        if decoder["name"] == "threshold" and decoder["threshold"] >= 0.7:
            yield sweep | {"name": "lopa"}, decoder, cache
    one: dict[str, Any] = {"name": "block_diffusion"} if aligned else {"name": "blockwise", "block": block}
    yield from ((one, decoder, cache) for decoder in ({"name": "fixed", "steps": block}, *decoders))


def recipes(preset: str, spec: ModelSpec) -> Iterator[Recipe]:
    """Configurations of iteration, decoder and cache of a preset.

    "foundation": two decoders at several settings, and for block-causal models decoders that edit. "everything": every
    decoder at one setting with every iteration and every cache, then the other settings of "foundation". "further":
    those of `further`.
    """
    foundation = product([{"name": "blockwise", "block": BLOCK}], FOUNDATION, ["none", "prefix", "dual"])
    if spec.causal_block is not None:
        foundation = product([{"name": "block_diffusion"}], FOUNDATION + EDITING, ["none", "block"])
    if preset != "everything":
        yield from {"further": further, "looking": looking}[preset](spec) if preset != "foundation" else foundation
        return
    iterations: list[Any] = [
        {"name": name} | ({"block": BLOCK} if name not in ("full", "block_diffusion") else {})
        for name in dinfer.ITERATIONS.names()
    ]
    decoders: list[Any] = [{"name": "fixed", "steps": 32}, {"name": "threshold", "threshold": 0.9}]
    decoders += [{"name": name} for name in dinfer.DECODERS.names() if name not in ("fixed", "threshold")]
    yield from product(iterations, decoders, dinfer.CACHES.names())
    yield from (recipe for recipe in foundation if recipe[1] not in decoders)


def label(recipe: Recipe) -> str:
    """A recipe in words."""
    return " ".join(map(words, recipe))


def words(part: Any) -> str:
    """A component in words: its name, and its options if there are any."""
    return part if isinstance(part, str) else f"{part['name']} {options_of(part)}".rstrip()


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


def sifted(model: Any, wanted: Iterable[Recipe]) -> tuple[list[Recipe], dict[str, int]]:
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


@cache
def load(name: str, adapter: str | None, block: int, device: str, rows: int) -> dinfer.Pipeline:
    """A model in the box, or a folder with one, as a pipeline; with an adapter."""
    given: dict[str, Any] = {"name": family_of(read_config(locate(name))), "checkpoint": name}
    given |= {"adapter": adapter} if adapter else {}
    given |= {"block": block} if block else {}
    return dinfer.load(given, cache="none", device=device, dtype="float32", runtime=dinfer.Runtime(rows=rows))


def answered(base: dinfer.Pipeline, problems: list[Problem], new_tokens: int, recipe: Recipe) -> list[Sample]:
    """Solves problems with one recipe."""
    iteration, decoder, cache = recipe
    composed = dinfer.compose(base.model, iteration=iteration, decoder=decoder, cache=cache)
    pipe = dinfer.Pipeline(composed, base.tokenizer, base.engine.runtime)
    return samples_of(problems, pipe.generate([problem.question for problem in problems], max_new_tokens=new_tokens))


def own_part(given: Namespace, problems: list[Problem], recipe: Recipe) -> tuple[list[Sample], float]:
    """What a process of several does: the answers to its problems, and the CPU seconds they took."""
    torch.set_num_threads(1)
    base = load(given.model, given.adapter, given.block, given.device, given.rows)
    began = time.process_time()
    return answered(base, problems, given.new, recipe), time.process_time() - began


def measured(
    base: dinfer.Pipeline, problems: list[Problem], given: Namespace, recipe: Recipe, pool: Pool | None = None
) -> Iterator[dict[str, Any]]:
    """The line of the table: of all problems, or, from several processes, of the first ones, then of more of them."""
    iteration, decoder, cache = recipe
    began, cpu, samples, used = time.perf_counter(), time.process_time(), list[Sample](), 0.0
    parts: Iterable[tuple[list[Sample], float]]
    if pool is None:
        parts = [(answered(base, problems, given.new, recipe), time.process_time() - cpu)]
    else:
        split = (problems[at : at + given.rows] for at in range(0, len(problems), given.rows))
        parts = pool.imap(partial(own_part, given, recipe=recipe), split)
    for more, seconds in parts:
        samples, used = samples + more, used + seconds
        yield {
            "iteration": iteration["name"], "iteration_options": options_of(iteration), "decoder": decoder["name"],
            "options": options_of(decoder), "cache": words(cache),
            **metrics_of(samples, time.perf_counter() - began).row(), "cpu_seconds": round(used, 1),
        }  # fmt: skip


def main() -> None:
    parser = command_line(__doc__, device="cpu")
    parser.add_argument("--model", default="tiny", help="a model in the box, or a folder with one trained likewise")
    parser.add_argument(
        "--preset", choices=("foundation", "everything", "further", "looking", "several"), default="foundation"
    )
    parser.add_argument("--adapter", help="folder or name of an adapter that is merged into it")
    parser.add_argument("--block", type=int, default=0, help="its attention blocks from the prompt's end (D2F)")
    parser.add_argument("--edits", action="store_true", help="with several: decoders that edit too")
    parser.add_argument("--blocks", type=int, default=4, help="with several: blocks open at once, at most")
    parser.add_argument("--only", default="", help="a regular expression: only recipes whose line has it")
    parser.add_argument("--count", type=int, default=500, help="held-out problems")
    parser.add_argument("--skip", type=int, default=0, help="so many of them, which an earlier run has solved")
    parser.add_argument("--seed", type=int, default=0, help="of the problem generator")
    parser.add_argument("--new", type=int, default=96, help="max_new_tokens")
    parser.add_argument("--rows", type=int, default=500, help="requests in flight, of each process")
    parser.add_argument("--processes", type=int, default=1, help="of one CPU thread each, that share the problems")
    given = parser.parse_args()

    device = torch.device(given.device)
    problems = generate("heldout", given.count, given.seed)[given.skip :]
    base = load(given.model, given.adapter, given.block, given.device, given.rows)
    if given.preset == "further" and base.model.spec.causal_block is None:
        Path(FREQUENCIES).write_text(json.dumps(token_counts(base)) + "\n")
    blocks = several(base.model.spec, given.edits, given.blocks)
    wanted = blocks if given.preset == "several" else recipes(given.preset, base.model.spec)
    legal, refused = sifted(base.model, (recipe for recipe in wanted if re.search(given.only, label(recipe))))
    if device.type == "cuda":
        for parts in {json.dumps((recipe[0], recipe[2])) for recipe in legal}:
            iteration, cache = json.loads(parts)
            answered(base, problems, given.new, (iteration, {"name": "threshold", "threshold": 0.5}, cache))
    rows = []
    with Pool(given.processes) if given.processes > 1 else nullcontext() as pool:
        for recipe in legal:
            row: dict[str, Any] = {}
            for row in measured(base, problems, given, recipe, pool):
                save(begun(given, device) | {"refused": refused, "rows": [*rows, row]}, given.out)
            rows.append(row)
            figures = "{accuracy:5.1f}%  NFE {nfe:6.2f}  TPF {tpf:6.3f}  {seconds:6.2f} s".format_map(row)
            print(f"{label(recipe):60} {figures}", flush=True)


if __name__ == "__main__":
    main()
