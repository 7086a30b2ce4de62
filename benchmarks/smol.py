"""A converted model beside the model it came from: the same weights, engine, prompts and machine.

    python -m benchmarks.smol BASE --held OUT/held.jsonl --flights 1 64 --out benchmarks/results/smol-h100.json

For each recipe and number of requests in flight: tokens a second from the first request to the last, the base's NLL of
these answers in nats a token, the share of 4-grams that occurred before, tokens a forward, and with `--parent` the
share of answers that are the base's own. The base is decoded token by token (`model.block=1`), with `--strides` by
verified drafts; `--rules` says which drafts are accepted, beside what the base itself would write. Passes over the
prompts compile and capture; the first that captures no graph counts, or that ends when `--warm-up` seconds are over. A
row says how many graphs were captured while it was timed: with more than 0 it is no fair figure. `--forms 500` asks as
many requests for JSON and calls of functions.

Where nobody looks at speed, `--slice 32` asks so many at a time and saves what they were worth. The same command goes
on from there, until `--seconds` are over. The NLL's interval is a bootstrap over answers, that of what it is above the
first recipe's one over pairs of them.
"""

from __future__ import annotations

import json
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.clock import Lap, bounds, lap, settled
from benchmarks.provenance import begun, command_line, save
from dinfer import Pipeline, Runtime
from dinfer.structure.form import form_of
from dinfer.structure.tools import calls_in, tools
from tools.convert_ar.base import Base, load
from tools.convert_ar.measure import Score, drafting, each, loaded


def ran(given: Namespace, pipe: Pipeline, work: Callable[[], Any]) -> tuple[Lap, dict[str, Any]]:
    """Runs some work as often as its time needs to be fair; of a slice, whose time nobody looks at, once."""
    once = partial(lap, work, pipe.engine, cpu=given.cpu)
    return (once(), {}) if given.slice else settled(once, given.passes, given.warm_up)


def timed(
    base: Base, pipe: Pipeline, prompts: list[list[int]], given: Namespace, own: list[list[int]] | None, **options: Any
) -> dict[str, Any]:
    """Scores and speed of one recipe. `own`: the base's answers, empty before its own run; None: it has none."""
    work = partial(pipe.generate_ids, prompts, max_new_tokens=given.new, **options)
    (found, seconds, _), about = ran(given, pipe, work)
    answers = [one.ids + [base.chat.stop] * one.stopped for one in found]
    told = each(base, prompts, answers, [one.counts.forwards for one in found])
    scores, same = asdict(Score.of(told)), dict[str, Any]()
    if own:
        same["same_as_parent"] = sum(map(list.__eq__, answers, own)) / len(own)
    elif own is not None:
        own += answers
    return (
        {"tokens_per_s": scores["tokens"] / seconds, "seconds": seconds}
        | about
        | scores
        | same
        | {"sample": found[0].text, "each": told}
    )


def sliced(
    base: Base, pipe: Pipeline, prompts: list[list[int]], given: Namespace, row: dict[str, Any], **options: Any
) -> Iterator[dict[str, Any]]:
    """The scores of a row, after each slice of the prompts that it has not answered yet."""
    while part := prompts[len(row.get("each", ())) :][: given.slice]:
        found = timed(base, pipe, part, given, None, **options)
        told = row.get("each", []) + found["each"]
        row = asdict(Score.of(told)) | {"sample": found["sample"], "each": told}
        yield row


def measured(
    base: Base, pipe: Pipeline, prompts: list[list[int]], given: Namespace, row: dict[str, Any],
    own: list[list[int]] | None, one: dict[str, Any],
) -> Iterator[None]:  # fmt: skip
    """Fills a row, with a stop behind each part of it."""
    options = one | {"temperature": given.temperature}
    if given.slice is None:
        row |= timed(base, pipe, prompts, given, own, **options)
        yield
    else:
        yield from map(row.update, sliced(base, pipe, prompts, given, row, **options))
    shown = {name: value for name, value in row.items() if name not in ("sample", "forms", "each")}
    print(shown, flush=True)
    if row["in_flight"] != given.flights[-1]:
        return
    side = of_options(pipe, pipe.engine.runtime, one)
    if given.forms:
        for found in formed(side, given, row.get("forms", {})):
            row["forms"] = found
            yield
    if given.tasks and "tasks" not in row:
        row |= evaluated(side, given.tasks, given.limit)
        yield


def intervals(rows: list[dict[str, Any]]) -> None:
    """Adds the bootstrap intervals (95%) of the NLL, and of what it is above that of the first row of these prompts."""
    generator = torch.Generator().manual_seed(0)
    for row in rows:
        sums_A2 = torch.tensor([one[:2] for one in row["each"]], dtype=torch.float64)
        drawn_DA = torch.randint(len(sums_A2), (4000, len(sums_A2)), generator=generator)
        tails = torch.tensor([0.025, 0.975], dtype=torch.float64)
        nll_D = _mean(sums_A2[drawn_DA])
        row["nll_interval"] = nll_D.quantile(tails).tolist()
        if len(first := rows[0]["each"]) == len(sums_A2) and row is not rows[0]:
            first_A2 = torch.tensor([one[:2] for one in first], dtype=torch.float64)
            row["nll_above_first"] = float(_mean(sums_A2) - _mean(first_A2))
            row["nll_above_first_interval"] = (nll_D - _mean(first_A2[drawn_DA])).quantile(tails).tolist()


