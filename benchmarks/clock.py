"""The one way of timing: a run of some work, a run after warm-up, and the steps of an engine, which nobody waits for.

Every figure says how many CUDA graphs were captured while it was timed, since a capture takes as long as many steps.
"""

from __future__ import annotations

import statistics
import sys
import time
from argparse import ArgumentParser
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:  # a peer of `benchmarks.peers` has a package of the same name
    from dinfer.core.engine.engine import Engine
    from dinfer.core.step.shape import StepShape

PASSES, MOST_S = 12, 300.0  # that some work comes at most: graphs of shapes that are rare come late


class Lap(NamedTuple):
    """A run of some work."""

    result: Any
    seconds: float
    captured: int  # CUDA graphs, meanwhile


def lap(work: Callable[[], Any], engine: Engine | None = None, *, cpu: bool = False) -> Lap:
    """Runs some work once, to the end of what it has started on a card.

    `engine`: whose graphs are counted. `cpu`: seconds of the process, which others on the machine do not lengthen.
    """
    clock = time.process_time if cpu else time.perf_counter
    _wait()
    before, began = engine.runner.captured if engine else 0, clock()
    result = work()
    _wait()
    return Lap(result, clock() - began, engine.runner.captured - before if engine else 0)


def settled(
    run: Callable[[], Lap], passes: int = PASSES, most_s: float = MOST_S, first: Callable[[], object] | None = None
) -> tuple[Lap, dict[str, Any]]:
    """Runs some work until a run captures no graph. That one counts; the first never does, since kernels are compiled.

    The last of so many `passes` counts as it is, and so does the first that ends after `most_s` seconds. `first`:
    takes the place of the first run. Returns the run that counts, and what a row says of it.
    """
    began = time.perf_counter()
    (first or run)()
    count = 1
    while True:
        warm = time.perf_counter() - began
        found = run()
        count += 1
        if count >= passes or not found.captured or time.perf_counter() - began > most_s:
            break
    if found.captured:
        print(f"no fair figure: {found.captured} graphs were captured while it was timed", file=sys.stderr, flush=True)
    return found, {"warm_up_s": warm, "warm_up_passes": count - 1, "captured_while_timed": found.captured}


def bounds(parser: ArgumentParser) -> None:
    """Adds the bounds of `settled`: --passes and --warm-up."""
    parser.add_argument("--passes", type=int, default=PASSES, help="over a row's requests at most; the last one counts")
    parser.add_argument("--warm-up", type=float, default=MOST_S, help="seconds after which a row's next pass counts")


def _wait() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def moment(cuda: bool) -> Any:
    """Now, on the clock of the device, which need not have come so far, or of the host."""
    if not cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds(begin: Any, end: Any) -> float:
    """Between two moments that the device has reached."""
    return 1e3 * (end - begin) if isinstance(begin, float) else begin.elapsed_time(end)


def device_ms(work: Callable[[], Any], cuda: bool, *, warm: int = 2, runs: int = 10) -> float:
    """The median GPU time of a piece of work after warm-up; on a CPU the host's time."""
    marks = []
    for _ in range(warm + runs):
        begin = moment(cuda)
        work()
        marks.append((begin, moment(cuda)))
        _wait()
    return statistics.median(milliseconds(*pair) for pair in marks[warm:])


class Clock:
    """The GPU time of every launch by shape; on a CPU the host's time."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.cuda = engine, engine.device.type == "cuda"
        self.restart()

    def restart(self) -> None:
        """Forgets all launches."""
        self.marks: list[tuple[StepShape, int, Any, Any]] = []
        self.captured = 0  # graphs

    def __enter__(self) -> Clock:
        self.engine.runner.observer = self._timed
        return self

    def __exit__(self, *error: object) -> None:
        self.engine.runner.observer = None

    @contextmanager
    def _timed(self, step_shape: StepShape, slots: Sequence[int]) -> Iterator[None]:
        from dinfer.speed.abilities.slices import Sliced

        begin, captured = moment(self.cuda), self.engine.runner.captured
        yield
        self.captured += self.engine.runner.captured - captured
        rows = step_shape.lanes if step_shape.extra(Sliced) else len(slots)  # a row may take several lanes
        self.marks.append((step_shape, rows, begin, moment(self.cuda)))

    @property
    def shapes(self) -> list[StepShape]:
        """The shape of each launch, in order."""
        return [step_shape for step_shape, *_ in self.marks]

    def table(self) -> list[dict[str, Any]]:
        """Launches, rows and times of each shape, sorted by total time. Waits for the device."""
        from dinfer.core.step.shape import KeysOnly

        _wait()
        found = defaultdict(list)
        for step_shape, rows, begin, end in self.marks:
            found[
                step_shape.phase.name, step_shape.lanes, step_shape.width, step_shape.extra(KeysOnly) is not None
            ].append((milliseconds(begin, end), rows))
        table = [
            {
                "phase": phase, "lanes": lanes, "width": width, "settles": settles, "launches": len(values),
                "rows": round(statistics.fmean(rows for _, rows in values), 2),
                "median_ms": round(statistics.median(ms for ms, _ in values), 4),
                "total_ms": round(sum(ms for ms, _ in values), 3),
            }
            for (phase, lanes, width, settles), values in found.items()
        ]  # fmt: skip
        return sorted(table, key=lambda row: -row["total_ms"])
