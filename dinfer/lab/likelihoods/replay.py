"""Likelihoods of tokens in the order in which they were written: each given those before it, masks elsewhere."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from dinfer.core.registry import option
from dinfer.core.terms.spec import ModelSpec
from dinfer.lab.likelihood import LIKELIHOODS, Likelihood, Mask, Passes, Samples, Scored, Text, weighted
from dinfer.lab.likelihoods.blocks import Blockwise, Counted, counted_from
from dinfer.lab.likelihoods.random_masks import tail


def rounds(steps_A: Tensor, text: Text, shrink: int = 1) -> Tensor:
    """In which forward each position of the answer is scored, from 0, each block counted for itself. int64 [A]

    `shrink`: so many distinct steps of a block share a forward. What no step wrote comes after all: `text.answer`.
    """
    block_A = torch.zeros_like(steps_A) if text.block_T is None else text.block_T[text.prompt :]
    round_A = torch.full_like(steps_A, text.answer)
    for block in block_A.unique():
        own_A = (block_A == block) & (steps_A >= 0)
        round_A[own_A] = steps_A[own_A].unique(return_inverse=True)[1] // shrink
    return round_A


@dataclass(frozen=True, kw_only=True)
class Replay(Likelihood):
    """A forward for each round: what was written in it or later is masked, what was written in it is scored."""

    replays = True

    def rounds(self, text: Text) -> Tensor:
        """In which forward each position is scored. int64 [A]"""
        return rounds(text.steps_A, text)

    def draw(self, texts: Sequence[Text], seed: int) -> Iterator[Mask]:
        for text in texts:
            round_A = self.rounds(text)
            yield from (Mask(text.index, text.masks(round_A >= r)) for r in round_A.unique().tolist())

    def weigh(self, text: Text, mask: Mask) -> Tensor:
        """The positions of the round in which the mask's first ones were written."""
        round_A, masked_A = self.rounds(text), mask.masked_T[text.prompt :]
        first = round_A[masked_A].min() if bool(masked_A.any()) else text.answer
        return (masked_A & (round_A == first) & (round_A < text.answer)).double()


@LIKELIHOODS.register("trajectory")
@dataclass(frozen=True, kw_only=True)
class Trajectory(Replay):
    """The log-probability of each token in the step that wrote it: exact for the tokens, given their order.

    Blocks of a block-causal model are replayed side by side, each behind clean ones. They are those of the samples.
    """

    paper = "CJ-GRPO, arXiv:2509.23924; TraceRL, arXiv:2509.06949"

    def blocks(self, spec: ModelSpec, samples: Samples, prompt: int, length: int) -> Tensor | None:
        if spec.causal_block is None:
            return None
        return counted_from(None, None, spec, samples, prompt, length)


@LIKELIHOODS.register("left_to_right")
@dataclass(frozen=True, kw_only=True)
class LeftToRight(Replay):
    """Each token given those before it, masks in place of the others: exact for one position a step from the left."""

    paper = "JustGRPO, LeapLabTHU/JustGRPO"
    replays = False

    temperature: float = option(1.0, "what logits are divided by", least=1e-6)

    def rounds(self, text: Text) -> Tensor:
        return rounds(torch.arange(text.answer), text)


@LIKELIHOODS.register("tracerl")
@dataclass(frozen=True, kw_only=True)
class TraceRL(Replay):
    """As trajectory, `shrink` steps in a forward, of models whose positions all see each other."""

    paper = "TraceRL, arXiv:2509.06949"
    attention: ClassVar[Literal["any", "full", "blocks"]] = "full"

    shrink: int = option(1, "distinct steps that share a forward", least=1)
    post_num: int | None = option(None, "EOS tokens behind the first so many are not scored; null: all are")

    def rounds(self, text: Text) -> Tensor:
        return rounds(text.steps_A, text, self.shrink)

    def weigh(self, text: Text, mask: Mask) -> Tensor:
        return super().weigh(text, mask) * ~tail(text, self.post_num)


@LIKELIHOODS.register("tracerl_block")
@dataclass(frozen=True, kw_only=True)
class TraceRLBlock(Blockwise, TraceRL):
    """As tracerl, of block-causal models: all blocks at once, counted from the prompt's end, each behind clean ones."""

    attention = "blocks"

    def weigh(self, text: Text, mask: Mask) -> Tensor:
        weight_A = Replay.weigh(self, text, mask)
        # The first ones are counted in each forward by itself, as published.
        eos_A = (text.answer_A == text.spec.eos_id) & (weight_A > 0)
        return weight_A if self.post_num is None else weight_A * ~(eos_A & (eos_A.cumsum(0) > self.post_num))


@LIKELIHOODS.register("trajectory_block")
@dataclass(frozen=True, kw_only=True)
class TrajectoryBlock(Counted, Replay):
    """As trajectory, of block-causal models, with the weights of a loss that counts each step of a block once."""

    paper = "CJ-GRPO, arXiv:2509.23924, as in DARE, yjyddq/DARE"

    def combine(self, passes: Passes, logp_X: Tensor, **known: Any) -> Scored:
        scored = super().combine(passes, logp_X, **known)
        assert passes.block_NT is not None
        n_X = passes.sequence_M[passes.pass_X]
        step = torch.stack((passes.pass_X, passes.block_NT[n_X, passes.place_X]))
        _, step_X, size = step.unique(dim=1, return_inverse=True, return_counts=True)
        steps_N = torch.zeros(len(passes.prompt_N), dtype=torch.float64).index_add(0, n_X, 1 / size[step_X].double())
        ones = weighted(replace(passes, weight_X=1 / size[step_X] / steps_N[n_X]), torch.ones_like(logp_X).detach())
        return replace(scored, more={"token_weights": ones.per_token[0]})
