"""JSON Schemas with documents: valid ones are accepted as json.dumps writes them, invalid ones are not."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from dinfer.structure import json_schema
from dinfer.structure.compiler import compile_automaton
from tests.parity.compare import same
from tests.parity.golden import Case, Fields, Golden

FILES = "schemas/*.json"


def takes(doc: Fields) -> bool:
    return "schema" in doc


def cases(golden: Golden, path: Path, doc: Fields) -> Iterator[Case]:
    yield Case(golden.name(path), partial(run, doc))


def run(doc: Fields) -> str:
    automaton, exact, depth = compile_automaton(json_schema(doc.take("schema")))
    for name, accepted in (("valid", True), ("invalid", False)):
        for value in doc.take(name):
            text = json.dumps(value, ensure_ascii=False)
            same(f"whether {text} is accepted", accepted, automaton.accepts(text.encode()))
    for name in ("name", "feature"):
        doc.take(name)
    doc.finish()
    return f"{automaton.states} states, " + ("exact" if exact else f"recursion to depth {depth}")
