"""Where the time of a denoise step goes, by kernel and by part, from torch's profiler.

A kernel that is launched early begins while the one before still runs, and waits for it. So `us`, from beginning to
end, counts some time twice and may sum to more than the step; `own_us` begins where the kernels before have ended, and
sums to no more than the step.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

import dinfer.kernels
from dinfer.core.engine.engine import Engine
from dinfer.core.step.cursors import Phase
from dinfer.core.step.shape import StepShape

PARTS = ("linear", "experts", "attention", "rotary, keys", "norms", "gate", "statistics", "collectives", "rest")
REST = PARTS[-1]  # window, embedding, commits, cursors
FILES = {  # the part of the Triton kernels in each file of dinfer/kernels/triton; others: REST
    "linear": "linear", "packed": "linear", "moe": "experts",
    "attention": "attention", "hopper_attention": "attention", "rotary": "rotary, keys",
    "norm": "norms", "token_stats": "statistics",
}  # fmt: skip
GATE = "glu"  # in the names of our kernels of the gate
COLLECTIVES = ("all_reduce", "nccl")  # in the names of torch's kernels: sums and gathers over cards
LIBRARY = ("nvjet", "cutlass", "cublas", "gemm", "gemv", "splitk")  # in other kernels' names: matrix products
LONGEST = 24  # the most steps to profile


class Span(NamedTuple):
    """One run of a kernel, in microseconds."""

    kernel: str
    start: float
    end: float


@cache
def our_kernels() -> dict[str, str]:
    """The part of each Triton kernel of the package, by name."""
    found = {}
    for path in (Path(dinfer.kernels.__file__).parent / "triton").glob("*.py"):
        for name in re.findall(r"^@(?:triton|gluon)\.jit[^\n]*\s+def (\w+)", path.read_text(), re.MULTILINE):
            found[name] = FILES.get(path.stem, REST)
    return found


def part_of(kernel: str) -> str:
    """The part of a step that a kernel belongs to."""
    if kernel in our_kernels():
        return "gate" if GATE in kernel else our_kernels()[kernel]
    if any(piece in kernel.lower() for piece in COLLECTIVES):
        return "collectives"
    return "linear" if any(piece in kernel.lower() for piece in LIBRARY) else REST


def by_kernel(spans: Iterable[Span], steps: int) -> list[dict[str, Any]]:
    """Calls and microseconds per step of every kernel, sorted by time."""
    found: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    busy = float("-inf")
    for kernel, start, end in sorted(spans, key=lambda span: span.start):
        own = max(end - max(start, busy), 0.0)
        busy = max(busy, end)
        found[kernel] = [a + b for a, b in zip(found[kernel], (1, end - start, own), strict=True)]
    rows = []
    for kernel, (calls, us, own) in found.items():
        each = {"calls": round(calls / steps, 2), "us": round(us / steps, 2), "own_us": round(own / steps, 2)}
        rows.append({"kernel": _short(kernel), "part": part_of(kernel), **each})
    return sorted(rows, key=lambda row: -row["own_us"])


def by_part(rows: Sequence[dict[str, Any]], step_ms: float) -> dict[str, dict[str, float]]:
    """The same by part, and the rest of a step of `step_ms`, in which no kernel ran."""
    parts = {}
    for part in PARTS:
        mine = [row for row in rows if row["part"] == part]
        parts[part] = {key: round(sum(row[key] for row in mine), 2) for key in ("calls", "us", "own_us")}
    left = round(1e3 * step_ms - sum(row["own_us"] for row in parts.values()), 2)
    return parts | {"between kernels": {"calls": 0, "us": left, "own_us": left}}


def _short(kernel: str) -> str:
    for noise in ("void ", "at::native::", "(anonymous namespace)::", "std::"):
        kernel = kernel.replace(noise, "")
    return kernel[:100]


def longest(shapes: Sequence[StepShape]) -> tuple[int, int]:
    """The longest run of launches `[first, end)` of the most frequent window step, cut to `LONGEST`.

    A recipe without a cache has no window steps, so it takes full passes.
    """
    decoding = [shape for shape in shapes if shape.phase == Phase.WINDOW] or [
        shape for shape in shapes if shape.phase == Phase.FULL
    ]
    common = max(set(decoding), key=decoding.count)
    first, runs = 0, []
    for shape, group in groupby(shapes):
        count = len(list(group))
        runs.append((count if shape == common else 0, first))
        first += count
    count, first = max(runs, key=lambda run: run[0])
    return first, first + min(count, LONGEST)


def profiled(engine: Engine, run: Callable[[], Any], shapes: Sequence[StepShape]) -> tuple[list[Span], int]:
    """The kernels of some window steps of a run with launches of `shapes`, and the number of these steps.

    On a CPU, for dry runs, it returns operators instead of kernels. Raises RuntimeError.
    """
    cuda, launches, (first, end) = engine.device.type == "cuda", 0, longest(shapes)
    profiler = torch.profiler.profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU])

    @contextmanager
    def watched(step_shape: StepShape, slots: Sequence[int]) -> Iterator[None]:
        nonlocal launches
        if launches == first:
            wait()
            profiler.start()
        yield
        launches += 1
        if launches == end:
            wait()
            profiler.stop()

    def wait() -> None:
        if cuda:
            torch.cuda.synchronize()

    engine.runner.observer = watched
    try:
        run()
    finally:
        engine.runner.observer = None
    if launches < end:
        raise RuntimeError(f"the run made {launches} launches, and {first} to {end} were to be profiled")
    device = DeviceType.CUDA if cuda else DeviceType.CPU
    events = [event for event in profiler.events() if event.device_type == device]
    return [Span(event.name, event.time_range.start, event.time_range.end) for event in events], end - first


def told(parts: dict[str, dict[str, float]]) -> str:
    """The parts as a table."""
    lines = [
        f"{part:16} {row['calls']:7.1f} x {row['us']:9.1f} us {row['own_us']:9.1f} own" for part, row in parts.items()
    ]
    return "\n".join(["per step:", *lines, __doc__.split("\n\n")[1].replace("\n", " ").strip()])
