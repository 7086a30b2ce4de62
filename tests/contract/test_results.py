"""A figure can be made again: its file names the command, and a commit that exists."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
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


NAMED = {path.name: {*commits(json.loads(path.read_text()))} for path in FILES}


def test_every_file_names_a_clean_commit() -> None:
    wrong = {name: some for name, some in NAMED.items() if not some or not all(map(OURS.fullmatch, some))}
    assert wrong == {}


def test_the_commits_exist() -> None:
    git = ["git", "-C", str(ROOT)]
    asked = subprocess.run([*git, "rev-parse", "--is-shallow-repository"], capture_output=True, text=True)
    if asked.returncode or asked.stdout.strip() != "false":
        pytest.skip("no git here, or not all of its history")
    every = sorted(set().union(*NAMED.values()))
    lines = "".join(f"{one}^{{commit}}\n" for one in every)
    said = subprocess.run([*git, "cat-file", "--batch-check"], input=lines, capture_output=True, text=True, check=True)
    assert [line for line in said.stdout.splitlines() if line.endswith("missing")] == []
