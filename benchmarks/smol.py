"""A converted model beside the model it came from: the same weights, engine, prompts and machine.

    python -m benchmarks.smol BASE --held OUT/held.jsonl --flights 1 64 --out benchmarks/results/smol-h100.json

For each recipe and number of requests in flight: tokens a second from the first request to the last, the base's NLL of
these answers in nats a token, the share of 4-grams that occurred before, tokens a forward, and with `--parent` the
share of answers that are the base's own. The base is decoded token by token (`model.block=1`), with `--strides` by
verified drafts; `--rules` says which drafts are accepted, beside what the base itself would write. Passes over the
prompts compile and capture, until one captures no graph or `--warm` seconds are over. The next one is timed, and says
how many graphs it captured itself. `--forms 500` asks as many requests for
JSON and calls of functions.
"""

from __future__ import annotations

import json
import math
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.provenance import command_line, provenance, save
from dinfer import Pipeline, Runtime
from dinfer.structure.form import form_of
from dinfer.structure.tools import calls_in, tools
from tools.convert_ar.base import Base, load
from tools.convert_ar.measure import drafting, judged, loaded

PASSES = 4  # at most, before the one that is timed


def warmed(pipe: Pipeline, prompts: list[list[int]], given: Namespace, **options: Any) -> float:
    """Seconds until all is compiled and captured, or there is no time left for it."""
    captured, runner, begun = -1, pipe.engine.runner, time.perf_counter()
    for _ in range(PASSES):
        if captured == runner.captured or time.perf_counter() - begun > given.warm:
            break
        captured = runner.captured
        pipe.generate_ids(prompts, max_new_tokens=given.new, **options)
    return time.perf_counter() - begun


def timed(
    base: Base, pipe: Pipeline, prompts: list[list[int]], new: int, own: list[list[int]] | None, **options: Any
) -> dict[str, Any]:
    """Scores and speed of one recipe. `own`: the base's answers, empty before its own run; None: it has none."""
    runner = pipe.engine.runner
    captured, begun = runner.captured, time.perf_counter()
    found = pipe.generate_ids(prompts, max_new_tokens=new, **options)
    seconds = time.perf_counter() - begun
    answers = [one.ids + [base.chat.stop] * one.stopped for one in found]
    scores = judged(base, prompts, answers, [one.counts.forwards for one in found])
    if own:
        scores["same_as_parent"] = sum(map(list.__eq__, answers, own)) / len(own)
    elif own is not None:
        own += answers
    speed = {"tokens_per_s": scores["tokens"] / seconds, "seconds": seconds, "new_graphs": runner.captured - captured}
    return speed | scores | {"sample": found[0].text}


SUBJECTS = [
    "bread", "bees", "rain", "museums", "dancing", "bicycles", "lighthouses", "rivers", "gardens", "paper",
    "trains", "neighbours", "markets", "cooking", "glass", "wolves", "schools", "birthdays", "leaves",
    "villages", "diaries", "deserts", "music", "windows", "bridges", "summer", "winter", "silver", "tables",
    "friends", "apples", "coffee", "candles", "soap", "rice", "horses", "clocks", "maps", "islands", "boats",
    "letters", "chess", "football", "painting", "stars", "mountains", "forests", "castles", "bakers", "doctors",
]  # fmt: skip
TEXT, SMALL = {"type": "string", "minLength": 1, "maxLength": 40}, {"type": "integer", "minimum": 0, "maximum": 999}
KINDS = {"enum": ["good", "bad", "neither"]}


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


SCHEMAS = {
    "Write a title, a number of words and up to three tags for a text about {}.": _object(
        title=TEXT, words=SMALL, tags={"type": "array", "items": TEXT, "minItems": 1, "maxItems": 3}
    ),
    "What do people think of {}? Give an opinion and a reason.": _object(opinion=KINDS, reason=TEXT),
    "Name two books about {}, with their years.": {
        "type": "array", "minItems": 2, "maxItems": 2,
        "items": _object(title=TEXT, year={"type": "integer", "minimum": 1900, "maximum": 2026}),
    },
    "Ask a question about {} with its answer, and say whether it is easy.": _object(
        question=TEXT, answer=TEXT, easy={"type": "boolean"}
    ),
    "Plan a day about {}: a place, and what it costs.": _object(plan=_object(place=TEXT, cost=SMALL), note=TEXT),
}  # fmt: skip
FUNCTIONS = {
    "search": ("Look for {} on the web.", _object(query=TEXT)),
    "set_timer": ("Remind me of {} in ten minutes.", _object(about=TEXT, minutes=SMALL)),
    "add_to_list": ("Put {} on my list.", _object(item=TEXT)),
    "play_music": ("Play a song about {}.", _object(song=TEXT, loud={"type": "boolean"})),
    "rate": ("I like {}, note that.", _object(what=TEXT, stars={"type": "integer", "minimum": 1, "maximum": 5})),
}


