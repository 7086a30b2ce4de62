"""Runs generated code in a process with limits of time, memory and files.

If the system allows, it has no network, and of the file system it can write its own temporary folder alone.

It guards against accidents, not against attackers: if code may be hostile, run the whole evaluation in a container. A
program passes if it runs to its end. If it exits early, it fails, whatever its exit status.

lm-eval's code tasks (humaneval, mbpp and their variants) load the metric `code_eval` from the hub, which has no useful
limit on memory. `in_sandbox` replaces that metric."""

import logging
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
from functools import cache
from pathlib import Path
from typing import Any

import evaluate

from evaluations.settings import Limits

WAYS = ("landlock", "namespaces")  # to a file system that can be read only, the first that the kernel has
# Runs in the child. stdin holds a word, then the program. The child writes the word when the program has ended.
_GUARD = """
import ctypes, io, os, resource, struct, sys
seconds, megabytes, end, ways = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
source = sys.stdin.read()
word, source = source.split("\\n", 1)
libc, folder = ctypes.CDLL(None), os.getcwd().encode()
apart = not libc.unshare(0x10000000 | 0x40000000 | 0x20000)  # namespaces for users, the network (empty) and mounts
if "landlock" in ways and libc.syscall(444, None, 0, 1) >= 3:  # from version 3 on it knows all ways to write a file
    write, rights = 1 << 1 | 1 << 14, sum(1 << bit for bit in (1, *range(4, 15)))
    rules = libc.syscall(444, struct.pack("Q", rights), 8, 0)
    for path, allowed in ((folder, rights), (os.devnull, write)):
        libc.syscall(445, rules, 1, struct.pack("=Qi", allowed, os.open(path, os.O_PATH)), 0)
    libc.prctl(38, 1, 0, 0, 0)  # no new privileges, without which there are no rules
    libc.syscall(446, rules, 0)
elif "namespaces" in ways and apart:
    libc.mount(folder, folder, None, 0x1000, None)  # a mount of its own, which stays as it is
    libc.syscall(442, -100, b"/", 0x8000, struct.pack("4Q", 1, 0, 0, 0), 32)  # all mounts are read-only
    libc.syscall(442, -100, folder, 0, struct.pack("4Q", 0, 1, 0, 0), 32)
    os.chdir(folder)
for kind, limit in (
    (resource.RLIMIT_AS, megabytes << 20), (resource.RLIMIT_CPU, seconds + 1), (resource.RLIMIT_FSIZE, 16 << 20),
    (resource.RLIMIT_NOFILE, 64), (resource.RLIMIT_CORE, 0),
):
    resource.setrlimit(kind, (limit, limit))
sys.stdin = io.StringIO()
exec(compile(source, "program", "exec"), {"__name__": "__main__"})
os.write(end, word.encode())
"""
# Programs that pass where the sandbox guards against nothing.
_PROBES = {
    "write any file that you can": "import os\npath = os.getcwd() + '.probe'\nopen(path, 'w')\nos.remove(path)",
    "use the network": "import socket\nsocket.socket(type=socket.SOCK_DGRAM).connect(('127.0.0.1', 9))",
}
LOG = logging.getLogger("dinfer.evaluations")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a program."""

    passed: bool
    remark: str  # empty, or the last line of its error, or "timed out"


def run(program: str, limits: Limits | None = None, *, ways: Sequence[str] = WAYS) -> Outcome:
    """Runs one program, its tests included. `ways`: to a read-only file system, to be tried. Raises OSError."""
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
                [sys.executable, "-I", "-c", _GUARD, str(limits.seconds), str(limits.megabytes), str(writer), *ways],
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=errors, pass_fds=(writer,), cwd=folder,
                env={"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )  # fmt: skip
            try:
                child.communicate(f"{word}\n{program}".encode(), timeout=limits.seconds)
            except subprocess.TimeoutExpired:
                return Outcome(False, "timed out")
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)  # and the processes that it started
                child.wait()
            errors.seek(0)
            lines = errors.read().decode(errors="replace").strip().splitlines()
        os.set_blocking(reader, False)
        passed = False
        with suppress(BlockingIOError):  # the program did not end
            passed = os.read(reader, 64) == word.encode()
    finally:
        os.close(reader)
        os.close(writer)
    return Outcome(passed, "" if passed else lines[-1] if lines else f"ended early, status {child.returncode}")


@cache
def warn_of_gaps(ways: Sequence[str] = WAYS) -> None:
    """Says once what this system does not keep programs from."""
    if open_to := [what for what, probe in _PROBES.items() if run(probe, ways=ways).passed]:
        LOG.warning(
            "allow_code=true: this kernel offers no Landlock and no user namespaces, so generated code can %s. Run the "
            "evaluation in a container", " and ".join(open_to),
        )  # fmt: skip


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
