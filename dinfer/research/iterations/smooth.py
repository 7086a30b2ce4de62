"""A masked position is fed the mask plus what it expects to become (dInfer, arXiv:2510.08666)."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from dinfer.core.iterations.sweep import BlockSweep
from dinfer.core.kernels.canvas import padded
from dinfer.core.registry import ITERATIONS, option
from dinfer.core.step.contracts import ModelSpec, RowCursors, State
from dinfer.core.step.mixins import Feeds, Paces
from dinfer.core.step.model import Model


@ITERATIONS.register("smooth")
@dataclass(frozen=True, kw_only=True)
class Smooth(BlockSweep, Feeds, Paces):
    """Blockwise, feeding E[mask] + w_t * softmax(logits) E at masked positions, with an annealed threshold.

    At forward t of the request, w_t = min(weight_init + weight_growth * t, weight), and no token is committed below
    1 - threshold_decay * t. The logits are those of the last forward that computed the position. A model that tolerates
    inputs between its embeddings needs fewer steps at the same threshold. The LM head runs on the whole window.
    """

    paper = "dInfer, arXiv:2510.08666"
    scores: ClassVar[Literal["window", "adjusted", "none"]] = "window"

    weight: float = option(0.3, "largest weight of the expected embedding", most=1e3)
    weight_init: float = option(0.15, "weight at the first forward", most=1e3)
    weight_growth: float = option(0.02, "growth of the weight per forward", most=1e3)
    threshold_decay: float = option(0.02, "by how much the least confidence falls per forward, from 1", most=1e3)

    def incompatibility(self, spec: ModelSpec) -> str | None:
        if spec.mask_id is not None:
            return None
        return "iteration=smooth adds what it expects to the mask token, and this model has none."

    def fresh_state(self, spec: ModelSpec, length: int) -> State:
        return {"expected": torch.zeros(()).expand(length + 1, spec.hidden)}  # the last row is scratch

    def embed(self, model: Model, tokens_BW: Tensor, pos_BW: Tensor, lanes: RowCursors, state: State) -> Tensor:
        x_BWD = model.embed(tokens_BW)
        soft_BWD = state["expected"].gather(1, self._rows(pos_BW, state)).to(x_BWD.dtype)
        return x_BWD + soft_BWD * (tokens_BW == model.spec.mask)[..., None]

    def observe(self, model: Model, logits_BWV: Tensor, pos_BW: Tensor, lanes: RowCursors, state: State) -> None:
        weight_B = (self.weight_init + self.weight_growth * lanes.steps_B).clamp_max(self.weight)
        expected_BWD = model.mix(logits_BWV) * weight_B.to(logits_BWV.dtype)[:, None, None]
        told_BW, length = pos_BW, state["expected"].shape[1] - 1
        if model.spec.shift:
            told_BW = torch.where(pos_BW >= 0, pos_BW + model.spec.shift, -1).clamp_max(length)
        state["expected"].scatter_(1, self._rows(told_BW, state), expected_BWD.to(state["expected"].dtype))

    def floor(self, lanes: RowCursors) -> Tensor:
        return 1 - self.threshold_decay * lanes.steps_B.to(torch.float64)

    def _rows(self, pos_BW: Tensor, state: State) -> Tensor:
        _, rows, hidden = state["expected"].shape
        return padded(pos_BW, rows - 1)[..., None].expand(-1, -1, hidden)


# As DiffusionGemma has it: transformers 5.23, `diffusion_gemma`.
