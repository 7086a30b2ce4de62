"""Reads the cursors of slots: the one place where the host waits for the device."""

from typing import NamedTuple

import torch
from torch import Tensor

from dinfer.abilities.reports import Reports
from dinfer.engine.worker import Worker
from dinfer.kernels.canvas import active_rows
from dinfer.step.canvas import CURSORS, Canvas, Status


class Seen(NamedTuple):
    """Slots after a step. Valid until their copy is free."""

    values: dict[int, list[int]]  # the cursors of the requested slots
    # On the host: tokens of the blocks that were active before the round, ~token where it is open. Without `blocks`,
    # those of an earlier round.
    active_NX: Tensor
    drafts_NX: Tensor  # on the host: `Reports.draft_NS` of these positions. Without `drafts`, anything


class _Copy(NamedTuple):
    """The target of a copy, and the event of its end."""

    cursors_NC: Tensor
    active_NX: Tensor
    drafts_NX: Tensor
    done: torch.cuda.Event | None


class Asked(NamedTuple):
    """A copy that was requested, and its slots."""

    copy: _Copy
    slots: list[int]


class CanvasReader:
    """Small pinned copies of cursors and active blocks, made by the device in order with its steps."""

    def __init__(self, canvas: Canvas, reports: Reports, block: int, worker: Worker) -> None:
        """`worker` waits for the end of a copy."""
        self._canvas, self._reports, self._block, self._worker = canvas, reports, block, worker
        self._before_CN = canvas.cursors_NC.T.contiguous()
        self._spare: list[_Copy] = []

    def begin(self) -> None:
        """Notes which blocks are active. Call it before the steps of a round that is read with `blocks`."""
        self._before_CN.copy_(self._canvas.cursors_NC.T)

    def request(self, slots: list[int], *, blocks: bool, drafts: bool) -> Asked:
        """Requests a copy of these slots after all work launched so far. The caller reads it and then frees it.

        `blocks`: with the tokens of active blocks. `drafts`: also with the tokens proposed there.
        """
        copy = self._spare.pop() if self._spare else self._room()
        copy.cursors_NC.copy_(self._canvas.cursors_NC, non_blocking=True)
        if blocks:
            copy.active_NX.copy_(self.active(), non_blocking=True)
        if drafts:
            start_N = self._before_CN[CURSORS.index("start_B")]
            drafts_NX = self._reports.active(start_N, copy.drafts_NX.shape[1])
            copy.drafts_NX.copy_(drafts_NX, non_blocking=True)
        if copy.done is not None:
            copy.done.record()
        return Asked(copy, slots)

    def read(self, asked: Asked) -> Seen:
        """Waits for a copy. An interrupt leaves it as it was, to be read again."""
        copy, slots = asked
        if copy.done is not None:
            self._worker.wait(copy.done)
        cursors_BC = copy.cursors_NC[slots, : len(CURSORS)].tolist()
        return Seen(dict(zip(slots, cursors_BC, strict=True)), copy.active_NX, copy.drafts_NX)

    def active(self) -> Tensor:
        """The tokens of every slot's active blocks and what is behind them, ~token where it is open. int64 [N, K * L]

        Values behind the end of a row are undefined.
        """
        blocks = (self._before_CN.shape[0] - len(CURSORS)) // 2
        cursors_CN, step_KN, quota_KN = self._before_CN.split((len(CURSORS), blocks, blocks))
        slot_N = torch.arange(self._before_CN.shape[1], device=self._before_CN.device)
        start_N, *ends = (cursors_CN[CURSORS.index(name)] for name in ("start_B", "end_B", "length_B"))
        end_N = torch.maximum(*ends)  # rows that grow are shorter than their block
        _, tokens_RL, masked_RL, _, _ = active_rows(
            self._canvas.tokens_NS, self._canvas.status_NS, slot_N, start_N, end_N, step_KN.T, quota_KN.T,
            block=self._block, open_status=int(Status.OPEN), given_status=int(Status.GIVEN),
        )  # fmt: skip
        return torch.where(masked_RL, ~tokens_RL, tokens_RL).view(len(slot_N), -1)

    def canvases(self, slots: list[int]) -> Tensor:
        """The tokens of some slots, ~token where it is open, on the host. Waits for the device. int64 [B, S]"""
        slot_B = torch.tensor(slots, dtype=torch.int64).to(self._canvas.tokens_NS.device)
        tokens_BS = self._canvas.tokens_NS.index_select(0, slot_B)
        open_BS = self._canvas.status_NS.index_select(0, slot_B) == int(Status.OPEN)
        return torch.where(open_BS, ~tokens_BS, tokens_BS).cpu()

    def free(self, asked: Asked) -> None:
        """Lets another request have the memory of a copy."""
        self._spare.append(asked.copy)

    def _room(self) -> _Copy:
        """The target of one more copy."""
        slots, columns = self._canvas.cursors_NC.shape
        active = (columns - len(CURSORS)) // 2 * self._block

        def host(width: int) -> Tensor:
            return torch.empty(slots, width, dtype=torch.int64, pin_memory=self._canvas.cursors_NC.is_cuda)

        return _Copy(host(columns), host(active), host(active), self._worker.event())
