"""Constraints compiled: how many schemas are taken, whether what is accepted is valid, states and seconds.

    python -m benchmarks.structure suite DIR --out results.json   # of json-schema-org/JSON-Schema-Test-Suite
    python -m benchmarks.structure bench DIR --tokens qwen.tiktoken --sample 2000 --out results.json

`bench` takes the folder maskbench/data of guidance-ai/jsonschemabench. Its schemas have keywords and formats of their
own, so it compiles with `lenient`. Only figures are kept. Its seconds are of the processor, and so is the limit of 5 s.
`--tokens`: a tokenizer.json, or a file of base64 lines.
"""

from __future__ import annotations

import argparse
import base64
import json
import random
import time
from collections import Counter
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks.provenance import begun, command_line, save
from dinfer.structure import ConstraintError, Limits, Vocabulary, json_schema, vocabulary_of
from dinfer.structure.compiler import compile_automaton
from dinfer.structure.language import language
from dinfer.structure.limits import Budget

FILES = (
    "type", "enum", "const", "properties", "required", "additionalProperties", "items", "prefixItems", "minItems",
    "maxItems", "minLength", "maxLength", "pattern", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
    "multipleOf", "anyOf", "oneOf", "allOf", "ref", "defs",
)  # fmt: skip


def vocabulary(path: Path) -> Vocabulary:
    """The tokens of a file, with one more that ends answers."""
    if path.suffix == ".json":
        from transformers import PreTrainedTokenizerFast

        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path))
        return vocabulary_of(tokenizer, len(tokenizer) + 1, [len(tokenizer)])
    texts = [base64.b64decode(line.split()[0]) for line in path.read_text().splitlines() if line]
    return Vocabulary([*texts, None], frozenset({len(texts)}), frozenset({len(texts)}))


def suite(given: argparse.Namespace) -> dict[str, Any]:
    """What comes of each test. Unsound is an invalid instance that is accepted."""
    counts: Counter[str] = Counter()
    found: dict[str, list[str]] = {"unsound": [], "valid but not accepted": [], "refused": []}
    for name in FILES:
        for group in json.loads((given.folder / f"{name}.json").read_text()):
            where = f"{name}: {group['description']}"
            try:
                automaton = compile_automaton(json_schema(group["schema"]))[0]
            except ConstraintError as error:
                found["refused"].append(f"{where} ({error})")
                counts["refused"] += len(group["tests"])
                continue
            for test in group["tests"]:
                accepted = automaton.accepts(json.dumps(test["data"], ensure_ascii=False).encode())
                kind = "right" if accepted == test["valid"] else "unsound" if accepted else "valid but not accepted"
                counts[kind] += 1
                if kind != "right":
                    found[kind].append(f"{where}: {test['description']}")
    return {"tests": sum(counts.values()), "counts": dict(counts), "exceptions": found}


def one(path: Path, tokens: Vocabulary | None) -> dict[str, Any]:
    """One schema of the bench with its instances."""
    doc = json.loads(path.read_text())
    began, budget = time.process_time(), Budget(Limits(seconds=60))
    try:
        automaton, exact, _ = compile_automaton(json_schema(doc["schema"], lenient=True), budget)
        made = time.process_time()
        if tokens is not None:
            language(automaton, tokens, budget)
        if (ended := time.process_time()) - began > Limits().seconds:
            raise ConstraintError("takes longer")
    except ConstraintError as error:
        reason = error.path.rpartition(".")[2] if error.path else " ".join(error.message.split()[:2])
        return {"refused": reason, "seconds": time.process_time() - began}
    result = {"states": automaton.states, "exact": exact, "automaton_s": made - began, "seconds": ended - began}
    tests = [test for test in doc.get("tests", ()) if "data" in test]
    texts = [json.dumps(test["data"], ensure_ascii=False).encode("utf-8", "surrogatepass") for test in tests]
    accepted = [automaton.accepts(text) for text in texts]
    return result | {
        "valid": sum(test["valid"] for test in tests), "invalid": sum(not test["valid"] for test in tests),
        "unsound": [path.stem for test, a in zip(tests, accepted, strict=True) if a and not test["valid"]],
        "incomplete": sum(test["valid"] and not a for test, a in zip(tests, accepted, strict=True)),
    }  # fmt: skip


def spread(values: list[float]) -> dict[str, float]:
    """Quantiles."""
    ordered = sorted(values)
    return {f"{q}%": round(ordered[int((len(ordered) - 1) * q / 100)], 4) for q in (50, 90, 95, 99, 100)}


def bench(given: argparse.Namespace) -> dict[str, Any]:
    paths = sorted(given.folder.glob("*.json"))
    random.Random(0).shuffle(paths)
    tokens = vocabulary(given.tokens) if given.tokens else None
    if tokens is not None:
        _ = tokens.levels  # made once for each tokenizer
    with get_context("fork").Pool(given.processes) as pool:
        rows = pool.map(partial(one, tokens=tokens), paths[: given.sample], chunksize=8)
    taken = [row for row in rows if "states" in row]
    return {
        "schemas": len(rows), "of": len(paths), "compiled": len(taken),
        "compiled_share": round(len(taken) / len(rows), 4),
        "refused": dict(Counter(row["refused"] for row in rows if "refused" in row).most_common(20)),
        "unsound": [name for row in taken for name in row["unsound"]],
        "instances": {key: sum(row[key] for row in taken) for key in ("valid", "invalid", "incomplete")},
        "inexact": sum(not row["exact"] for row in taken),
        "states": spread([row["states"] for row in taken]),
        "automaton_s": spread([row["automaton_s"] for row in taken]),
        "seconds": spread([row["seconds"] for row in taken]),
        "seconds_of_refused": spread([row["seconds"] for row in rows if "refused" in row]),
    }  # fmt: skip


COMMANDS = {"suite": suite, "bench": bench}

if __name__ == "__main__":
    parser = command_line(__doc__)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=Path)
    parser.add_argument("--sample", type=int)
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args()
    report = begun(given, torch.device("cpu")) | COMMANDS[given.command](given)
    print(json.dumps({key: value for key, value in report.items() if key != "exceptions"}, indent=1, default=str))
    save(report, given.out)
