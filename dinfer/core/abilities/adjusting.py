"""Changes of logits before statistics are taken of them: by the decoder, by a request, and what is never offered.

A request may want tokens more often, less often or not at all: one number for each token is added to its logits. So a
token that is ruled out is neither offered nor counted in the confidence of others. Shape suffixes: N slots, A requests.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from dinfer.core.abilities.registry import ABILITIES
from dinfer.core.kernels.canvas import rows_of
from dinfer.core.step.ability import Ability, ByExtra, Entry, Extra, Parts, State, Step, StepShape
from dinfer.core.step.canvas import Canvas
from dinfer.core.step.contracts import ModelSpec
from dinfer.core.step.cursors import BlockView, Phase
from dinfer.core.step.mixins import Adjusts, Moves
from dinfer.core.step.scores import needed_vocabulary


@ABILITIES.register("adjusting")
@dataclass(frozen=True)
class Adjusting(Ability):
    """Asks the decoder for its adjustment, in steps that ask it for a proposal."""

    whole_logits = True
    decoder: Adjusts

    @classmethod
    def of(cls, recipe: Parts, shape: StepShape) -> Self | None:
        if shape.phase == Phase.VERIFY or not isinstance(recipe.decoder, Adjusts):
            return None
        return cls(recipe.decoder)

    def adjust(self, step: Step, view: BlockView, logits_RLV: Tensor, state: State) -> Tensor:
        return self.decoder.adjust(logits_RLV, view, state)


@ABILITIES.register("offering")
@dataclass(frozen=True)
class Offering(Ability):
    """Rules out the mask token if the sampling asks for that, and tokens that move others unless it takes them."""

    tokens: tuple[int, ...]

    @classmethod
    def of(cls, recipe: Parts, shape: StepShape) -> Self | None:
        spec = recipe.model.spec
        masks = (spec.mask_id,) if recipe.sampling.suppress_mask and spec.mask_id is not None else ()
        tokens = *masks, *(() if isinstance(recipe.decoder, Moves) else spec.moving_ids)
        return cls(tokens) if tokens else None

    def allow(self, step: Step, view: BlockView, logits_RLV: Tensor) -> Tensor:
        needed_vocabulary(step).fill(logits_RLV, *self.tokens)
        return logits_RLV


@dataclass(frozen=True, slots=True)
class Biased(Extra):
    """Some row has a bias."""

    whole_logits = True


@dataclass(slots=True)
class BiasTable:
    """The biases of all slots. It takes memory from the first request on that has one."""

    canvas: Canvas
    spec: ModelSpec
    bias_NV: Tensor | None = None  # float32

    def write(self, slot_A: Tensor, biases: Sequence[Mapping[str, Any]]) -> None:
        """Host side. `only` of a bias: no other tokens but the mask; `add`: what is added to single ones."""
        if self.bias_NV is None:
            if not any(biases):
                return
            slots, device = len(self.canvas.tokens_NS), self.canvas.tokens_NS.device
            self.bias_NV = torch.zeros(slots, self.spec.vocab, device=device)
        row_AV = torch.zeros(len(biases), self.spec.vocab)
        for row_V, bias in zip(row_AV, biases, strict=True):
            if only := bias.get("only"):
                row_V.fill_(-math.inf)
                row_V[[*only, *(() if self.spec.mask_id is None else (self.spec.mask_id,))]] = 0
            for token, value in bias.get("add", {}).items():
                row_V[token] += value
        self.bias_NV.index_copy_(0, slot_A, row_AV.to(slot_A.device))


@ABILITIES.register("bias", after=("offering",))
class Bias(ByExtra[Biased]):
    """Steps in which some rows have a bias: `more["bias"]` of a request, see `BiasTable.write`."""

    kind = Biased

    @classmethod
    def asks(cls, recipe: Parts, options: Sequence[float], more: Mapping[str, Any]) -> Extra | None:
        return Biased() if more.get("bias") else None

    @classmethod
    def alloc(cls, recipe: Parts, canvas: Canvas, block: int, extras: Sequence[Extra]) -> BiasTable:
        return BiasTable(canvas, recipe.model.spec)

    @classmethod
    def admit(cls, kept: BiasTable, slot_A: Tensor, entries: Sequence[Entry]) -> None:
        kept.write(slot_A, [entry.more.get("bias", {}) for entry in entries])

    def allow(self, step: Step, view: BlockView, logits_RLV: Tensor) -> Tensor:
        bias_NV = step.kept(Bias).bias_NV
        bias_BV = needed_vocabulary(step).part(bias_NV.index_select(0, step.lanes.slot_B))
        return logits_RLV + rows_of(bias_BV, step.shape.blocks)[:, None].to(logits_RLV.dtype)
