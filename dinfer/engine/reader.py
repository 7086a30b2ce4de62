"""Reads the cursors of every slot: the one place where the host waits for the device."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from dinfer.core.canvas import Cursors


class CursorReader:
    """Small pinned copies of the cursors, made by the device in order with its steps. Two may be under way."""

    def __init__(self, cursors_NC: Tensor) -> None:
        self._cursors_NC, self._cuda = cursors_NC, cursors_NC.is_cuda
        self._spare = [
            (torch.empty_like(cursors_NC, device="cpu", pin_memory=self._cuda), event(self._cuda)) for _ in range(2)
        ]
        self._asked: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()

    def request(self) -> None:
        """Asks for a copy of the cursors as they are once all work launched so far is done."""
        host_NC, copied = self._spare[-1]
        host_NC.copy_(self._cursors_NC, non_blocking=True)
        if copied is not None:
            copied.record()
        self._asked.append(self._spare.pop())

    def read(self) -> list[Cursors]:
        """Waits for the oldest copy that was asked for. Returns the cursors of every slot."""
        host_NC, copied = self._asked[0]
        if copied is not None:
            copied.synchronize()  # an interrupt comes here, and the copy is still asked for
        self._spare.append(self._asked.popleft())
        return [Cursors._make(row[: len(Cursors._fields)]) for row in host_NC.tolist()]


def event(cuda: bool) -> torch.cuda.Event | None:
    """What says that a copy is there. On a CPU it is there at once."""
    return torch.cuda.Event() if cuda else None
