"""What tests may not do."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
OURS = ("dinfer", "evaluations", "benchmarks", "tools", "hydra_plugins")
PRIVATE = re.compile(r"_(?!_)\w+")
# Not ours, for all that their names say: of named tuples, of torch, of transformers.
OTHERS = {
    "_replace",
    "_asdict",
    "_fields",
    "_make",
    "_dynamo",
    "_schema",
    "_attn_implementation",
    "_experts_implementation",
}


def private(source: str) -> Iterator[str]:
    """Names with a leading underscore that a test reads of an object, imports, or replaces by their dotted name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and PRIVATE.fullmatch(node.attr) and node.attr not in OTHERS:
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                yield f"line {node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(OURS):
            yield from (f"line {node.lineno}: {a.name}" for a in node.names if PRIVATE.fullmatch(a.name))
        elif isinstance(node, ast.Call):  # monkeypatch.setattr("dinfer.x._y", ...), setattr(x, "_y", ...)
            texts = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            for text in (
                texts if ast.unparse(node.func).rpartition(".")[-1] in ("setattr", "delattr", "getattr") else ()
            ):
                if PRIVATE.fullmatch(text.rpartition(".")[-1]):
                    yield f"line {node.lineno}: {text!r}"


def test_no_test_reads_what_is_private() -> None:
    found = {str(path.relative_to(TESTS)): [*private(path.read_text())] for path in TESTS.rglob("*.py")}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "source",
    [
        "engine._pages.free", "from dinfer.cli.conf import _runtime", 'patch.setattr(engine, "_seen", 1)',
        'patch.setattr("dinfer.core.engine.reader._event", 1)', 'getattr(pool, "_owners")',
    ],
)  # fmt: skip
def test_the_rule_notices(source: str) -> None:
    assert len([*private(source)]) == 1


def test_the_rule_lets_pass_what_is_the_tests_own() -> None:
    source = "self._seen = 1\nrow._replace(a=1)\n__file__\nx.__class__\nfrom os import _exit\nprint('_x')"
    assert [*private(source)] == []
