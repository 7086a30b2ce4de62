"""Reads the cursors of every slot: the one place where the host waits for the device."""

from __future__ import annotations

import torch
from torch import Tensor


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

    def read(self) -> list[list[int]]:
        """The cursors that were last asked for, a list a slot, columns as in the canvas; waits for them."""
        if self._host_NC is None or self._copied is None:
            return self._cursors_NC.tolist()
        self._copied.synchronize()
        return self._host_NC.tolist()
