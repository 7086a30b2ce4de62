"""The tokens, the statuses and the cursors of every slot, on the device.

Every tensor here is allocated once and written in place, so that CUDA graphs may hold its address. One more slot is
scratch: lanes that fill up a bucket name it, and no step acts on it. Shape suffixes as in `dinfer.core.step.cursors`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from dinfer.core.kernels.canvas import (
    active_rows,
    canvas_values,
    host_rows,
    lane_columns,
    padded,
    store_rows,
    uploaded,
    window_values,
)
from dinfer.core.step.cursors import ACTIVE, CURSORS, BlockView, Cursors, Phase, RowCursors, Status

__all__ = ["ACTIVE", "CURSORS", "BlockView", "Canvas", "Cursors", "Phase", "RowCursors", "Status"]


@dataclass(slots=True)
class Canvas:
    """Tokens, statuses and cursors of every slot."""

    tokens_NS: Tensor  # int64; the last column is scratch, where writes of padding land
    status_NS: Tensor  # uint8, of Status
    next_NS: Tensor  # int64, the next open position of the request at or after each; its length if there is none
    cursors_NC: Tensor  # int64, columns CURSORS; behind them the steps, then the quotas of the K active blocks
    stop_X: Tensor  # int64, ids that end a generation

    @classmethod
    def alloc(cls, slots: int, length: int, blocks: int, stop_ids: tuple[int, ...], device) -> Self:
        """A canvas for `slots` requests of at most `length` positions, `blocks` active blocks each."""
        n, s = slots + 1, length + 1
        return cls(
            tokens_NS=torch.zeros(n, s, dtype=torch.int64, device=device),
            status_NS=torch.full((n, s), int(Status.DONE), dtype=torch.uint8, device=device),
            next_NS=torch.zeros(n, s, dtype=torch.int64, device=device),
            cursors_NC=torch.zeros(n, len(CURSORS) + 2 * blocks, dtype=torch.int64, device=device),
            stop_X=torch.tensor(stop_ids, dtype=torch.int64, device=device),
        )

    @property
    def scratch(self) -> int:
        return self.tokens_NS.shape[0] - 1

    @property
    def capacity(self) -> int:
        return self.tokens_NS.shape[1] - 1

    def admit(
        self, slot_A: Tensor, cursors: Sequence[Cursors], tokens_AS: Tensor, masked_AS: Tensor, end_A: Tensor
    ) -> None:
        """Places requests in free slots. Host side: only `slot_A` is on the device.

        `tokens_AS`: as wide as `tokens_NS`; open positions keep these tokens until they are decoded.
        `masked_AS`: which positions to decode. `end_A`: positions of each request; tokens are 0 behind them.
        """
        place_S, end_A1 = torch.arange(self.capacity + 1), end_A[:, None]
        given_AS = torch.where(place_S < end_A1, int(Status.GIVEN), int(Status.DONE))
        status_AS = torch.where(masked_AS, int(Status.OPEN), given_AS).to(torch.uint8)
        next_AS = torch.where(masked_AS, place_S, end_A1).flip(1).cummin(1).values.flip(1)
        cursors_AC = host_rows(cursors, self.cursors_NC.shape[1], 0)
        for rows, values in (
            (self.next_NS, next_AS), (self.tokens_NS, tokens_AS), (self.status_NS, status_AS),
            (self.cursors_NC, cursors_AC),
        ):  # fmt: skip
            rows.index_copy_(0, slot_A, uploaded(values, rows.device))

    def lanes(self, slot_B: Tensor, phase: Phase) -> RowCursors:
        columns_CB, live_B = lane_columns(self.cursors_NC, slot_B, int(phase))
        blocks = (columns_CB.shape[0] - len(CURSORS)) // 2
        cursors_CB, step_KB, quota_KB = columns_CB.split((len(CURSORS), blocks, blocks))
        cursors = dict(zip(CURSORS, cursors_CB.unbind(0), strict=True))
        return RowCursors(slot_B=slot_B, live_B=live_B, step_BK=step_KB.T, quota_BK=quota_KB.T, **cursors)

    def store(self, lanes: RowCursors) -> None:
        """Writes the cursors of live lanes back to their slots. The slot of a live lane is named once."""
        blocks = *lanes.step_BK.unbind(1), *lanes.quota_BK.unbind(1)
        columns_BC = torch.stack([*(getattr(lanes, name) for name in CURSORS), *blocks], 1)
        store_rows(self.cursors_NC, lanes.slot_B, lanes.live_B, columns_BC)

    def active_rows(self, lanes: RowCursors, block: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The active blocks of the lanes as rows of blocks, `block` positions each.

        [R, L]: positions (-1: padding), tokens, whether each is still open, whether it is given or padding. [R]: how
        many masks each block began with.
        """
        return active_rows(
            self.tokens_NS, self.status_NS, lanes.slot_B, lanes.start_B, lanes.end_B, lanes.step_BK, lanes.quota_BK,
            block=block, statuses=(int(Status.OPEN), int(Status.GIVEN)),
        )  # fmt: skip

    def gather(self, slot_B: Tensor, pos_BW: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens and statuses at the positions of each lane; scratch where the position is -1."""
        return canvas_values(self.tokens_NS, self.status_NS, slot_B, pos_BW)

    def window_values(self, lanes: RowCursors, pos_BW: Tensor, fits_B: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Which rows are live and fit the window; their positions, -1 in other rows; the tokens and statuses there."""
        return window_values(self.tokens_NS, self.status_NS, lanes.slot_B, lanes.live_B, fits_B, pos_BW)

    def write(self, slot_B: Tensor, pos_BW: Tensor, tokens_BW: Tensor, commit_BW: Tensor, open_BW: Tensor) -> None:
        """Writes the tokens where `commit_BW`, and marks them decoded, or `open_BW`, and marks them open."""
        index = slot_B[:, None], padded(torch.where(commit_BW | open_BW, pos_BW, -1), self.capacity)
        self.tokens_NS.index_put_(index, tokens_BW)
        status_BW = torch.where(open_BW, int(Status.OPEN), int(Status.DONE)).to(torch.uint8)
        self.status_NS.index_put_(index, status_BW)

    def is_stop(self, tokens: Tensor) -> Tensor:
        return (tokens[..., None] == self.stop_X).any(-1)
