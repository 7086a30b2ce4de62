"""Our languages beside llguidance's: texts drawn from ours, and the same with one slip, judged by both.

    python -m benchmarks.structure_peer ../shared/goldens-structured --texts 200 --out results.json

It takes the patterns of the cases and the schemas. Needs llguidance and jsonschema, which judges documents where both
differ. llguidance gets our white space: none, but an optional space after `,` and `:`.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.provenance import begun, command_line, save
from dinfer.structure import json_schema, regex
from dinfer.structure.automaton import Automaton
from dinfer.structure.compiler import compile_automaton

WHITESPACE = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
SLIPS = ' "\\/{}[],:0159eE.+-aAzé\n\x07'  # what a slip puts somewhere
LONGEST = 200  # bytes after which a text takes the shortest way to its end
SHOWN = 3  # examples of each kind


def distances(automaton: Automaton) -> list[int]:
    """The least number of bytes from each state to an accepting one."""
    found = [0 if final else 10**9 for final in automaton.final]
    changed = True
    while changed:
        changed = False
        for state, edges in enumerate(automaton.edges):
            nearest = min((found[to] + 1 for _, _, to in edges), default=10**9)
            changed |= nearest < found[state]
            found[state] = min(found[state], nearest)
    return found


def drawn(automaton: Automaton, far: list[int], rng: random.Random) -> str:
    """A text of the language."""
    state, text = 0, bytearray()
    while not (automaton.final[state] and (not automaton.edges[state] or rng.random() < 0.2 or len(text) > LONGEST)):
        edges = automaton.edges[state]
        if len(text) > LONGEST:
            edges = [edge for edge in edges if far[edge[2]] < far[state]]
        low, high, state = rng.choice(edges)
        text.append(rng.randint(low, high))
    return text.decode()


def slipped(text: str, rng: random.Random) -> str:
    """The text with one character more, less or another, or with two that have changed places."""
    at, sign = rng.randint(0, len(text)), rng.choice(SLIPS + text[:64])
    kept = rng.choice([text[at:], text[at + 1 :]])
    return text[:at] + (
        sign + kept if rng.random() < 0.7 else text[at + 1 : at + 2] + text[at : at + 1] + text[at + 2 :]
    )


def judge(grammar: str) -> Callable[[str], bool]:
    from llguidance import LLMatcher, LLTokenizer

    tokenizer = LLTokenizer("byte")
    first = LLMatcher(tokenizer, grammar)
    if first.is_error():
        raise ValueError(first.get_error())

    def accepts(text: str) -> bool:
        matcher, data = first.deep_copy(), list(text.encode())
        return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()

    return accepts


UNICODE = "\\w takes a letter that is not ASCII: here ASCII alone"  # of texts of patterns
REASONS = {  # of valid documents
    "U+007F stands in a string: llguidance wants it escaped": re.compile("\x7f"),
    "an exponent has three digits: here it has two at most": re.compile(r"[eE][+-]?\d{3}"),
    "an integer is -0: here it is 0": re.compile(r"-0(?![.\d])"),
    "an escape is not what json.dumps writes: here each string has one spelling": re.compile(r"\\u"),
}


def reason(text: str, valid: Callable[[Any], bool] | None) -> str:
    """Why one of the two may refuse it."""
    if valid is None:
        return "unknown" if text.isascii() else UNICODE
    try:
        value = json.loads(text)
    except ValueError:
        return "it is not JSON"
    if not valid(value):
        return "it is invalid"
    return next((why for why, found in REASONS.items() if found.search(text)), "unknown")


def compared(automaton: Automaton, accepts: Callable[[str], bool], texts: int, valid: Any) -> dict[str, Any]:
    rng, far = random.Random(0), distances(automaton)
    own = sorted({drawn(automaton, far, rng) for _ in range(texts)})
    counts, differences = Counter[str](), dict[str, Counter[str]]()
    examples = dict[str, list[str]]()
    slips = [slipped(slipped(text, rng) if rng.random() < 0.3 else text, rng) for text in own]
    for text in sorted({*own, *slips}):
        ours, theirs = automaton.accepts(text.encode()), accepts(text)
        counts["accepted by both" if ours and theirs else "refused by both" if ours == theirs else "different"] += 1
        if ours != theirs:
            side, why = "ours alone" if ours else "llguidance alone", reason(text, valid)
            differences.setdefault(side, Counter())[why] += 1
            shown = examples.setdefault(f"{side}, {why}", [])
            shown += [text] if len(shown) < SHOWN else []
    return {"counts": dict(counts), "differences": {k: dict(v) for k, v in differences.items()}, "examples": examples}


def languages(folder: Path) -> Iterator[tuple[str, Automaton, str, Any]]:
    """Of each pattern and schema: its name, our automaton, llguidance's grammar, and what judges documents."""
    from jsonschema import Draft202012Validator
    from llguidance import LLMatcher

    patterns = {json.loads(path.read_text())["pattern"] for path in (folder / "cases").glob("*.json")}
    for pattern in sorted(patterns):
        yield pattern, compile_automaton(regex(pattern))[0], LLMatcher.grammar_from_regex(pattern), None
    for path in sorted((folder / "schemas").glob("*.json")):
        schema = json.loads(path.read_text())["schema"]
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=WHITESPACE)
        valid = Draft202012Validator(schema).is_valid
        yield path.stem, compile_automaton(json_schema(schema))[0], grammar, valid


def run(given: argparse.Namespace) -> dict[str, Any]:
    from llguidance import __version__ as version

    total, rows, refused = Counter[str](), dict[str, Any](), dict[str, str]()
    for name, automaton, grammar, valid in languages(given.folder):
        try:
            found = compared(automaton, judge(grammar), given.texts, valid)
        except ValueError as error:
            refused[name] = str(error)
            continue
        total.update(found["counts"])
        if found["differences"]:
            rows[name] = found
    return {"llguidance": version, "texts": dict(total), "refused by llguidance": refused, "different": rows}


if __name__ == "__main__":
    parser = command_line(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--texts", type=int, default=200)
    given = parser.parse_args()
    report = begun(given, torch.device("cpu")) | run(given)
    print(json.dumps(report, indent=1, ensure_ascii=False, default=str))
    save(report, given.out)
