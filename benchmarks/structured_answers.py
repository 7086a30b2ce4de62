"""Accuracy and cost of answers as JSON, {"steps": [...], "answer": N}, beside free text, on a model in the box.

    python -m benchmarks.structured_answers --forms "free text" "own lines" JSON --count 100
    python -m benchmarks.structured_answers --device cuda --rows 512 --out FILE
    python -m benchmarks.structured_answers --device cuda --rows 512 --adapter FOLDER --out FILE   # of tools.json_tiny
    python -m benchmarks.structured_answers --device cuda --rows 512 --model tiny-llada2 --out FILE

Each form is measured on the same held-out problems, by default and with `posterior`. "own
lines" holds the network to the lines that it was trained on. Forwards, tokens and forced commits are means of an
answer, and `low` and `high` the 95% interval of the accuracy. `free_text_forwards`: what free text takes for as many
tokens. Free text is measured without the adapter.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import dinfer
from benchmarks.provenance import begun, command_line, save
from dinfer.core.pipeline import Pipeline
from dinfer.demo.problems import Problem, generate, is_correct
from dinfer.lab.metrics import wilson
from dinfer.structure import json_schema, regex

SCHEMA = {
    "type": "object",
    "properties": {
        "steps": {"type": "array", "items": {"type": "string"}, "maxItems": 8},
        "answer": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
    },
    "required": ["steps", "answer"],
}
LINES = r"([^\n]+\n)+Answer: [a-z0-9]+"
VARIANTS = ("greedy", "posterior")
IN_PROMPT = ' Answer as JSON: {"steps": [...], "answer": N}'
Form = tuple[dict[str, Any], str, Callable[[Problem, str], bool]]  # constraint, what the prompt says, the judge


def as_json(problem: Problem, text: str) -> bool:
    """Exact match, as of free text."""
    return is_correct(problem, f"Answer: {json.loads(text)['answer']}")


FORMS: dict[str, Form] = {
    "free text": ({}, "", is_correct),
    "own lines": ({"constraint": regex(LINES)}, "", is_correct),
    "JSON": ({"constraint": json_schema(SCHEMA)}, "", as_json),
    "JSON, no spaces": ({"constraint": json_schema(SCHEMA, whitespace="compact")}, "", as_json),
    "JSON, schema in the prompt": ({"constraint": json_schema(SCHEMA)}, IN_PROMPT, as_json),
}


def measured(pipe: Pipeline, form: Form, problems: list[Problem], tokens: int, posterior: bool) -> dict[str, Any]:
    """One form on one model."""
    held, said, judge = form
    held = {name: replace(constraint, posterior=posterior) for name, constraint in held.items()}
    pipe.generate("2 and 2?", max_new_tokens=tokens, **held)  # compiles
    began = time.perf_counter()
    results = pipe.generate([problem.question + said for problem in problems], max_new_tokens=tokens, **held)
    seconds, count = time.perf_counter() - began, len(problems)
    right = sum(judge(problem, result.text) for problem, result in zip(problems, results, strict=True))

    def mean(values: Iterator[int]) -> float:
        return round(sum(values) / count, 2)

    forwards, length = mean(r.counts.forwards for r in results), mean(r.counts.tokens for r in results)
    low, high = wilson(right, count)
    return {
        "accuracy": round(100 * right / count, 1), "low": round(low, 1), "high": round(high, 1),
        "forwards": forwards, "tokens": length, "tokens_per_forward": round(length / forwards, 2),
        "forced": mean(sum(told.tokens for told in r.counts.told) for r in results), "seconds": round(seconds, 1),
    }  # fmt: skip


def main() -> None:
    parser = command_line(__doc__, device="cpu")
    parser.add_argument("--model", default="tiny", help="a preset")
    parser.add_argument("--adapter", type=Path, help="a folder of tools.json_tiny")
    parser.add_argument("--forms", nargs="+", default=[*FORMS], choices=FORMS)
    parser.add_argument("--variants", nargs="+", default=[*VARIANTS], choices=VARIANTS)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rows", type=int, default=32, help="answers at a time")
    given = parser.parse_args()
    problems, rows = generate("heldout", given.count, 0), list[dict[str, Any]]()
    report = begun(given, torch.device(given.device)) | {"schema": SCHEMA, "rows": rows}
    runtime, pace = dinfer.Runtime(rows=given.rows, graphs=given.device != "cpu"), None
    for variant in given.variants:
        for form in given.forms:
            held = bool(FORMS[form][0])
            if not held and pace is not None:
                continue  # free text is the same with every variant
            changed = {"adapter": str(given.adapter)} if held and given.adapter else {}
            pipe = dinfer.load(
                preset=given.model, model=dinfer.presets()[given.model].model | changed, device=given.device,
                dtype="float32", runtime=runtime,
            )  # fmt: skip
            row = {"variant": variant, "form": form}
            row |= measured(pipe, FORMS[form], problems, given.tokens, posterior=variant == "posterior")
            pace = pace or (None if held else row["tokens_per_forward"])
            rows.append(row if pace is None else row | {"free_text_forwards": round(row["tokens"] / pace, 2)})
            print(rows[-1], flush=True)
            save(report, given.out)


if __name__ == "__main__":
    main()
