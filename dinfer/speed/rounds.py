"""Rounds that overlap: the device is at the next one while the host looks at the last."""

from functools import partial
from itertools import islice

from dinfer.core.engine.loop import Loop
from dinfer.core.engine.row import Row
from dinfer.core.engine.worker import Worker
from dinfer.speed.scheduler import FastScheduler


class OverlappedLoop(Loop):
    """With CUDA graphs, whose launch takes no time, it launches the next round before the last one has ended."""

    scheduler: FastScheduler

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self.scheduler = FastScheduler(worker.recipe, worker.runtime)
        self.ahead = worker.runtime.graphs  # launch the next round before the caller has seen the last one

    def take_steps(self) -> None:
        """The device runs one step while the host looks at the last, and while the caller has its turn.

        If the last steps have few rows, the next round is launched without them, so that the device need not wait. Of
        the last step the host first looks at rows that need another step than before. Then it launches the next round,
        and then it looks at the others.
        """
        if not self.ahead:
            super().take_steps()
            return
        if not self.flights:
            self.enter()
            self.launch()
        elif self.running:  # otherwise the room may grow first
            self.admit()
        if len(self.flights) == 1:
            self.each([row for rows, _ in self.flights[0] for row in rows], self.scheduler.prepare)
            self.start(self.scheduler.plan(self.running, in_flight=True))
        for flight, cursors in self.landed():
            rows, asked = flight[0]
            last = len(self.flights) == len(flight) == 1 and self.scheduler.plans_by_place
            groups: tuple[list[Row], list[Row]] = [], []
            for row in rows:
                groups[last and row.stays(cursors)].append(row)
            self.each(groups[False], partial(self.move, asked, cursors))
            if groups[True]:
                self.launch()
                self.each(groups[True], partial(self.move, asked, cursors))
            if len(flight) > 1 and len(self.flights) == 1:
                busy = {row for others, _ in islice(flight, 1, None) for row in others}
                if self.scheduler.goes_on(self.running, busy):
                    self.launch(busy)
        if not self.flights:
            self.launch()
