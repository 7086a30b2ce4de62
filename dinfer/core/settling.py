"""How a row settles a block: computes the keys of final tokens without decoding.

It does so in a pass of its own, or in a lane that it borrows for one forward.
"""

from dataclasses import replace

import torch
from torch import Tensor

from dinfer.core.canvas import Canvas, Phase, RowCursors
from dinfer.core.protocols import CachePolicy, ModelSpec, StepShape
from dinfer.kernels.canvas import lend_lanes
from dinfer.kernels.window import window_positions


def settle(canvas: Canvas, lanes: RowCursors, settled_B: Tensor, kept_B: Tensor, phase: Phase) -> Tensor:
    """Stores the cursors of rows whose keys were computed and which decode nothing, and says which these are.

    A prefill continues in the next step where keys are missing. bool [B]
    """
    rest_B = (settled_B < kept_B) & (phase == Phase.PREFILL)
    passed = replace(
        lanes,
        live_B=lanes.live_B & (settled_B >= 0),
        kept_B=settled_B,
        forwards_B=lanes.forwards_B + 1,
        phase_B=torch.where(rest_B, int(Phase.PREFILL), int(Phase.WINDOW)),
    )
    canvas.store(passed)
    return passed.live_B


def lend(cache: CachePolicy, lanes: RowCursors, canvas: Canvas, spec: ModelSpec, shape: StepShape) -> RowCursors:
    """The lanes of the forward, in which rows that would settle have borrowed scratch lanes.

    The borrowed lane settles the row's finished block. The row's own lane goes on from there in the same forward: it
    sees these keys, because each layer writes the keys of all lanes before it attends. The last lane is lent first, to
    the first row. A row for which no scratch lane is left settles in its own lane.
    """
    _, fits_B, _, _, settled_B = window_positions(
        cache.plan(shape.phase), lanes.place_B, spec.frame, width=shape.width, active=shape.blocks * shape.block,
        prefill=False, settles=True,
    )  # fmt: skip
    assert settled_B is not None
    slot_B, kept_B = lend_lanes(lanes.slot_B, lanes.live_B, fits_B, settled_B, lanes.kept_B, canvas.scratch)
    computing = canvas.lanes(slot_B, shape.phase)
    computing.kept_B = kept_B
    return computing
