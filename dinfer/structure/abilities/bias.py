"""Tokens that a request wants more often, less often or not at all: one number for each is added to its logits.

So a token that is ruled out is neither offered nor counted in the confidence of others. Shape suffixes: N slots,
A requests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dinfer.core.abilities.registry import ABILITIES
from dinfer.core.kernels.canvas import rows_of, uploaded
from dinfer.core.step.ability import Ask, BlockView, ByExtra, Canvas, Entry, Extra, Parts, Request, Step
from dinfer.core.step.contracts import ModelSpec
from dinfer.core.step.scores import needed_vocabulary


@dataclass(frozen=True, slots=True)
class TokenBias(Ask):
    """Asks for tokens more or less often: what is added to the logits of single ones, and which ones alone may come."""

    add: tuple[tuple[int, float], ...] = ()
    only: tuple[int, ...] = ()  # beside the mask; none: all may


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

    def write(self, slot_A: Tensor, biases: Sequence[TokenBias | None]) -> None:
        """Host side."""
        if self.bias_NV is None:
            if not any(biases):
                return
            slots, device = len(self.canvas.tokens_NS), self.canvas.tokens_NS.device
            self.bias_NV = torch.zeros(slots, self.spec.vocab, device=device)
        row_AV = torch.zeros(len(biases), self.spec.vocab)
        for row_V, bias in zip(row_AV, biases, strict=True):
            if bias is not None and bias.only:
                row_V.fill_(-math.inf)
                row_V[[*bias.only, *(() if self.spec.mask_id is None else (self.spec.mask_id,))]] = 0
            for token, value in () if bias is None else bias.add:
                row_V[token] += value
        self.bias_NV.index_copy_(0, slot_A, uploaded(row_AV, slot_A.device))


@ABILITIES.register("bias", after=("offering",))
class Bias(ByExtra[Biased]):
    """Steps in which some rows have a bias."""

    kind = Biased
    answers = (TokenBias,)

    @classmethod
    def refusal(cls, recipe: Parts, request: Request) -> str | None:
        if (bias := request.ask(TokenBias)) is None:
            return None
        vocab, tokens = recipe.model.spec.vocab, (*(token for token, _ in bias.add), *bias.only)
        outside = next((token for token in tokens if not 0 <= token < vocab), None)
        return None if outside is None else f"a bias of token {outside} is outside the vocabulary of {vocab}"

    @classmethod
    def alloc(cls, recipe: Parts, canvas: Canvas, block: int, extras: Sequence[Extra]) -> BiasTable:
        return BiasTable(canvas, recipe.model.spec)

    @classmethod
    def admit(cls, kept: BiasTable, slot_A: Tensor, entries: Sequence[Entry]) -> None:
        kept.write(slot_A, [entry.request.ask(TokenBias) for entry in entries])

    def allow(self, step: Step, view: BlockView, logits_RLV: Tensor) -> Tensor:
        bias_NV = step.kept(Bias).bias_NV
        bias_BV = needed_vocabulary(step).part(bias_NV.index_select(0, step.lanes.slot_B))
        return logits_RLV + rows_of(bias_BV, step.shape.blocks)[:, None].to(logits_RLV.dtype)
