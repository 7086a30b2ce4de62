"""How several active blocks slide, and the density of what is decoded.

Without sorts, loops or data-dependent shapes. Shape suffixes: B lanes, K active blocks, L block length, X = K * L,
R rows of blocks.
"""

import math

import torch
from torch import Tensor

from dinfer.core.iterations.sweep import Grid
from dinfer.core.kernels.dispatch import triton, use_triton
from dinfer.core.step.contracts import BlockAfter, Moved
from dinfer.core.step.cursors import RowCursors


def slide_blocks(
    lanes: RowCursors, after: BlockAfter, stable_BK: Tensor | None, hold_B: Tensor | None, *, grid: Grid,
    add_at: float, stable_at: float, stop: str,
) -> Moved:  # fmt: skip
    """Where the active blocks of each row slide to.

    Blocks leave from the first on, as long as they are finished. If all leave, the row enters the block of `next_B`, or
    is done if that is at its length. A stop token that is not given also ends the row: with `stop` "block" when its
    block leaves, with "cut" as soon as all positions before it are decoded.
    A block opens if there is room, the share `add_at` of the last block is decoded, and `stable_BK` of that block is at
    least `stable_at` (None: ignored). None opens if an active block has a stop token, or where `hold_B` (bool [B]).
    """
    next_B, length_B, start_B, end_B = after.next_B, lanes.length_B, lanes.start_B, lanes.end_B
    if use_triton(next_B, "advance"):
        return triton("advance").slide_blocks(
            lanes, after, stable_BK, hold_B, grid=grid, add_at=add_at, stable_at=stable_at, stop=stop
        )
    blocks, block = after.finished_BK.shape[1], grid.block
    block_K = torch.arange(blocks, device=start_B.device)
    active_B = -((start_B - end_B) // block)
    finished_BK = after.finished_BK | (block_K >= active_B[:, None])
    left_B = finished_BK.to(torch.int64).cumprod(-1).sum(-1).minimum(active_B)
    all_B, stay_B = left_B == active_B, active_B - left_B
    done_B, stopped_B = all_B & (next_B >= length_B), torch.zeros_like(all_B)
    if stop != "off":
        ends_BKL = after.stop_BKL & ~after.given_BKL
        stopped_B = ends_BKL.flatten(1).any(-1)
        done_B = done_B | (ends_BKL.any(-1) & (block_K < left_B[:, None])).any(-1)
        if stop == "cut":
            done_B = done_B | (ends_BKL.flatten(1) & (after.open_BKL.flatten(1).cumsum(-1) == 0)).any(-1)
    jumps_B = all_B & ~done_B
    opens_B = ~all_B & ~stopped_B & (active_B < blocks) & (next_B < length_B)
    last_B1 = (active_B - 1).clamp_min(0)[:, None]  # an empty slot has no active block
    opens_B = opens_B & (decoded_share(after.open_BKL, start_B, end_B, block).gather(1, last_B1)[:, 0] >= add_at)
    if stable_BK is not None:
        opens_B = opens_B & (stable_BK.gather(1, last_B1)[:, 0] >= stable_at)
    if hold_B is not None:
        opens_B = opens_B & ~hold_B
    new_start_B, new_end_B = grid.block_at(next_B)
    entered_BK = (block_K >= stay_B[:, None]) & (block_K < (stay_B + (opens_B | jumps_B))[:, None])
    slid_B = torch.where(all_B, start_B, start_B + left_B * block)
    out_start_B = torch.where(jumps_B, new_start_B, slid_B)
    out_end_B = torch.minimum(torch.where(jumps_B, new_end_B, end_B + opens_B * block), length_B)
    return Moved(out_start_B, out_end_B, lanes.block_B + left_B, entered_BK, done_B, left_B)


def forced_blocks(
    open_BKL: Tensor, start_B: Tensor, end_B: Tensor, *, block: int, force_at: float, first: bool
) -> Tensor:
    """Blocks that must commit: the first, and each block behind one whose decoded share is at least `force_at`.

    `first`: of these only the first block with open positions. bool [B, K]
    """
    if use_triton(start_B, "advance"):
        return triton("advance").forced_blocks(open_BKL, start_B, end_B, block=block, force_at=force_at, first=first)
    must_BK = decoded_share(open_BKL, start_B, end_B, block).roll(1, 1) >= force_at
    must_BK[:, 0].fill_(True)
    if first:
        must_BK &= open_BKL.any(-1)
        must_BK &= must_BK.cumsum(-1) == 1
    return must_BK


def decoded_share(open_BKL: Tensor, start_B: Tensor, end_B: Tensor, block: int) -> Tensor:
    """The decoded share of each active block; 1 behind the last. float64 [B, K]"""
    block_K = torch.arange(open_BKL.shape[1], device=start_B.device)
    size_BK = ((end_B - start_B)[:, None] - block_K * block).clamp(1, block)
    return (size_BK - open_BKL.sum(-1)).to(torch.float64) / size_BK


REACH = 9.0  # standard deviations beyond which a weight is below the precision of float64


def density(decoded_RL: Tensor, pos_RL: Tensor, prompt_R: Tensor, length_R: Tensor, sigma: float) -> Tensor:
    """The share of decoded positions around each position of a block, weighted by exp(-d^2 / 2 sigma^2). float64 [R, L]

    Positions before the block count as decoded, as far back as the generation is long. Positions behind the generation
    do once its last position is decoded; others behind the block do not. `decoded_RL` is bool. `pos_RL` are consecutive
    positions, -1 behind the end of a short block. The weights are normed as if everything were decoded, 3 generations
    each way.
    """
    length, reach = decoded_RL.shape[1], math.ceil(REACH * sigma)
    device, new_R1 = decoded_RL.device, (length_R - prompt_R)[:, None]
    decoded_RL = decoded_RL & (pos_RL >= 0)
    ended_R1 = (decoded_RL & (pos_RL == length_R[:, None] - 1)).any(-1, keepdim=True)
    pos_RX = pos_RL[:, :1] + torch.arange(-reach, length + reach, device=device)
    first_R1, last_R1 = prompt_R[:, None] - new_R1, length_R[:, None] + new_R1
    known_RX = torch.nn.functional.pad(decoded_RL, (reach, reach))
    known_RX = known_RX | (pos_RX < pos_RL[:, :1]) | (ended_R1 & (pos_RX >= length_R[:, None]) & (pos_RX < last_R1))
    known_RX = known_RX & (pos_RX >= first_R1)
    away_LX = torch.arange(length + 2 * reach, device=device) - reach - torch.arange(length, device=device)[:, None]
    away_D = torch.arange(-reach, reach + 1, device=device)
    weight_LX, weight_D = (torch.exp(-0.5 * (d.double() / sigma) ** 2) for d in (away_LX, away_D))
    total_R1 = (weight_D * ((away_D >= -3 * new_R1) & (away_D < 3 * new_R1))).sum(-1, keepdim=True)
    return (known_RX.double() @ weight_LX.T) / total_R1
