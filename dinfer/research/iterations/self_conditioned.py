"""One canvas after the other, each position fed with what the step before expected there.

It is what Analog Bits (arXiv:2208.04202) and DiffusionGemma do.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, cast

import torch
from torch import Tensor

from dinfer.core.iterations.sweep import AlignedSweep, Grid
from dinfer.core.registry import ITERATIONS, option
from dinfer.core.step.contracts import ModelSpec, RowCursors, State
from dinfer.core.step.mixins import Feeds, Pads
from dinfer.core.step.model import Model


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


class SelfConditioned(Protocol):
    """What a `Model` with `spec.self_conditioning` also defines."""

    def condition(self, x_BWD: Tensor, expected_BWD: Tensor) -> Tensor:
        """Embeddings with the expected embeddings of the step before, as `Model.mix` gives them, or zeros. [B, W, D]"""
