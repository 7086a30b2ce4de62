"""Times the steps of an engine without waiting for them."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from dinfer.core.engine.engine import Engine
from dinfer.core.step.shape import KeysOnly, StepShape
from dinfer.speed.abilities.slices import Sliced


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


class Clock:
    """The GPU time of every launch by shape; on a CPU the host's time."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.cuda = engine, engine.device.type == "cuda"
        self.marks: list[tuple[StepShape, int, Any, Any]] = []
        self.captures: set[int] = set()  # places of the marks that hold the capture of a graph

    def __enter__(self) -> Clock:
        self.engine.runner.observer = self._timed
        return self

    def __exit__(self, *error: object) -> None:
        self.engine.runner.observer = None

    @contextmanager
    def _timed(self, step_shape: StepShape, slots: Sequence[int]) -> Iterator[None]:
        begin, captured = moment(self.cuda), self.engine.runner.captured
        yield
        if self.engine.runner.captured > captured:
            self.captures.add(len(self.marks))
        rows = step_shape.lanes if step_shape.extra(Sliced) else len(slots)  # a row may take several lanes
        self.marks.append((step_shape, rows, begin, moment(self.cuda)))

    @property
    def shapes(self) -> list[StepShape]:
        """The shape of each launch, in order."""
        return [step_shape for step_shape, *_ in self.marks]

    def table(self) -> list[dict[str, Any]]:
        """Launches, rows and times of each shape, sorted by total time. Waits for the device."""
        if self.cuda:
            torch.cuda.synchronize()
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
