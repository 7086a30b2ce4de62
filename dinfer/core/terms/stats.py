"""The statistics of logits that decoders read, the data by which a sampler draws tokens, and quotas.

Shape suffixes: R rows of blocks, L block length, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenStats:
    """The proposed token of every position. All [R, L]."""

    token_RL: Tensor  # int64, the most likely token but the mask token; ties go to the lowest id
    confidence_RL: Tensor  # its probability under the whole distribution, mask token included
    mask_confidence_RL: Tensor  # the probability of the mask token
    entropy_RL: Tensor | None = None  # of the whole distribution, in nats; if asked for
    margin_RL: Tensor | None = None  # the largest probability less the second largest; if asked for
    best_RL: Tensor | None = None  # int64, the most likely token but the mask token, whatever was drawn; if asked for
    mask_drawn_RL: Tensor | None = None  # bool: the mask token was drawn; None: nothing was

    def stat(self, name: str) -> Tensor:
        """A further statistic, "entropy", "margin" or "best". Raises KeyError if the decoder's `needs` lack it."""
        value = {"entropy": self.entropy_RL, "margin": self.margin_RL, "best": self.best_RL}[name]
        if value is None:
            raise KeyError(f"{name!r} was not computed: name it in the decoder's `needs`")
        return value

    def surest(self, by: str) -> Tensor:
        """How sure the model is of each position: its "margin", less its "entropy", or else `top_RL`."""
        if by == "entropy":
            return -self.stat("entropy")
        return self.stat("margin") if by == "margin" else self.top_RL

    def each(self, change: Callable[..., Tensor], *others: TokenStats) -> TokenStats:
        """The same with every statistic that is there changed. `change` gets that of `others`, too, which have it."""
        there = {field.name: [getattr(one, field.name) for one in (self, *others)] for field in fields(self)}
        return replace(self, **{name: change(*stats) for name, stats in there.items() if stats[0] is not None})

    def where(self, drawn_RL: Tensor | None, offered: TokenStats) -> TokenStats:
        """The same with the drawn tokens of `offered` at these positions; None: at all."""
        if drawn_RL is None or offered.mask_drawn_RL is None:
            return offered
        return replace(
            offered,
            token_RL=torch.where(drawn_RL, offered.token_RL, self.token_RL),
            confidence_RL=torch.where(drawn_RL, offered.confidence_RL, self.confidence_RL),
            mask_drawn_RL=torch.where(drawn_RL, offered.mask_drawn_RL, self.declined_RL),
        )

    @property
    def top_RL(self) -> Tensor:
        """The largest probability, the mask token's included; where tokens are drawn, that of what was drawn."""
        if self.mask_drawn_RL is not None:
            return torch.where(self.mask_drawn_RL, self.mask_confidence_RL, self.confidence_RL)
        return torch.maximum(self.confidence_RL, self.mask_confidence_RL)

    @property
    def declined_RL(self) -> Tensor:
        """The mask token itself is the most likely, or was drawn: the model would rather wait."""
        if self.mask_drawn_RL is not None:
            return self.mask_drawn_RL
        return self.mask_confidence_RL > self.confidence_RL

    @property
    def finite_RL(self) -> Tensor:
        """False where the logits held a NaN or +inf, or nothing but -inf for every token but the mask."""
        return self.confidence_RL.isfinite()


@dataclass(frozen=True, slots=True)
class VocabularySlice:
    """Which tokens the last dimension of logits stands for: all of them, or those of a rank of a divided model."""

    first: int
    count: int
    most: int  # that any rank has
    all_gather: Callable[[Tensor], Tensor] | None = None  # what all ranks have, in order of rank; None: all are here
    rank: int = 0  # the place of this rank in that order

    def part(self, x_V: Tensor) -> Tensor:
        """The entries of these tokens, of one for each token of the vocabulary. [..., V] -> [..., count]"""
        return x_V[..., self.first : self.first + self.count]

    def at(self, logits: Tensor, *tokens: int) -> list[Tensor]:
        """The logits of each of the tokens that is here, as views."""
        places = (token - self.first for token in tokens)
        return [logits[..., place] for place in places if 0 <= place < self.count]

    def fill(self, logits: Tensor, *tokens: int, value: float = float("-inf")) -> None:
        """Sets the logits of each of the tokens that is here, in place."""
        for own in self.at(logits, *tokens):
            own.fill_(value)


@dataclass(frozen=True, slots=True)
class Draw:
    """What a sampler makes of the logits: the token is the best by `logits` + `scale` times Gumbel noise, which is a
    function of (seed, position, step, token). Rows that are not noisy get what they would get without a sampler."""

    belief_RLV: Tensor  # logits of the distribution that confidences are taken of
    logits_RLV: Tensor  # of the one that is drawn from
    scale_R1: Tensor  # float64, 0: the most likely token
    noisy_R1: Tensor  # bool: probabilities do not say whether the mask token won
    seed_R: Tensor
    pos_RL: Tensor
    step_R: Tensor


class Quota(NamedTuple):
    """Tokens to commit at a step of LLaDA's schedule: equal shares of `total`; the first steps take the remainder."""

    total: Tensor
    steps: Tensor
    step: Tensor

    def tokens(self) -> Tensor:
        """int64, of the broadcast shape"""
        return torch.div(self.total, self.steps, rounding_mode="floor") + (self.step < self.total % self.steps)
