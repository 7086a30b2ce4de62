"""What estimators of block-causal models share: where blocks are."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dinfer.core.registry import option
from dinfer.core.terms.spec import ModelSpec
from dinfer.lab.likelihood import Likelihood, Origin, Samples, family_blocks


@dataclass(frozen=True, kw_only=True)
class Blockwise(Likelihood):
    """An estimator that masks blocks behind clean ones."""

    attention = "blocks"
    block: int | None = option(None, "positions of a block; null: the samples', or else the model's", least=1)

    def blocks(self, spec: ModelSpec, samples: Samples, prompt: int, length: int) -> Tensor:
        """Counted from the prompt's end in both directions, as dLLM-RL trains."""
        size = size_of(self.block, spec, samples)
        return torch.div(torch.arange(length) - prompt, size, rounding_mode="floor") + -(-prompt // size)


@dataclass(frozen=True, kw_only=True)
class Counted(Blockwise):
    """One whose blocks may be counted from either end of the prompt."""

    origin: Literal["position", "prompt"] | None = option(None, "where they are counted from; null: as the samples say")

    def blocks(self, spec: ModelSpec, samples: Samples, prompt: int, length: int) -> Tensor:
        return counted_from(self.origin, self.block, spec, samples, prompt, length)


def size_of(block: int | None, spec: ModelSpec, samples: Samples) -> int:
    """Positions of a block."""
    size = block or samples.block or spec.causal_block
    assert size is not None  # of what a bidirectional family cannot have
    return size


def counted_from(
    origin: Origin | None, block: int | None, spec: ModelSpec, samples: Samples, prompt: int, length: int
) -> Tensor:
    """Counted from position 0, or the prompt's so and the answer's from its own begin, behind them. int64 [length]

    As the family does if neither options nor samples say anything.
    """
    place_T = torch.arange(length)
    if (block, samples.block, origin) == (None, None, None):
        return family_blocks(spec, place_T, prompt)
    size = size_of(block, spec, samples)
    if (origin or samples.origin) == "position":
        return place_T // size
    own_T = torch.div(place_T - prompt, size, rounding_mode="floor") - (-prompt // size)
    return torch.where(place_T < prompt, place_T // size, own_T)
