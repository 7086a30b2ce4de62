"""Reads what the host needs to know of every slot: the one place where the host waits for the device."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from dinfer.core.canvas import CURSORS, Canvas, Cursors


class Seen(NamedTuple):
    """Every slot after a round. Good until the next copy is asked for."""

    cursors: list[Cursors]
    active_NX: Tensor  # on the host: tokens of the blocks that were active before the round, ~token where it is open


class CanvasReader:
    """Small pinned copies of cursors and active blocks, made by the device in order with its steps.

    Two copies may be under way.
    """

    def __init__(self, canvas: Canvas, block: int) -> None:
        self._canvas, self._block = canvas, block
        self._before_CN = canvas.cursors_NC.T.contiguous()
        slots, columns = canvas.cursors_NC.shape
        width, cuda = len(CURSORS) + (columns - len(CURSORS)) // 2 * block, canvas.cursors_NC.is_cuda
        self._spare = [
            (torch.empty(slots, width, dtype=torch.int64, pin_memory=cuda), event(cuda)) for _ in range(2)
        ]  # fmt: skip
        self._asked: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()

    def begin(self) -> None:
        """Notes which blocks are active, before the steps of a round are launched."""
        self._before_CN.copy_(self._canvas.cursors_NC.T)

    def request(self) -> None:
        """Asks for a copy as of the end of all work launched so far."""
        host_NX, copied = self._spare[-1]
        cursors_NC = self._canvas.cursors_NC[:, : len(CURSORS)]
        now_NX = torch.cat((cursors_NC, self._canvas.active(self._before_CN, self._block)), 1)
        host_NX.copy_(now_NX, non_blocking=True)
        if copied is not None:
            copied.record()
        self._asked.append(self._spare.pop())

    def read(self) -> Seen:
        """Waits for the oldest copy that was asked for."""
        host_NX, copied = self._asked[0]
        if copied is not None:
            copied.synchronize()  # an interrupt comes here, and the copy is still asked for
        self._spare.append(self._asked.popleft())
        cursors = [Cursors._make(row) for row in host_NX[:, : len(CURSORS)].tolist()]
        return Seen(cursors, host_NX[:, len(CURSORS) :])


def event(cuda: bool) -> torch.cuda.Event | None:
    """What says that a copy is there. On a CPU it is there at once."""
    return torch.cuda.Event() if cuda else None
