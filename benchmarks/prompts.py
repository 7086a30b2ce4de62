"""Reads a data set of prompts from JSON or JSONL."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROMPT_FIELDS = ("prompt", "question")
LIST_FIELDS = ("details", "judge_details", "data")  # the first two are those of dInfer's data sets


@dataclass(frozen=True, slots=True)
class Prompt:
    """One entry: a text, or a conversation of {"role", "content"} messages."""

    id: str
    prompt: Any
    answer: Any = None  # the data set's, which is copied and not judged


def read_prompts(path: Path, limit: int | None = None) -> list[Prompt]:
    """The entries of a file, the first `limit` of them.

    A `.jsonl` file has an entry a line. A `.json` file has a list of entries, or an object with a list as `details`,
    `judge_details` or `data`. An entry is a text, or an object with `prompt` or `question`, and optionally `id` and
    `answer`. Raises a ValueError that names the file and the entry, and OSError.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit={limit} must be at least 1")
    if path.suffix not in (".json", ".jsonl"):
        raise ValueError(f"{path} must end in .json or .jsonl")
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".jsonl":
        lines = [(f"{path}:{number}", line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
        entries = [(where, _parsed(where, line)) for where, line in lines]
    else:
        entries = [(f"{path}: entry {index}", entry) for index, entry in enumerate(_listed(path, text))]
    found = [_prompt(where, entry, index) for index, (where, entry) in enumerate(entries)]
    if not found:
        raise ValueError(f"{path} has no prompts")
    ids = [prompt.id for prompt in found]
    twice = next((name for name in ids if ids.count(name) > 1), None) if len(set(ids)) < len(ids) else None
    if twice is not None:
        raise ValueError(f"{path}: the id {twice!r} occurs twice, so its prediction could not be told from the other")
    return found[:limit]


def _parsed(where: str, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error}") from error


def _listed(path: Path, text: str) -> list[Any]:
    content = _parsed(str(path), text)
    if isinstance(content, dict):
        content = next((content[name] for name in LIST_FIELDS if name in content), content)
    if not isinstance(content, list):
        raise ValueError(f"{path} must be a list of entries, or have one as {', '.join(LIST_FIELDS)}")
    return content


def _prompt(where: str, entry: Any, index: int) -> Prompt:
    if isinstance(entry, str):
        return Prompt(str(index), entry)
    if not isinstance(entry, dict):
        raise ValueError(f"{where} must be a text or an object, not {entry!r:.60}")
    prompt = next((entry[name] for name in PROMPT_FIELDS if name in entry), None)
    if not prompt or not isinstance(prompt, (str, list)):
        raise ValueError(f"{where} needs a `prompt`: a text or a list of messages, not {prompt!r:.60}")
    return Prompt(str(entry.get("id", index)), prompt, entry.get("answer"))
