"""Measures steps as they run, without waiting for the device."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dinfer.step.shape import StepShape

MOST = 32  # measurements that may run, or wait to be read


class StepClock:
    """The time of steps. A GPU measures with its own clock, which leaves out the host's time between steps."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._running: deque[tuple[StepShape, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._measured: deque[tuple[StepShape, float]] = deque(maxlen=MOST)  # only rank 0 reads

    @contextmanager
    def around(self, shape: StepShape) -> Iterator[None]:
        """Measures the step that is launched within."""
        if not self._cuda:
            began = time.perf_counter()
            yield
            self._measured.append((shape, time.perf_counter() - began))
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        yield
        end.record()
        if len(self._running) < MOST:
            self._running.append((shape, begin, end))

    def read(self) -> list[tuple[StepShape, float]]:
        """Shapes and seconds of the steps that have ended since the last call."""
        while self._running and self._running[0][2].query():
            shape, begin, end = self._running.popleft()
            self._measured.append((shape, begin.elapsed_time(end) / 1000))
        measured = [*self._measured]
        self._measured.clear()
        return measured
