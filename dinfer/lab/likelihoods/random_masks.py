"""Means of the log-probability of masked tokens at random rates, as UniGRPO and dLLM-RL take them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dinfer.core.registry import option
from dinfer.lab.likelihood import LIKELIHOODS, Likelihood, Mask, Text, uniforms
from dinfer.lab.likelihoods.blocks import Blockwise


def tail(text: Text, post_num: int | None) -> Tensor:
    """The EOS tokens of an answer behind its first `post_num`; None: none. bool [A]"""
    eos_A = text.answer_A == text.spec.eos_id
    return torch.zeros_like(eos_A) if post_num is None else eos_A & (eos_A.cumsum(0) > post_num)


def mean(scored_A: Tensor) -> Tensor:
    """Weights of a mean over scored positions. float64 [A]"""
    return scored_A.double() / scored_A.sum().clamp_min(1)


@LIKELIHOODS.register("random_ratio")
@dataclass(frozen=True, kw_only=True)
class RandomRatio(Likelihood):
    """The mean of masked tokens, each position masked with probability t, t uniform; the mean over forwards."""

    paper = "UniGRPO (MMaDA, arXiv:2505.15809); Gen-Verse/dLLM-RL"
    attention = "full"
    drops = True

    samples: int = option(3, "forwards of each answer", least=1)
    low: float = option(0.1, "least rate", most=1)
    high: float = option(0.9, "greatest rate", most=1)
    post_num: int | None = option(None, "EOS tokens behind the first so many are masked and not scored; null: all are")

    def draw(self, texts: Sequence[Text], seed: int) -> Iterator[Mask]:
        for text in texts:
            for k in range(self.samples):
                rate = self.low + (self.high - self.low) * uniforms(1, seed, text.index, k, -1)
                masked_A = uniforms(text.answer, seed, text.index, k) < rate
                for chosen_A in self.drawn(masked_A):
                    yield Mask(text.index, text.masks(chosen_A | tail(text, self.post_num)))

    def drawn(self, masked_A: Tensor) -> tuple[Tensor, ...]:
        """The masks of one draw."""
        return (masked_A,)

    def weigh(self, text: Text, mask: Mask) -> Tensor:
        return mean(mask.masked_T[text.prompt :] & ~tail(text, self.post_num))


@LIKELIHOODS.register("random_pairs")
@dataclass(frozen=True, kw_only=True)
class RandomPairs(RandomRatio):
    """As random_ratio, each forward followed by one that masks the other positions."""

    paper = "Gen-Verse/dLLM-RL, method coupled"

    def drawn(self, masked_A: Tensor) -> tuple[Tensor, ...]:
        return masked_A, ~masked_A


@LIKELIHOODS.register("block_masking")
@dataclass(frozen=True, kw_only=True)
class BlockMasking(Blockwise):
    """The mean of masked tokens of all blocks, each behind clean ones and each position at a rate of its own."""

    paper = "Gen-Verse/dLLM-RL, rl_sdar"
    drops = True

    samples: int = option(1, "draws of each answer", least=1)
    pairs: bool = option(False, "a second forward masks the other positions")
    low: float = option(0.1, "least rate", most=1)
    high: float = option(0.9, "greatest rate", most=1)

    def draw(self, texts: Sequence[Text], seed: int) -> Iterator[Mask]:
        for text in texts:
            for k in range(self.samples):
                rate_A = self.low + (self.high - self.low) * uniforms(text.answer, seed, text.index, k, -1)
                masked_A = uniforms(text.answer, seed, text.index, k) < rate_A
                for chosen_A in (masked_A, ~masked_A) if self.pairs else (masked_A,):
                    yield Mask(text.index, text.masks(chosen_A))

    def weigh(self, text: Text, mask: Mask) -> Tensor:
        return mean(mask.masked_T[text.prompt :])
