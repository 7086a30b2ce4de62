"""Reads the cursors of every slot: the one place where the host waits for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from dinfer.canvas import Cursors


class CursorReader:
    """A copy of the cursors, small and pinned, that the device makes when it gets there."""

    def __init__(self, cursors_NC: Tensor) -> None:
        self._cursors_NC = cursors_NC
        self._host_NC, self._copied = None, None
        if cursors_NC.is_cuda:
            self._host_NC = torch.empty(cursors_NC.shape, dtype=cursors_NC.dtype, pin_memory=True)
            self._copied = torch.cuda.Event()

    def request(self) -> None:
        """Asks for a copy of the cursors as they are once all work launched so far is done."""
        if self._host_NC is not None and self._copied is not None:
            self._host_NC.copy_(self._cursors_NC, non_blocking=True)
            self._copied.record()

    def read(self) -> list[Cursors]:
        """The cursors that were last asked for, of every slot; waits for them."""
        cursors_NC = self._cursors_NC
        if self._host_NC is not None and self._copied is not None:
            self._copied.synchronize()
            cursors_NC = self._host_NC
        return [Cursors._make(row) for row in cursors_NC.tolist()]
