"""What a constraint costs: steps whose rows are in a language, by its number of states, beside steps without one.

    python -m benchmarks.constrained --out benchmarks/results/constrained-llada-8b-h200.json
    python -m benchmarks.constrained --shape small --device cpu --states 64 --new 64 --prompt 40     # dry run

Tokens of the random network are all bytes, and random words of two to six letters. The language is a list of random
words, repeated as often as that many states allow. Steps are timed in turns with plain ones, three runs each. On a card
the kernels that a constrained step launches more often than a plain one are listed, with their times.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics

import torch

from benchmarks.clock import Clock
from benchmarks.feeds import random_prompts, usual
from benchmarks.provenance import begun, command_line, save
from benchmarks.shapes import SHAPES, random_model
from dinfer import Pipeline, Runtime
from dinfer.core.engine.request import Request
from dinfer.core.terms.spec import ModelSpec
from dinfer.structure.abilities.constraints import InLanguage
from dinfer.structure.compiler import compile_automaton
from dinfer.structure.constraint import regex
from dinfer.structure.language import Language, Vocabulary, language

RUNS = 3
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def words(count: int, shortest: int, longest: int) -> list[str]:
    draw = random.Random(0)
    return ["".join(draw.choices(LETTERS, k=draw.randint(shortest, longest))) for _ in range(count)]


def vocabulary(spec: ModelSpec) -> Vocabulary:
    texts = [bytes([byte]) for byte in range(256)] + [word.encode() for word in words(spec.vocab - 256, 2, 6)]
    silent = {spec.eos_id, *([] if spec.mask_id is None else [spec.mask_id])}
    ends = frozenset({spec.eos_id})
    return Vocabulary([None if i in silent else text for i, text in enumerate(texts)], ends, ends)


def lists_of_words(states: int, tokens: Vocabulary) -> Language:
    """Lists of up to 16 words, one after the other, with at most so many states and nearly as many."""
    one = "|".join(words(min(16, states // 12), 8, 12))
    each = compile_automaton(regex(f"({one}) "))[0].states
    return language(compile_automaton(regex(f"(({one}) ){{0,{(states - 2) // each}}}"))[0], tokens)


def asks_of(found: Language | None, given: argparse.Namespace) -> tuple[InLanguage, ...]:
    return (InLanguage(found, given.prompt, given.prompt + given.new),) if found else ()


def times(pipe: Pipeline, requests: list[Request]) -> dict[str, float]:
    """Milliseconds of a step by its shape, where all rows took part."""
    with Clock(pipe.engine) as clock:
        for _ in pipe.engine.run(requests):
            pass
    rows = [row for row in clock.table() if row["lanes"] == len(requests)]
    return {f"{row['phase']} {row['lanes']}x{row['width']}": row["median_ms"] for row in rows}


def kernels(pipe: Pipeline, requests: list[Request]) -> dict[str, tuple[float, float]]:
    """How often a step launches each kernel, and the microseconds of a launch."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        times(pipe, requests)
    found = {event.key: event for event in profile.key_averages()}
    steps = max(found["_commit"].count, 1)
    return {
        name: (round(event.count / steps, 2), round(event.device_time_total / max(event.count, 1), 2))
        for name, event in found.items() if event.device_time_total
    }  # fmt: skip


def added(own: dict[str, tuple[float, float]], plain: dict[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
    """The kernels that are launched more or less often than in plain steps, by the difference."""
    more = {name: (round(count - plain.get(name, (0, 0))[0], 2), us) for name, (count, us) in own.items()}
    return {name: found for name, found in more.items() if abs(found[0]) > 0.1}


def main(args: list[str] | None = None) -> None:
    parser = command_line(__doc__, device="cuda")
    parser.add_argument("--shape", choices=SHAPES, default="llada-8b")
    parser.add_argument("--batch", default="1,8")
    parser.add_argument("--states", default="64,512,4096")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=256)
    given = parser.parse_args(args)
    device = torch.device(given.device)
    report = begun(given, device) | {"languages": {}, "batches": {}}
    model = random_model(given.shape, device)
    spec = model.spec
    tokens = vocabulary(spec)
    languages: dict[str, Language | None] = {"none": None}
    languages |= {states: lists_of_words(int(states), tokens) for states in given.states.split(",")}
    for name, found in languages.items():
        if found is not None:
            sizes = {"states": found.states, "classes": found.classes, "edges": len(found.edges_E3)}
            report["languages"][name] = sizes | {"pairs": len(found.pairs_P2)}
    recipe = usual(model)
    for batch in map(int, given.batch.split(",")):
        # Answers in a language end blocks sooner, so fewer steps are launched ahead. Here none is, whatever the rows.
        runtime = Runtime(rows=batch, graphs=device.type == "cuda")
        pipes = {name: Pipeline(recipe, None, runtime) for name in languages}
        for pipe in pipes.values():
            pipe.engine.loop.ahead = False
        prompts = random_prompts(spec, batch, given.prompt)
        rows: dict[str, dict[str, list[float]]] = {}
        for run in range(RUNS + 2):  # the first two compile and capture
            for name, found in languages.items():
                requests = [Request.behind(p, given.new, asks=asks_of(found, given)) for p in prompts]
                for step, ms in times(pipes[name], requests).items():
                    if run > 1:
                        rows.setdefault(step, {}).setdefault(name, []).append(ms)
        report["batches"][batch] = {
            step: {
                name: {"ms": statistics.median(own), "all_ms": own, "more": statistics.median(own) / plain - 1}
                for name, own in found.items()
            }
            for step, found in rows.items() if (plain := statistics.median(found.get("none", [0.0])))
        }  # fmt: skip
        report["refused_graphs"] = [why for pipe in pipes.values() for why in pipe.engine.runner.refused.values()]
        save(report, given.out)
    if device.type == "cuda":
        pipe, prompt = Pipeline(recipe, None, Runtime(rows=1, graphs=True)), random_prompts(spec, 1, given.prompt)[0]
        seen = {}
        for name, found in languages.items():
            requests = [Request.behind(prompt, given.new, asks=asks_of(found, given))]
            for _ in range(2):  # compiles and captures
                times(pipe, requests)
            seen[name] = kernels(pipe, requests)
        report["kernels"] = {name: added(own, seen["none"]) for name, own in seen.items()}
        save(report, given.out)
    print(json.dumps(report, indent=1, default=str))


if __name__ == "__main__":
    main()
