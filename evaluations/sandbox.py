"""Runs generated code in a process with limits of time, memory and files, and without a network if the system allows.

It guards against accidents, not against attackers: if code may be hostile, run the whole evaluation in a container. A
program passes if it runs to its end. If it exits early, it fails, whatever its exit status.

lm-eval's code tasks (humaneval, mbpp and their variants) load the metric `code_eval` from the hub, which has no useful
limit on memory. `in_sandbox` replaces that metric."""

import math
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import evaluate

from dinfer.recipe.registry import check_range

# Runs in the child. stdin holds a word, then the program. The child writes the word when the program has ended.
_GUARD = """
import ctypes, io, os, resource, sys
seconds, megabytes, end = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
source = sys.stdin.read()
word, source = source.split("\\n", 1)
ctypes.CDLL(None).unshare(0x10000000 | 0x40000000)  # a user namespace, and in it an empty network namespace
for kind, limit in (
    (resource.RLIMIT_AS, megabytes << 20), (resource.RLIMIT_CPU, seconds + 1), (resource.RLIMIT_FSIZE, 16 << 20),
    (resource.RLIMIT_NOFILE, 64), (resource.RLIMIT_CORE, 0),
):
    resource.setrlimit(kind, (limit, limit))
sys.stdin = io.StringIO()
exec(compile(source, "program", "exec"), {"__name__": "__main__"})
os.write(end, word.encode())
"""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a program."""

    seconds: int = 5
    megabytes: int = 1024

    def __post_init__(self) -> None:
        check_range("code", self, "seconds", "megabytes", least=1)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a program."""

    passed: bool
    remark: str  # empty, or the last line of its error, or "timed out"


def run(program: str, limits: Limits | None = None) -> Outcome:
    """Runs one program, its tests included."""
    if os.name != "posix":
        raise OSError("the sandbox for generated code needs a POSIX system")
    limits, word = limits or Limits(), secrets.token_hex(16)
    reader, writer = os.pipe()
    try:
        with (
            tempfile.TemporaryDirectory(prefix="dinfer-code-") as folder,
            (Path(folder) / "errors").open("w+b") as errors,  # unlike a pipe's, a file's size has a limit
        ):
            child = subprocess.Popen(
                [sys.executable, "-I", "-c", _GUARD, str(limits.seconds), str(limits.megabytes), str(writer)],
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=errors, pass_fds=(writer,), cwd=folder,
                env={"PATH": os.defpath, "HOME": folder, "OMP_NUM_THREADS": "1"}, start_new_session=True,
            )  # fmt: skip
            try:
                child.communicate(f"{word}\n{program}".encode(), timeout=limits.seconds)
            except subprocess.TimeoutExpired:
                return Outcome(False, "timed out")
            finally:
                _end(child)
            errors.seek(0)
            lines = errors.read().decode(errors="replace").strip().splitlines()
        passed = _said(reader) == word
    finally:
        os.close(reader)
        os.close(writer)
    return Outcome(passed, "" if passed else lines[-1] if lines else f"ended early, status {child.returncode}")


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kills a program and the processes that it started."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _said(reader: int) -> str:
    """The word that the child wrote; empty if the program did not end."""
    os.set_blocking(reader, False)
    with suppress(BlockingIOError):
        return os.read(reader, 64).decode(errors="replace")
    return ""


class CodeEval:
    """Replaces the hub's metric `code_eval`: pass@k of programs with their tests (Codex, arXiv:2107.03374)."""

    limits = Limits()

    def compute(
        self, *, references: Sequence[str], predictions: Sequence[Sequence[str]], k: Sequence[int] = (1, 10, 100)
    ) -> tuple[dict[str, float], dict[int, list[tuple[int, dict[str, Any]]]]]:
        """Scores by name, and the outcomes of each problem's programs."""
        jobs = [(i, f"{p}\n{test}") for i, test in enumerate(references) for p in predictions[i]]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            outcomes = list(pool.map(lambda job: run(job[1], self.limits), jobs))
        found: dict[int, list[tuple[int, dict[str, Any]]]] = {i: [] for i in range(len(references))}
        for (i, _), outcome in zip(jobs, outcomes, strict=True):
            number = len(found[i])
            found[i].append((number, {"task_id": i, "completion_id": number} | asdict(outcome)))
        fewest = min(len(programs) for programs in predictions)
        totals = [(len(runs), sum(run["passed"] for _, run in runs)) for runs in found.values()]
        return {f"pass@{n}": sum(pass_at(n, *t) for t in totals) / len(totals) for n in k if n <= fewest}, found


def pass_at(k: int, programs: int, passed: int) -> float:
    """The chance that one of k programs passes, drawn from `programs` of which `passed` pass."""
    return 1.0 - math.comb(programs - passed, k) / math.comb(programs, k)


CODE_EVAL = CodeEval()  # one for the process, since lm-eval caches the metrics of its tasks


@contextmanager
def in_sandbox(limits: Limits) -> Iterator[None]:
    """Within, `evaluate.load("code_eval")` returns `CodeEval`. Tasks load their metrics when they are loaded."""
    usual, CODE_EVAL.limits = evaluate.load, limits

    def load(path: str, *args: Any, **kwargs: Any) -> Any:
        return CODE_EVAL if path == "code_eval" else usual(path, *args, **kwargs)

    evaluate.load = load
    try:
        yield
    finally:
        evaluate.load = usual


_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:\n```|\Z)", re.DOTALL)


def blocks(responses: list[list[str]], documents: Sequence[dict[str, Any]]) -> list[list[str]]:
    """The first fenced block of each answer, closed or not; without one, the whole answer."""
    return [[found[1] if (found := _BLOCK.search(text)) else text for text in texts] for texts in responses]


def filled(responses: list[list[str]], documents: Sequence[dict[str, Any]]) -> list[list[str]]:
    """The program with its gap filled."""
    pairs = zip(responses, documents, strict=True)
    return [[doc["prompt"] + text + doc["suffix"] for text in texts] for texts, doc in pairs]


def pass_at_1(references: list[str], predictions: list[list[str]], **_: Any) -> float:
    """The share of the programs that pass their tests."""
    scores, _runs = CODE_EVAL.compute(references=references, predictions=predictions, k=[1])
    return scores["pass@1"]
