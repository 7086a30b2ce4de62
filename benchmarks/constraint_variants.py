"""Other ways to make logits fit a constraint, on the arrays of `dinfer.abilities.constraints`: an experiment.

The package has two. `greedy` offers each position what some accepted answer has there, and renormalises. `posterior`
is the option of that name (`dinfer.abilities.posterior`). `model` offers what `greedy` does, with the probabilities
before it renormalises. `path` offers the most probable accepted answer alone, with those probabilities (DINGO,
arXiv:2505.23061, with a counted end).

Shape suffixes: R rows of blocks, L block length, B lanes, X active positions in order, Q states, C classes, E edges,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from dinfer.abilities.constraints import Constraints
from dinfer.abilities.posterior import NEVER, class_weights
from dinfer.kernels.languages import Sweeps
from dinfer.kernels.lines import Line
from dinfer.recipe import recipe
from dinfer.step.ability import Ability, Step
from dinfer.step.canvas import BlockView


@dataclass(frozen=True)
class Model(Constraints):
    """The confidence of a token is its probability among all tokens. What is ruled out counts as the mask token's."""

    def allow(self, step: Step, view: BlockView, logits_RLV: Tensor) -> Tensor:
        own_RLV = logits_RLV.log_softmax(-1)
        allowed_RLV = super().allow(step, view, logits_RLV)
        return self._rest_waits(step, view, own_RLV.masked_fill(allowed_RLV == NEVER, NEVER), allowed_RLV)

    def _rest_waits(self, step: Step, view: BlockView, offered_RLV: Tensor, otherwise_RLV: Tensor) -> Tensor:
        """Log-probabilities of what is offered at open positions, and of the mask token in place of all others."""
        mask_id = step.recipe.model.spec.mask
        offered_RLV[..., mask_id] = NEVER
        offered_RLV[..., mask_id] = (1 - offered_RLV.exp().sum(-1)).clamp_min(1e-9).log()
        return torch.where(self._bound(step, view)[..., None], offered_RLV, otherwise_RLV)

    def _bound(self, step: Step, view: BlockView) -> Tensor:
        """Open positions of a language. bool [R, L]"""
        _, line, live_B = self.line(step, view)
        return (line.open_BX & ~line.outside_BX & live_B[:, None]).view(view.pos_RL.shape)


@dataclass(frozen=True)
class Path(Model):
    """Each position is offered its token of the most probable accepted answer."""

    def allow(self, step: Step, view: BlockView, logits_RLV: Tensor) -> Tensor:
        own_RLV = logits_RLV.log_softmax(-1)
        allowed_RLV = super().allow(step, view, logits_RLV)
        sweeps, line, _ = self.line(step, view)
        own_BXV = own_RLV.view(*line.open_BX.shape, -1)
        class_BX = best_path(sweeps, line, class_weights(sweeps, line, own_BXV, largest))
        of_class_BXV = sweeps.class_BV[:, None].to(torch.int64) == class_BX[..., None]
        token_RL1 = own_BXV.masked_fill(~of_class_BXV, NEVER).argmax(-1).view(*view.pos_RL.shape, 1)
        offered_RLV = torch.full_like(own_RLV, NEVER).scatter(2, token_RL1, own_RLV.gather(2, token_RL1))
        return self._rest_waits(step, view, offered_RLV, allowed_RLV)


VARIANTS: dict[str, type[Constraints]] = {
    "greedy": Constraints, "model": Model, "path": Path, "posterior": Constraints,
}  # fmt: skip


@contextmanager
def used(kind: type[Constraints]) -> Iterator[None]:
    """Recipes have this variant meanwhile."""
    before: tuple[type[Ability], ...] = recipe.ABILITIES
    recipe.ABILITIES = tuple(kind if ability is Constraints else ability for ability in before)
    try:
        yield
    finally:
        recipe.ABILITIES = before


def largest(value: Tensor, group: Tensor, groups: int) -> Tensor:
    """The largest value of each group, along the last dimension; of none -inf."""
    return value.new_full((*value.shape[:-1], groups), NEVER).scatter_reduce(-1, group, value, "amax")


def best_path(sweeps: Sweeps, line: Line, weight_BXC: Tensor) -> Tensor:
    """The class at each position of the accepted line with the largest sum of weights. int64 [B, X]"""
    from_BE, class_BE, to_BE = sweeps.edge_BE3.unbind(-1)
    class_BE = class_BE.clamp_max(weight_BXC.shape[-1] - 1)
    states, edges = sweeps.states + 1, from_BE.shape[1]
    edge_E = torch.arange(edges, device=from_BE.device)
    score_BQ = weight_BXC.new_full((len(from_BE), states), NEVER).scatter(1, line.state_B[:, None], 0.0)
    back = []
    for x in range(weight_BXC.shape[1]):
        through_BE = score_BQ.gather(1, from_BE) + weight_BXC[:, x].gather(1, class_BE)
        to_BQ = largest(through_BE, to_BE, states)
        wins_BE = (through_BE == to_BQ.gather(1, to_BE)) & (through_BE > NEVER)
        first_BQ = torch.full_like(to_BQ, edges, dtype=torch.int64)
        back.append(first_BQ.scatter_reduce(1, to_BE, torch.where(wins_BE, edge_E, edges), "amin").clamp_max(edges - 1))
        score_BQ = torch.where(line.outside_BX[:, x, None], score_BQ, to_BQ)
    ends_BQ = sweeps.distance_BQ <= line.room_B[:, None]
    state_B1 = score_BQ[:, :-1].masked_fill(~ends_BQ, NEVER).argmax(1, keepdim=True)
    found = []
    for x in reversed(range(len(back))):
        edge_B1 = back[x].gather(1, state_B1)
        found.append(class_BE.gather(1, edge_B1))
        state_B1 = torch.where(line.outside_BX[:, x, None], state_B1, from_BE.gather(1, edge_B1))
    return torch.cat(found[::-1], 1)
