"""A model that returns recorded logits, so that decoders run in the real step on those of the reference."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dinfer.core.iterations.sweep import Blockwise
from dinfer.core.step.contracts import ModelSpec
from dinfer.core.step.cursors import RowCursors
from dinfer.core.step.mixins import Paces
from dinfer.core.step.model import Attend


class ScriptedModel:
    """Its hidden states are the recorded logits of `step`, one row a lane, whatever it is fed."""

    dtype = torch.float32

    def __init__(self, logits_SBLV: Tensor, *, mask_id: int | None, eos_id: int, shift: int = 0, **fields: Any) -> None:
        self.logits_SBLV, self.step, self.device = logits_SBLV, 0, logits_SBLV.device
        length, vocab = logits_SBLV.shape[-2:]
        self.spec = ModelSpec(
            family="scripted", vocab=vocab, hidden=vocab, layers=1, heads=1, kv_heads=1, head_dim=2, mlp=1,
            norm_eps=1.0, rope_theta=1.0, max_length=length + 1, mask_id=mask_id, eos_id=eos_id, stop_ids=(eos_id,),
            shift=shift, **fields,
        )  # fmt: skip

    def embed(self, tokens_BW: Tensor) -> Tensor:
        return tokens_BW[..., None].to(self.dtype)

    def forward(self, x_BWD: Tensor, attend: Attend) -> Tensor:
        return self.logits_SBLV[self.step]

    def logits(self, h_BLD: Tensor) -> Tensor:
        return h_BLD

    def mix(self, logits_BLV: Tensor) -> Tensor:
        return logits_BLV.softmax(-1)


@dataclass(frozen=True, kw_only=True)
class ScriptedSweep(Blockwise, Paces):
    """One block that may stall: references that wait while the mask token is the most likely can be followed."""

    decay: float | None = None  # the least confidence is 1 - step * decay; None: there is none

    def floor(self, lanes: RowCursors) -> Tensor | None:
        if self.decay is None:
            return super().floor(lanes)
        return (1.0 - lanes.forwards_B.double() * self.decay).float()

    def must_progress(self, lanes: RowCursors, open_BKL: Tensor) -> Tensor:
        return torch.zeros_like(lanes.step_BK, dtype=torch.bool)
