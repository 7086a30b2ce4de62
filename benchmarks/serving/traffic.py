"""The times and lengths of requests: Poisson, a trace from a file, or a closed loop."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import cycle
from math import isfinite
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MOONCAKE = ("timestamp", "input_length", "output_length")


class Asked(NamedTuple):
    """A request: its time in seconds, and its tokens."""

    at: float
    prompt: int
    new: int


def poisson(rate: float, lengths: Sequence[tuple[int, int]], seconds: float, draw: Random) -> Iterator[Asked]:
    """Requests that are independent of each other, `rate` a second on average. `lengths`: of prompt and answer."""
    if rate <= 0:
        raise ValueError(f"--rate {rate} must be above 0 requests a second")
    at, each = draw.expovariate(rate), cycle(lengths)
    while at < seconds:
        yield Asked(at, *next(each))
        at += draw.expovariate(rate)


def trace(path: Path, speed: float = 1.0) -> list[Asked]:
    """A trace, from its first request on: Azure's (CSV) or Mooncake's (JSON lines, milliseconds).

    `speed`: by how much faster it is played. Raises ValueError that names the line that is wrong.
    """
    if speed <= 0:
        raise ValueError(f"--speed {speed} must be above 0")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--trace {path}: {error}") from error
    lines = text.splitlines()
    read = _mooncake if lines and lines[0].lstrip().startswith("{") else _azure
    found = sorted(read(path, lines))
    if not found:
        raise ValueError(f"--trace {path} has no requests")
    return [Asked((one.at - found[0].at) / speed, one.prompt, one.new) for one in found]


def longer(requests: list[Asked], longest: int) -> int:
    """The number of requests with canvases of more than `longest` positions."""
    return sum(one.prompt + one.new > longest for one in requests)


def _azure(path: Path, lines: list[str]) -> Iterator[Asked]:
    reader = csv.DictReader(lines)
    if missing := [name for name in AZURE if name not in (reader.fieldnames or ())]:
        raise ValueError(
            f"--trace {path} has no column {missing[0]}: give a CSV with {', '.join(AZURE)}, or lines of JSON with "
            f"{', '.join(MOONCAKE)}"
        )
    for row in reader:
        at, prompt, new = (row[name] for name in AZURE)
        yield _asked(path, reader.line_num, lambda at=at: _seconds(at), prompt, new)


def _mooncake(path: Path, lines: list[str]) -> Iterator[Asked]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            at, prompt, new = (row[name] for name in MOONCAKE)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"--trace {path}, line {number}: {type(error).__name__}: {error}") from error
        yield _asked(path, number, lambda at=at: float(at) / 1e3, prompt, new)


def _seconds(text: str) -> float:
    """The seconds of a number or of a date, which is in UTC unless it says otherwise."""
    try:
        return float(text)
    except ValueError:
        found = datetime.fromisoformat(text)
        return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def _whole(value: Any) -> int:
    if int(value) != float(value):
        raise ValueError(f"{value!r} tokens must be a whole number")
    return int(value)


def _asked(path: Path, line: int, at: Callable[[], float], prompt: Any, new: Any) -> Asked:
    try:
        one = Asked(at(), _whole(prompt), _whole(new))
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"--trace {path}, line {line}: {error}") from error
    if not isfinite(one.at):
        raise ValueError(f"--trace {path}, line {line}: the time {one.at} must be a finite number")
    if one.prompt < 1 or one.new < 1:
        raise ValueError(f"--trace {path}, line {line}: {one.prompt} and {one.new} tokens: both must be at least 1")
    return one