def formed(pipe: Pipeline, count: int) -> dict[str, Any]:
    """Requests for JSON and for calls of one of five functions: how many are valid, and forwards beside tokens."""
    listed = ", ".join(f"{name}({', '.join(one['properties'])})" for name, (_, one) in FUNCTIONS.items())
    groups: dict[str, Any] = {text: ({"schema": one}, text) for text, one in SCHEMAS.items()}
    calls = tools({name: one for name, (_, one) in FUNCTIONS.items()}, "required", parallel=False)
    for name, (text, _) in FUNCTIONS.items():
        groups[name] = ({"constraint": calls}, f"Call one of the functions {listed}. {text}")
    asked = list[tuple[str, Any]]()
    for kind, (held, text) in groups.items():
        form = form_of(held)
        assert form is not None
        ids = [pipe.encode(text.format(subject)) for subject in SUBJECTS[: -(-count // len(groups))]]
        asked += [(kind, one) for one in pipe.requests(ids, 128, None, form.language(pipe.compiler))]
    asked.sort(key=lambda one: one[1].prompt[-12:])  # kinds come mixed
    began = time.perf_counter()
    found = [done for done, _, _ in pipe.completed([one for _, one in asked], False)]
    seconds, told = time.perf_counter() - began, dict[str, Any]()
    for (kind, _), one in zip(asked, found, strict=True):
        sums = told.setdefault(kind, dict.fromkeys(("requests", "valid", "right", "tokens", "forwards"), 0))
        text = pipe.decode(one.output)
        valid, right = as_asked(kind, text)
        new = 1, valid, right, len(one.output), one.counts.forwards
        told[kind] = {name: sums[name] + more for name, more in zip(sums, new, strict=False)} | {"sample": text}
    whole = {name: sum(one[name] for one in told.values()) for name in ("requests", "valid", "tokens", "forwards")}
    whole |= {"tokens_per_forward": whole["tokens"] / whole["forwards"], "seconds": seconds}
    return whole | {"kinds": dict(sorted(told.items()))}


def as_asked(kind: str, text: str) -> tuple[bool, bool]:
    """Whether an answer is valid, and whether it calls the function that fits the question."""
    from jsonschema import ValidationError, validate

    try:
        if kind in SCHEMAS:
            validate(json.loads(text), SCHEMAS[kind])
            return True, False
        _, [call] = calls_in(text)
        validate(json.loads(call.arguments), FUNCTIONS[call.name][1])
        return True, call.name == kind
    except (ValueError, ValidationError):
        print(f"not valid: {text!r}", flush=True)
        return False, False


def evaluated(pipe: Any, tasks: list[str], limit: int | None) -> dict[str, Any]:
    """The metrics of lm-eval's tasks, by the recipe of the pipeline."""
    import lm_eval

    from evaluations.adapter import DinferLM
    from evaluations.harness import register
    from evaluations.sandbox import Limits, in_sandbox

    with in_sandbox(Limits()):
        found = lm_eval.simple_evaluate(
            model=DinferLM(pipe), tasks=tasks, task_manager=register(), apply_chat_template=True, limit=limit,
            confirm_run_unsafe_code=True, bootstrap_iters=0,
        )  # fmt: skip
    shown = {
        task: {
            name.split(",")[0]: value
            for name, value in scores.items()
            if isinstance(value, float) and "_stderr" not in name
        }
        for task, scores in found["results"].items()
    }
    samples = {task: [one["filtered_resps"] for one in found["samples"][task][:8]] for task in shown}
    return {"tasks": shown, "documents": {task: len(found["samples"][task]) for task in shown}, "task_samples": samples}


def recipes(given: Namespace, base: Base) -> Iterator[tuple[dict[str, Any], Any, list[dict[str, Any]]]]:
    """What is measured, its pipeline, and the options of its requests."""
    for text in given.recipe:
        where = {"device": given.device, "dtype": given.dtype} | (parts := json.loads(text))
        for named, pipe, options in models(given, base, where):
            yield named | ({"recipe": parts} if parts else {}), pipe, options


def models(
    given: Namespace, base: Base, where: dict[str, Any]
) -> Iterator[tuple[dict[str, Any], Any, list[dict[str, Any]]]]:
    """The same for one set of other parts."""
    if given.parent:
        yield {"model": "parent"}, loaded(given.base, None, 1, mask=base.chat.mask, **where), [{}]
    for stride, text in product(given.strides, given.rules):
        rule = {"stride": stride} | json.loads(text)
        pipe = drafting(given.base, given.drafts, rule.pop("stride"), rule, **where)
        yield {"model": "drafts", "stride": pipe.recipe.decoder.stride} | rule, pipe, [{}]
    for adapter in given.adapter:
        for block in given.blocks:
            pipe = loaded(given.base, adapter, block, quantize=given.quantize, **where)
            yield {"model": adapter, "block": block}, pipe, [{"threshold": one} for one in given.thresholds]


def of_options(pipe: Pipeline, runtime: Runtime, options: dict[str, Any]) -> Pipeline:
    """The same, where these options are those of all requests."""
    recipe = pipe.recipe
    decoder: Any = recipe.decoder
    decoder = replace(decoder, **options)
    return Pipeline(replace(recipe, decoder=decoder), pipe.tokenizer, runtime)


def main() -> None:
    """Writes the table of all recipes asked for."""
    parser = command_line(__doc__, device="cpu")
    parser.add_argument("base", type=Path)
    parser.add_argument("--held", type=Path, required=True, help="held.jsonl of tools/convert_ar")
    parser.add_argument("--adapter", nargs="*", default=["smol"])
    parser.add_argument("--parent", action="store_true", help="the base, token by token")
    parser.add_argument("--drafts", default="smol-drafts", help="adapter that drafts for the base")
    parser.add_argument("--strides", type=int, nargs="*", default=[], help="of drafts: most tokens of a step")
    parser.add_argument("--rules", nargs="+", default=["{}"], help="of drafts: options of decoder=isd, as JSON")
    parser.add_argument("--blocks", type=int, nargs="+", default=[16, 32])
    parser.add_argument("--thresholds", type=float, nargs="+", default=[1.0, 0.9, 0.7, 0.5])
    parser.add_argument("--seconds", type=float, default=math.inf, help="no row begins later")
    parser.add_argument("--warm", type=float, default=math.inf, help="a row warms up no longer, in seconds")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--flights", type=int, nargs="+", default=[16], help="requests in flight")
    parser.add_argument("--most", type=int, default=200, help="prompts; fewer with few in flight")
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--recipe", nargs="+", default=["{}"], help="other parts of recipes, as JSON")
    parser.add_argument("--tasks", nargs="*", default=[], help="of lm-eval, with the most requests in flight")
    parser.add_argument("--forms", type=int, default=0, help="requests with forms, with the most in flight")
    parser.add_argument("--limit", type=int, help="documents of each task")
    parser.add_argument("--dtype")
    parser.add_argument("--quantize", help="of the converted model, whose merged weights are floats")
    args = parser.parse_args()
    device = torch.device(args.device)
    base = load(args.base, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    with args.held.open() as file:
        held = [json.loads(line) for line in file]
    prompts = [one["tokens"][: one["answer"]] for one in held]
    table: dict[str, Any] = {**provenance(device), "new_tokens": args.new, "recipes": []}
    begun, every = time.perf_counter(), list(recipes(args, base))
    for flight in args.flights:
        count = min(args.most, 12 * flight)
        own: list[list[int]] | None = [] if args.parent else None
        asked = (prompts * -(-count // len(prompts)))[:count]
        runtime = Runtime(rows=flight, graphs=device.type == "cuda")
        for named, pipe, choices in every:
            side = Pipeline(pipe.recipe, pipe.tokenizer, runtime)
            for one in choices:
                if time.perf_counter() - begun > args.seconds:
                    continue
                options = one | {"temperature": args.temperature}
                row = named | one | {"in_flight": flight, "warm_up_s": warmed(side, asked, args, **options)}
                row |= timed(base, side, asked, args.new, own, **options)
                if args.forms and flight == args.flights[-1]:
                    row["forms"] = formed(of_options(side, runtime, one), args.forms)
                if args.tasks and flight == args.flights[-1]:
                    row |= evaluated(of_options(side, runtime, one), args.tasks, args.limit)
                table["recipes"].append(row)
                print({name: value for name, value in row.items() if name not in ("sample", "forms")}, flush=True)
                save(table, args.out)


if __name__ == "__main__":
    main()
