"""Tokens that stand at open positions: one forward over several versions of the active blocks, with drafts filled in.

The host says how many (`Versioned`). An ability makes their `States`, and decides by `logits_of_versions`: candidates
by the one that the commits led to, branches by the best one, drafts by the longest path that is confirmed.

Shape suffixes beside those of `dinfer.core.step.contracts`: X = K * L positions of the active blocks, C versions, the
present state among them, G = C * B lanes of the forward.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dinfer.core.kernels.canvas import take
from dinfer.core.kernels.dispatch import triton, use_triton
from dinfer.core.kernels.linear import FLOAT8
from dinfer.core.memory import NOWHERE, KVPool, PagedAttend, Seen
from dinfer.core.step.canvas import Canvas
from dinfer.core.step.cursors import Phase, RowCursors
from dinfer.core.step.scores import read_logits
from dinfer.core.step.work import Forward, Step


@dataclass(slots=True)
class States:
    """The states that one forward evaluates, and where the rows are among them."""

    slot_B: Tensor
    live_B: Tensor  # bool: the row has followed the candidates so far
    start_B: Tensor  # the active region that the candidates are of
    end_B: Tensor
    length_B: Tensor
    pos_BX: Tensor
    states_CBX: Tensor  # int64, tokens of the active region

    def windows(self, pos_BW: Tensor, tokens_BW: Tensor) -> Tensor:
        """What the window of each lane of the forward holds. int64 [G, W]"""
        inside_BW = (pos_BW >= self.start_B[:, None]) & (pos_BW < self.end_B[:, None])
        count, place_BW = self.states_CBX.shape[0], torch.where(inside_BW, pos_BW - self.start_B[:, None], 0)
        states_CBW = self.states_CBX.gather(2, place_BW.expand(count, -1, -1))
        return torch.where(inside_BW, states_CBW, tokens_BW).flatten(0, 1)

    def attend(
        self, kv: KVPool, pos_BW: Tensor, place_BW: Tensor, intervals: list[tuple[Tensor, Tensor]], pages: int
    ) -> PagedAttend:
        """Attention of all lanes of the forward. Each candidate writes its keys to pages of its own.

        `intervals`: what the positions see, for the present state and for each candidate. [B, W] each
        """
        count = self.states_CBX.shape[0]
        table_GP = forked(kv, self.slot_B, place_BW, count - 1)
        pos_GW, place_GW = (t_BW.repeat(count, 1) for t_BW in (pos_BW, place_BW))
        start_GW, end_GW = (torch.cat(bounds) for bounds in zip(*intervals, strict=True))
        lane_G = torch.arange(table_GP.shape[0], device=table_GP.device)
        return kv.attend(lane_G, pos_GW, Seen((start_GW, end_GW)), pages, place_BW=place_GW, table_NP=table_GP)

    def reached(self, canvas: Canvas, phase: Phase) -> tuple[RowCursors, Tensor]:
        """The lanes after a step, live where the state is a candidate, and which one it is. int64 [B]"""
        lanes = canvas.lanes(self.slot_B, phase)
        tokens_BX = canvas.gather(self.slot_B, self.pos_BX)[0]
        same_CB = ((tokens_BX == self.states_CBX) | (self.pos_BX < 0)).all(-1)
        stays_B = (lanes.start_B == self.start_B) & (lanes.end_B == self.end_B) & (lanes.length_B == self.length_B)
        self.live_B = self.live_B & lanes.live_B & stays_B & same_CB.any(0)
        return replace(lanes, live_B=self.live_B), same_CB.long().argmax(0)


def logits_of_versions(step: Step, run: Forward, count: int) -> Tensor:
    """The logits of the active blocks in each of `count` versions of the lanes. [C, R, L, V]"""
    lanes_GWD = take(run.h_BWD, run.logit_place_RL.repeat(count, 1))
    return read_logits(step, run.model, lanes_GWD).unflatten(0, (count, -1))


def forked(kv: KVPool, slot_B: Tensor, pos_BW: Tensor, count: int) -> Tensor:
    """The pages of each lane, and of `count` candidates that compute the same positions. [(1 + count) * B, P]

    A candidate shares the pages without such a position and has its own instead of the others. Of these, the
    first and the last may hold keys beside the window, so they are copied.
    """
    if use_triton(slot_B, "canvas"):
        return triton("versions").forked(kv, slot_B, pos_BW, count)
    table_BP, (first_B, last_B) = kv.table_NP.index_select(0, slot_B), columns_of(kv, pos_BW)
    column_P, which_K = (torch.arange(n, device=slot_B.device) for n in (table_BP.shape[1], count))
    own_KB = kv.first_beside + (slot_B * kv.candidates + which_K[:, None]) * kv.fork - first_B
    inside_BP = (column_P >= first_B[:, None]) & (column_P <= last_B[:, None])
    table_KBP = torch.where(inside_BP, own_KB[..., None] + column_P, table_BP)
    ends_B2 = torch.stack((first_B, last_B), -1).clamp(0, table_BP.shape[1] - 1)
    from_KB2 = table_BP.gather(1, ends_B2).expand(count, -1, -1)
    copy_keys(kv, from_KB2.flatten(), table_KBP.gather(2, ends_B2.expand(count, -1, -1)).flatten(), pages=True)
    return torch.cat((table_BP, table_KBP.flatten(0, 1)))


def columns_of(kv: KVPool, pos_BW: Tensor) -> tuple[Tensor, Tensor]:
    """The columns of the table with the first and the last position of each lane; -1 is none. int64 [B] each"""
    last_B = pos_BW.amax(-1) // kv.page
    return torch.where(pos_BW < 0, pos_BW.new_full((), NOWHERE), pos_BW).amin(-1) // kv.page, last_B


def copy_keys(kv: KVPool, from_X: Tensor, to_X: Tensor, *, pages: bool = False) -> None:
    """Copies keys and values to other places of the pool, or those of whole pages to others, in all layers."""
    for pool in (kv.k_JPTGE, kv.v_JPTGE):
        pool = pool.view(torch.uint8) if pool.dtype == FLOAT8 else pool
        pool = pool if pages else pool.flatten(1, 2)
        pool.index_copy_(1, to_X, pool.index_select(1, from_X))
    if kv.local is not None:
        copy_keys(kv.local, from_X, to_X, pages=pages)


def adopt(kv: KVPool, run: Forward, choice_B: Tensor) -> None:
    """Makes the keys that the chosen version of each lane has computed those of its row. `choice_B`: 0 is the row's"""
    write_CBW = run.attend.write_X.view(-1, *run.place_BW.shape)
    if use_triton(choice_B, "canvas"):
        return triton("versions").adopt(kv, write_CBW, choice_B)
    copy_keys(kv, write_CBW.gather(0, choice_B[:, None].expand_as(write_CBW[:1])).flatten(), write_CBW[0].flatten())
