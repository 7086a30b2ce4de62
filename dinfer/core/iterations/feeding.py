"""Iterations that feed the model with what it expected before.

* smooth: A masked position is fed the mask plus what it expects to become (dInfer, arXiv:2510.08666).
* self_conditioned: One canvas after the other, each position fed with what the step before expected there (Analog Bits,
  arXiv:2208.04202; DiffusionGemma).
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, cast

import torch
from torch import Tensor

from dinfer.core.iterations.sweep import AlignedSweep, BlockSweep
from dinfer.core.kernels.advance import Grid
from dinfer.core.kernels.canvas import padded
from dinfer.core.registry import ITERATIONS, option
from dinfer.core.step.contracts import ModelSpec, RowCursors, State
from dinfer.core.step.mixins import Feeds, Paces, Pads
from dinfer.core.step.model import Model, SelfConditioned


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
@ITERATIONS.register("self_conditioned")
@dataclass(frozen=True, kw_only=True)
class SelfConditionedSweep(AlignedSweep, Feeds, Pads):
    """Finishes a canvas of `block` positions before it begins the next; tells the model what it expected one step ago.

    The model is fed softmax(l) E, with the logits l as the decoder adjusted them (`renoise` divides them by its
    temperature), and nothing at the first step of a canvas. The first canvas begins where the prompt ends. The last one
    is decoded whole, and tokens beyond max_new_tokens are left out. `block` is the length that the model was trained
    with. This is for models trained so; they also decode without it (`blockwise`), but not as published.
    """

    paper = "Analog Bits, arXiv:2208.04202"
    scores: ClassVar[Literal["window", "adjusted", "none"]] = "adjusted"

    block: int = option(256, "length of a canvas, in tokens", least=1)

    def incompatibility(self, spec: ModelSpec) -> str | None:
        if self.block > spec.max_length:
            return (
                f"iteration.block={self.block} is decoded as a whole, but the model has {spec.max_length} positions. "
                "Use the length that the model was trained with."
            )
        if spec.self_conditioning:
            return None
        return (
            "iteration=self_conditioned tells a model what it expected one step ago, and this one was not trained for "
            "that."
        )

    def padding(self, new_tokens: int) -> int:
        return -new_tokens % self.block

    @property
    def grid(self) -> Grid:
        return Grid(self.block, align=False)

    def fresh_state(self, spec: ModelSpec, length: int) -> State:
        return {"expected": torch.zeros(()).expand(min(self.block, length) + 1, spec.hidden)}  # the last row is scratch

    def embed(self, model: Model, tokens_BW: Tensor, pos_BW: Tensor, lanes: RowCursors, state: State) -> Tensor:
        x_BWD = model.embed(tokens_BW)
        expected_BWD = state["expected"].gather(1, self._rows(pos_BW, lanes, state)).to(x_BWD.dtype)
        told_BW1 = (self._inside(pos_BW, lanes) & (lanes.step_BK[:, :1] > 0))[..., None]
        soft_BWD = torch.where(told_BW1, expected_BWD, torch.zeros_like(x_BWD))
        return cast(SelfConditioned, model).condition(x_BWD, soft_BWD)

    def observe(self, model: Model, logits_BWV: Tensor, pos_BW: Tensor, lanes: RowCursors, state: State) -> None:
        expected_BWD = model.mix(logits_BWV).to(state["expected"].dtype)
        state["expected"].scatter_(1, self._rows(pos_BW, lanes, state), expected_BWD)

    def _inside(self, pos_BW: Tensor, lanes: RowCursors) -> Tensor:
        return (pos_BW >= lanes.start_B[:, None]) & (pos_BW < lanes.end_B[:, None])

    def _rows(self, pos_BW: Tensor, lanes: RowCursors, state: State) -> Tensor:
        """Where in the state each position of the active canvas is kept. [B, W, D]"""
        _, rows, hidden = state["expected"].shape
        row_BW = torch.where(self._inside(pos_BW, lanes), pos_BW - lanes.start_B[:, None], rows - 1)
        return row_BW[..., None].expand(-1, -1, hidden)
