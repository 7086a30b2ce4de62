"""Accuracy of every decoder by temperature, cuts and penalties, on held-out problems of the models in the box.

    python -m benchmarks.sampled --model tiny --device cuda --rows 600 --out benchmarks/results/sampled-tiny-h200.json
    python -m benchmarks.sampled --model tiny-llada2 --device cuda --rows 600 --out FILE     # minutes on a card
    python -m benchmarks.sampled --one --settings T=0 T=0.7 T=1 top_p=0.9 --out benchmarks/results/sampled-one-cpu.json
    python -m benchmarks.sampled --settings T=0 "system message" --only threshold --out FILE
    python -m benchmarks.sampled --count 3 --new 64     # dry run on a CPU

All settings of a decoder run in one batch, each request with its own options and seed. `benchmarks.report` makes the
table of docs/results.md.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import torch

import dinfer
from benchmarks.provenance import begun, command_line, save
from benchmarks.quality import load, options_of, samples_of
from dinfer.analysis.metrics import measure
from dinfer.demo.problems import generate

SETTINGS: dict[str, dict[str, float]] = {
    "T=0": {},
    "T=0.1": {"temperature": 0.1},
    "T=0.3": {"temperature": 0.3},
    "T=0.7": {"temperature": 0.7},
    "T=1": {"temperature": 1.0},
    "top_k=1": {"temperature": 0.7, "top_k": 1},
    "top_p=0.5": {"temperature": 1.0, "top_p": 0.5},
    "top_p=0.9": {"temperature": 1.0, "top_p": 0.9},
    "repetition 1.05": {"repetition_penalty": 1.05},
}
SYSTEM = "system message"  # many clients always send one
BLOCKS, CAUSAL = {"name": "blockwise", "block": 32}, {"name": "block_diffusion"}
SPEED = {"name": "joint_threshold", "threshold": 0.5, "edit_threshold": 0.0}
EIGHT = {"name": "fixed", "steps": 8}
SURE = {"name": "threshold", "threshold": 0.9}
PLAIN = ("entropy_bound", "factor", "credit", "klass", "hierarchical")
Wanted = tuple[Any, Any, str, str | None]  # iteration, decoder, cache, adapter


def recipes(model: str) -> Iterator[Wanted]:
    """What is measured of a model."""
    if model == "tiny":
        yield BLOCKS, SURE, "dual", None
        yield {"name": "multi_block", "blocks": 4}, SURE, "block", "tiny-d2f"
        plain = [EIGHT, *({"name": name} for name in (*PLAIN, "remasking", "wino", "calibrated"))]
        slow = ({"name": "dream", "steps": 32}, {"name": "prophet", "steps": 32})
        yield from ((BLOCKS, decoder, "dual", None) for decoder in (*plain, *slow))
        yield {"name": "full"}, {"name": "daedal"}, "none", None
    else:
        several = {"name": "multi_block", "blocks": 4, "align": True, "force_at": 0.9}
        yield CAUSAL, SPEED, "block", None
        yield several, {"name": "joint_threshold"}, "block", "tiny-llada2-multi-block"
        yield CAUSAL, {"name": "insert_delete"}, "block", "tiny-llada2-insert-delete"
        plain = [SURE, EIGHT, *({"name": name} for name in PLAIN)]
        yield from ((CAUSAL, decoder, "block", None) for decoder in plain)


def one_a_step(model: str) -> Iterator[Wanted]:
    """Recipes that commit one token a step: what a draw costs by itself."""
    iteration, cache = (BLOCKS, "dual") if model == "tiny" else (CAUSAL, "block")
    for decoder in ({"name": "entropy_bound", "bound": 0.0}, {"name": "fixed", "steps": 32}):
        yield iteration, decoder, cache, None


def asked(question: str, setting: str) -> Any:
    """A question as a prompt, or as a conversation that begins with a system message."""
    if setting != SYSTEM:
        return question
    system = {"role": "system", "content": "You are a helpful assistant."}
    return [system, {"role": "user", "content": question}]


def main(args: list[str] | None = None) -> None:
    parser = command_line(__doc__, device="cpu")
    parser.add_argument("--model", choices=["tiny", "tiny-llada2"], default="tiny")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=4, help="of the problem generator")
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--only", nargs="*", help="names of decoders or iterations; default: all")
    parser.add_argument("--one", action="store_true", help="decoders that commit one token a step, and no others")
    parser.add_argument("--settings", nargs="*", choices=[*SETTINGS, SYSTEM], default=[*SETTINGS])
    given = parser.parse_args(args)
    report: dict[str, Any] = {**begun(given, torch.device(given.device)), "rows": []}
    problems = generate("heldout", given.count, given.seed)
    questions = [asked(problem.question, name) for name in given.settings for problem in problems]
    options = [SETTINGS.get(name, {}) | {"sampling.seed": i} for name in given.settings for i in range(given.count)]
    pipes: dict[str | None, dinfer.Pipeline] = {}
    for iteration, decoder, cache, adapter in (one_a_step if given.one else recipes)(given.model):
        if given.only and not {decoder["name"], iteration["name"]} & {*given.only}:
            continue
        if adapter not in pipes:
            block = 32 if adapter == "tiny-d2f" else 0
            pipes[adapter] = load(given.model, adapter, block, given.device, given.rows)
        base = pipes[adapter]
        recipe = dinfer.compose(base.model, iteration=iteration, decoder=decoder, cache=cache)
        pipe, began = dinfer.Pipeline(recipe, base.tokenizer, base.engine.runtime), time.perf_counter()
        results = pipe.generate(questions, max_new_tokens=given.new, options=options)
        seconds = time.perf_counter() - began
        about = {
            "model": adapter or given.model, "iteration": iteration["name"], "decoder": decoder["name"],
            "options": options_of(decoder), "cache": cache, "seconds": round(seconds, 1),
        }  # fmt: skip
        cells = {}
        for at, name in enumerate(given.settings):
            own = results[at * given.count : (at + 1) * given.count]
            row = measure(samples_of(problems, own), seconds).row()
            cells[name] = {key: row[key] for key in ("accuracy", "accuracy_low", "accuracy_high", "nfe", "tpf")}
        report["rows"].append(about | {"settings": cells})
        print(json.dumps(about), {name: cell["accuracy"] for name, cell in cells.items()}, flush=True)
        save(report, given.out)


if __name__ == "__main__":
    main()
