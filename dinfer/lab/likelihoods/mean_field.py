"""Estimates with the whole answer masked: each token by itself, given the prompt."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dinfer.core.registry import option
from dinfer.lab.likelihood import LIKELIHOODS, Likelihood, Mask, Text, uniforms


@LIKELIHOODS.register("diffu_grpo")
@dataclass(frozen=True, kw_only=True)
class DiffuGrpo(Likelihood):
    """Each token of an answer that is all masked; prompt tokens are masked at a rate, anew in each iteration."""

    paper = "d1, arXiv:2504.12216"
    attention = "full"

    iterations: int = option(1, "forwards of each answer, one for each inner iteration of the trainer", least=1)
    prompt_rate: float = option(0.15, "share of prompt tokens that are masked", most=1)
    guidance: float = option(0.0, "of a second forward whose prompt is masked")

    def draw(self, texts: Sequence[Text], seed: int) -> Iterator[Mask]:
        for text in texts:
            for k in range(self.iterations):
                prompt_P = uniforms(text.prompt, seed, text.index, k) < self.prompt_rate
                yield Mask(text.index, torch.cat((prompt_P, torch.ones(text.answer, dtype=torch.bool))), k)

    def counted(self, text: Text) -> Tensor:
        return text.ended_A


@LIKELIHOODS.register("coupled")
@dataclass(frozen=True, kw_only=True)
class Coupled(Likelihood):
    """Half of each token with the answer all masked, half of it by a subset of rate t or its complement, over its rate.

    t is one for all texts of an iteration.
    """

    paper = "DiffuCoder, arXiv:2506.20639"
    attention = "full"

    iterations: int = option(1, "masks of each answer, one for each inner iteration of the trainer", least=1)
    low: float = option(0.2, "least rate of the subset", most=1)
    high: float = option(0.8, "greatest rate", most=1)

    def draw(self, texts: Sequence[Text], seed: int) -> Iterator[Mask]:
        for k in range(self.iterations):
            rate = self.low + (self.high - self.low) * float(uniforms(1, seed, k, -1))
            for text in texts:
                masked_A = uniforms(text.answer, seed, k, text.index) < rate
                yield Mask(text.index, text.masks(torch.ones_like(masked_A)), k, 1 / 2)
                yield Mask(text.index, text.masks(masked_A), k, 1 / (2 * rate))
                yield Mask(text.index, text.masks(~masked_A), k, 1 / (2 * (1 - rate)))

    def counted(self, text: Text) -> Tensor:
        return text.ended_A
