"""A figure can be made again: its file names the command, and a commit that exists."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(ROOT.glob("benchmarks/results/**/*.json"))
OURS = re.compile(r"[0-9a-f]{7,40}")


def commits(found: Any) -> Iterator[str]:
    """What a report says of the commits of dinfer that it was made at; those of peers stand under other names."""
    if isinstance(found, list):
        found = dict(enumerate(found))
    for key, value in found.items() if isinstance(found, dict) else ():
        if key in ("commit", "added_at_commit") and isinstance(value, str):
            yield value
        elif key != "peer":
            yield from commits(value)


def written(text: str) -> Iterator[str]:
    """The names in a text, with each of `{a,b}`."""
    for word in re.findall(r"[\w{},*.-]+", text):
        parts = [part[1:-1].split(",") if part.startswith("{") else [part] for part in re.split(r"(\{[^{}]*\})", word)]
        yield from map("".join, itertools.product(*parts))


NAMED = {path.name: {*commits(json.loads(path.read_text()))} for path in FILES}


def test_every_file_names_a_clean_commit() -> None:
    wrong = {name: some for name, some in NAMED.items() if not some or not all(map(OURS.fullmatch, some))}
    assert wrong == {}


def test_every_file_is_named_by_a_page_and_says_how_it_was_made() -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("benchmarks/**/*.md"), *ROOT.glob("docs/**/*.md")]
    names = {name.removesuffix(".json") for page in pages for name in written(page.read_text())}
    globs = [name for name in names if "*" in name and len(name) > 6]
    assert [
        path.name for path in FILES if path.stem not in names and not any(fnmatch(path.stem, some) for some in globs)
    ] == []
    ways = {"command", "commands", "note", "what"}, {"hardware", "cpu", "machine"}
    reports = {path.name: path.read_text() for path in FILES if path.name != "tiny-token-counts.json"}
    assert [
        name for name, text in reports.items() if not all(any(f'"{key}":' in text for key in keys) for keys in ways)
    ] == []


def test_the_commits_exist() -> None:
    git = ["git", "-C", str(ROOT)]
    asked = subprocess.run([*git, "rev-parse", "--is-shallow-repository"], capture_output=True, text=True)
    if asked.returncode or asked.stdout.strip() != "false":
        pytest.skip("no git here, or not all of its history")
    every = sorted(set().union(*NAMED.values()))
    lines = "".join(f"{one}^{{commit}}\n" for one in every)
    said = subprocess.run([*git, "cat-file", "--batch-check"], input=lines, capture_output=True, text=True, check=True)
    assert [line for line in said.stdout.splitlines() if line.endswith("missing")] == []
