"""Finds the cases in a folder, runs those asked for, and tells what came of each."""

import difflib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, Literal

import torch
from safetensors import SafetensorError

from tests.parity import kinds
from tests.parity.compare import Mismatch
from tests.parity.golden import CPU, Case, Fields, Golden, GoldenError, Skip, read_json

# What malformed goldens and faulty components may raise: the case fails, and the others still run.
CASE_ERRORS = (ValueError, TypeError, LookupError, ArithmeticError, RuntimeError, OSError, SafetensorError)


class UsageError(ValueError):
    """There is nothing to check: the folder or the patterns are wrong."""


@dataclass(frozen=True, slots=True)
class Result:
    """What came of one case. `remark`: the first difference, the reason of a skip, or what was measured."""

    id: str
    outcome: Literal["passed", "failed", "skipped"]
    remark: str


@dataclass(frozen=True, slots=True)
class Report:
    """All results, in the order of the cases."""

    results: list[Result] = field(default_factory=list)

    def count(self, outcome: str) -> int:
        return sum(result.outcome == outcome for result in self.results)

    def skips(self) -> list[tuple[str, int]]:
        """How many cases were skipped for each reason, most frequent first."""
        return Counter(r.remark for r in self.results if r.outcome == "skipped").most_common()

    @property
    def summary(self) -> str:
        return ", ".join(f"{self.count(outcome)} {outcome}" for outcome in ("passed", "failed", "skipped"))


def check(
    root: Path, only: Sequence[str] = (), tell: Callable[[Result], None] | None = None, device: torch.device = CPU
) -> Report:
    """Checks every case below `root`, or those that the glob patterns `only` select; `tell` hears of each at once.

    Raises UsageError if there is nothing to check.
    """
    report = Report()
    for case in select(find(root, device), only, root):
        result = run(case)
        report.results.append(result)
        if tell is not None:
            tell(result)
    return report


def find(root: Path, device: torch.device = CPU) -> list[Case]:
    """Every case in the folder."""
    if not root.is_dir():
        raise UsageError(f"{root} is not a folder")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"--device {device}: torch finds no CUDA device")
    golden = Golden(root, device)
    known = [import_module(f"{kinds.__name__}.{module.name}") for module in iter_modules(kinds.__path__)]
    patterns = dict.fromkeys(kind.FILES for kind in known)
    cases = [
        case
        for pattern in patterns
        for path in sorted(root.glob(pattern))
        for case in read(golden, path, [kind for kind in known if pattern == kind.FILES])
    ]
    if not cases:
        folders, here = {pattern.partition("/")[0] for pattern in patterns}, root.resolve()
        above = next((folder.parent for folder in (here, *here.parents) if folder.name in folders), None)
        hint = f"; did you mean {above} --only {here.relative_to(above)}?" if above is not None else ""
        raise UsageError(f"{root} holds no cases: it has none of {', '.join(sorted(patterns))}{hint}")
    return cases


def read(golden: Golden, path: Path, known: list[Any]) -> Iterator[Case]:
    """The cases of a file, by the kind that takes it. A file that cannot be read is a case that fails."""
    name = golden.name(path)
    try:
        doc = Fields(f"{name}.json", read_json(path))
        kind = next((kind for kind in known if kind.takes(doc)), None)
        yield from kind.cases(golden, path, doc) if kind is not None else [raising(name, Skip(f"no kind takes {name}"))]
    except GoldenError as error:
        yield raising(name, error)


def raising(case_id: str, error: Exception) -> Case:
    def run() -> str:
        raise error

    return Case(case_id, run)


def select(cases: list[Case], only: Sequence[str], root: Path) -> list[Case]:
    """The cases whose id, or a folder or file that the id begins with, matches one of the patterns."""
    chosen: set[str] = set()
    for pattern in only:
        matching = [case.id for case in cases if _matches(case.id, pattern)]
        if not matching:
            close = difflib.get_close_matches(pattern, _prefixes(cases), 1, cutoff=0.0)[0]
            raise UsageError(f"--only {pattern!r} matches none of the {len(cases)} cases in {root}; try {close!r}")
        chosen.update(matching)
    return [case for case in cases if not only or case.id in chosen]


def run(case: Case) -> Result:
    """Runs one case; whatever is wrong with it or with a component becomes its result."""
    try:
        with torch.inference_mode():
            return Result(case.id, "passed", case.run())
    except Skip as reason:
        return Result(case.id, "skipped", str(reason))
    except Mismatch as difference:
        return Result(case.id, "failed", str(difference))
    except CASE_ERRORS as error:
        return Result(case.id, "failed", f"{type(error).__name__}: {error}")


def _matches(case_id: str, pattern: str) -> bool:
    pattern = pattern.removesuffix("/").removesuffix(".json")
    parts = case_id.split("/")
    return any(fnmatchcase("/".join(parts[: n + 1]), pattern) for n in range(len(parts)))


def _prefixes(cases: list[Case]) -> list[str]:
    found = {"/".join(case.id.split("/")[: n + 1]) for case in cases for n in range(case.id.count("/") + 1)}
    return sorted(found)
