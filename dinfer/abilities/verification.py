"""A second pass of a denoise step, which checks a draft as if the model wrote token by token (S2D2).

The draft is what the block's pass proposes for its masks. The verification computes the block twice: filled with the
draft, and as masks at the same positions. A token sees what stands before it, a mask the tokens before its position and
itself. That is what a model of block size 1 sees. So one pass gives the logits of every token of the draft, given the
tokens before it.
"""

from dataclasses import replace

import torch
from torch import Tensor

from dinfer.kernels.window import span
from dinfer.recipe.recipe import Recipe
from dinfer.step.canvas import Canvas, Phase, RowCursors, Status
from dinfer.step.contracts import StepShape
from dinfer.step.state import BatchState


def postpone(canvas: Canvas, lanes: RowCursors, verify_B: Tensor, *, refreshed: bool) -> None:
    """Counts the step in live lanes whose draft is to be verified, and takes them out of the rest of the step."""
    waits_B = lanes.live_B & verify_B
    canvas.store(
        replace(
            lanes,
            live_B=waits_B,
            phase_B=torch.full_like(lanes.phase_B, int(Phase.VERIFY)),
            forwards_B=lanes.forwards_B + 1,
            steps_B=lanes.steps_B + 1,
            refreshes_B=lanes.refreshes_B + refreshed,
        )
    )
    lanes.live_B = lanes.live_B & ~waits_B


def verified(recipe: Recipe, state: BatchState, shape: StepShape, lanes: RowCursors) -> Tensor:
    """The logits of each position of the active block, given what stands before it and the draft. [R, L, V]"""
    model, slot_B = recipe.model, lanes.slot_B
    pos_BL = torch.where(lanes.live_B[:, None], span(lanes.start_B, lanes.end_B, shape.block), -1)
    tokens_BL, status_BL = state.canvas.gather(slot_B, pos_BL)
    draft_BL = state.decoder.rows["draft"].index_select(0, state.block_rows(slot_B, lanes.block_B, 1))
    tokens_BL = torch.where(status_BL == int(Status.OPEN), draft_BL, tokens_BL)
    pos_BW = pos_BL.repeat(1, 2)
    end_BW = torch.cat(((pos_BL + 1).clamp_min(1), pos_BL.clamp_min(0)), 1)
    interval_BW = torch.zeros_like(end_BW), end_BW
    attend = state.kv.attend(slot_B, pos_BW, interval_BW, shape.pages, alone=shape.block)
    masks_BL = torch.full_like(tokens_BL, model.spec.mask)
    h_BWD = model.forward(model.embed(torch.cat((tokens_BL, masks_BL), 1)), attend)
    return model.logits(h_BWD[:, shape.block :])