def _mean(sums_A2: Tensor) -> Tensor:
    tokens, nll = sums_A2.sum(-2).unbind(-1)
    return nll / tokens


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


def with_forms(pipe: Pipeline, count: int) -> list[tuple[str, Any]]:
    """So many requests for JSON and for calls of one of five functions, each with its kind."""
    listed = ", ".join(f"{name}({', '.join(one['properties'])})" for name, (_, one) in FUNCTIONS.items())
    groups: dict[str, Any] = {text: ({"schema": one}, text) for text, one in SCHEMAS.items()}
    calls = tools({name: one for name, (_, one) in FUNCTIONS.items()}, "required", parallel=False)
    for name, (text, _) in FUNCTIONS.items():
        groups[name] = ({"constraint": calls}, f"Call one of the functions {listed}. {text}")
    every = list[tuple[str, Any]]()
    for kind, (held, text) in groups.items():
        form = form_of(held)
        assert form is not None
        ids = [pipe.encode(text.format(subject)) for subject in SUBJECTS[: -(-count // len(groups))]]
        every += [(kind, one) for one in pipe.requests(ids, 128, None, form.language(pipe.compiler))]
    return sorted(every, key=lambda one: one[1].prompt[-12:])  # kinds come mixed


def formed(pipe: Pipeline, given: Namespace, whole: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """How many requests with forms are valid, and forwards beside tokens, after each slice. `whole`: what was asked."""
    told = dict(whole.get("kinds", {}))
    every, seconds = with_forms(pipe, given.forms), whole.get("seconds", 0.0)
    size = given.slice or len(every)
    for start in range(whole.get("requests", 0), len(every), size):
        part = every[start : start + size]
        (found, took, _), about = ran(given, pipe, partial(pipe.completed, [one for _, one in part], False))
        seconds += took
        for (kind, _), (one, *_) in zip(part, found, strict=True):
            sums = told.setdefault(kind, dict.fromkeys(("requests", "valid", "right", "tokens", "forwards"), 0))
            text = pipe.decode(one.output)
            valid, right = as_asked(kind, text)
            new = 1, valid, right, len(one.output), one.counts.forwards
            told[kind] = {name: sums[name] + more for name, more in zip(sums, new, strict=False)} | {"sample": text}
        whole = {name: sum(one[name] for one in told.values()) for name in ("requests", "valid", "tokens", "forwards")}
        whole |= {"tokens_per_forward": whole["tokens"] / whole["forwards"], "seconds": seconds} | about
        yield whole | {"kinds": dict(sorted(told.items()))}


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
    from evaluations.sandbox import in_sandbox
    from evaluations.settings import Limits

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
        decoder: Any = pipe.recipe.decoder
        yield {"model": "drafts", "stride": decoder.stride, "rejected": decoder.rejected} | rule, pipe, [{}]
    for adapter in given.adapter:
        for block in given.blocks:
            pipe = loaded(given.base, adapter, block, quantize=given.quantize, **where)
            has = hasattr(pipe.recipe.decoder, "threshold")
            yield (
                {"model": adapter, "block": block},
                pipe,
                [{"threshold": x} for x in given.thresholds] if has else [{}],
            )


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
    parser.add_argument("--thresholds", type=float, nargs="+", default=[1.0, 0.9, 0.7, 0.5], help="where one applies")
    parser.add_argument("--seconds", type=float, default=86400.0, help="no part begins later")
    parser.add_argument("--slice", type=int, help="requests at a time; no speed, and the same command goes on")
    bounds(parser)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--flights", type=int, nargs="+", default=[16], help="requests in flight")
    parser.add_argument("--most", type=int, default=200, help="prompts; fewer with few in flight")
    parser.add_argument("--cpu", action="store_true", help="seconds of the process: others do not lengthen them")
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
    table: dict[str, Any] = {**begun(args, device), "recipes": []}
    if args.slice and args.out and args.out.exists():
        earlier = json.loads(args.out.read_text())
        if changed := [name for name in ("command", "commit") if earlier[name] != table[name]]:
            parser.error(f"--out {args.out} is of another {' and '.join(changed)}: name another file")
        table = earlier
    began, every, rows = time.perf_counter(), list(recipes(args, base)), table["recipes"]
    for flight in args.flights:
        own: list[list[int]] | None = [] if args.parent and not args.slice else None
        asked = (prompts * -(-args.most // len(prompts)))[: args.most if args.slice else min(args.most, 12 * flight)]
        runtime = Runtime(rows=flight, graphs=device.type == "cuda")
        for named, pipe, choices in every:
            side = Pipeline(pipe.recipe, pipe.tokenizer, runtime)
            for one in choices:
                name = named | one | {"in_flight": flight}
                if not (known := [row for row in rows if name.items() <= row.items()]):
                    rows.append(name)
                for _ in measured(base, side, asked, args, (known or [name])[0], own, one):
                    intervals([row for row in rows if row["in_flight"] == flight and "each" in row])
                    save(table, args.out)
                    if time.perf_counter() - began > args.seconds:
                        return


if __name__ == "__main__":
    main()
