"""Tokens weighed by how probable an answer with them is that is in the language: `posterior` of a constraint.

A language alone rules out what no accepted answer has, and leaves the other tokens of a position their shares. But a
token that starts a text which the model would hardly write should count less. So each open position is offered the
distribution of its token given that the whole line is accepted, if positions were independent. That is what a decoder
supposes, too. It takes the place of the logits; the commits are projected as ever.

Shape suffixes: N slots, R rows of blocks, L block length, B lanes, X active positions in order, Q states, C classes,
E edges, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from dinfer.core.abilities.registry import ABILITIES
from dinfer.core.kernels.canvas import uploaded
from dinfer.core.step.ability import Ability, BlockView, Canvas, Entry, Extra, Parts, Request, Step, StepShape
from dinfer.structure.abilities.constraints import Constraints, InLanguage, verifies_drafts
from dinfer.structure.kernels.languages import Sweeps
from dinfer.structure.kernels.lines import Line

NEVER = float("-inf")


@dataclass(frozen=True, slots=True)
class Weighed(Extra):
    """Some row asks for the posterior."""

    whole_logits = True


@ABILITIES.register("posterior", before=("constraints",), after=("offering", "bias"))
@dataclass(frozen=True)
class Posterior(Ability):
    """Steps in which some row asks for the posterior. It goes before `Constraints`, which finds nothing to rule out."""

    constraints: Constraints

    @classmethod
    def of(cls, recipe: Parts, shape: StepShape) -> Self | None:
        if verifies_drafts(recipe):  # one by one, nothing is said yet of what follows a token
            return None
        constraints = Constraints.of(recipe, shape) if shape.extra(Weighed) else None
        return None if constraints is None else cls(constraints)

    @classmethod
    def adds_for(cls, recipe: Parts, request: Request) -> Extra | None:
        return Weighed() if asked(request) else None

    @classmethod
    def refusal(cls, recipe: Parts, request: Request) -> str | None:
        if asked(request) and (brought := request.ask(InLanguage)) is not None and brought.kinds is not None:
            return "posterior=True weighs what ends an answer, and here text stands behind a gap: leave it out"
        return None

    @classmethod
    def alloc(cls, recipe: Parts, canvas: Canvas, block: int, extras: Sequence[Extra]) -> Tensor:
        return torch.zeros_like(canvas.tokens_NS[:, 0], dtype=torch.bool)

    @classmethod
    def admit(cls, kept: Tensor, slot_A: Tensor, entries: Sequence[Entry]) -> None:
        kept.index_copy_(0, slot_A, uploaded(torch.tensor([asked(entry.request) for entry in entries]), kept.device))

    def allow(self, step: Step, view: BlockView, logits_RLV: Tensor) -> Tensor:
        sweeps, line, live_B = self.constraints.line(step, view)
        own_RLV = logits_RLV.log_softmax(-1)
        own_BXV = own_RLV.view(*line.open_BX.shape, -1)
        class_BXV = sweeps.class_RLV(own_BXV)
        others_BXC, found_B = others(sweeps, line, class_weights(sweeps, line, own_BXV, class_BXV))
        weighed_B = step.kept(Posterior).index_select(0, step.lanes.slot_B) & live_B & found_B
        at_BX = line.open_BX & ~line.outside_BX & weighed_B[:, None]
        at_RL1 = at_BX.view(*view.pos_RL.shape, 1)
        posterior_RLV = (own_BXV + others_BXC.gather(2, class_BXV)).view(own_RLV.shape).to(logits_RLV.dtype)
        if (mask_id := step.recipe.model.spec.mask_id) is not None:  # the model may rather wait
            at_RL1 = at_RL1 & (torch.arange(own_RLV.shape[-1], device=at_RL1.device) != mask_id)
            logits_RLV = torch.where(at_BX.view(*view.pos_RL.shape, 1), own_RLV, logits_RLV)
        return torch.where(at_RL1, posterior_RLV, logits_RLV)


def asked(request: Request) -> bool:
    brought = request.ask(InLanguage)
    return brought is not None and brought.language.posterior


def class_weights(sweeps: Sweeps, line: Line, own_BXV: Tensor, class_BXV: Tensor) -> Tensor:
    """The log-probability of each class at open positions; where tokens are decoded, 0 for theirs. [B, X, C]"""
    open_BXC = log_sums(own_BXV, class_BXV, sweeps.languages.size_GC.shape[1])
    held_BXC = torch.full_like(open_BXC, NEVER).scatter(2, sweeps.classes_of(line.token_BX)[..., None], 0.0)
    return torch.where(line.open_BX[..., None], open_BXC, held_BXC)


def others(sweeps: Sweeps, line: Line, weight_BXC: Tensor) -> tuple[Tensor, Tensor]:
    """The log-probability that the other positions make an accepted line with each class at a position, less that of
    any accepted line; and whether there is any whose probability is above 0. [B, X, C], bool [B]

    Both directions go together, the second half of the D = 2 B lines from the last position on.
    """
    length, classes, states = *weight_BXC.shape[1:], sweeps.states + 1
    from_BE, class_BE, to_BE = sweeps.edge_BE3.unbind(-1)
    edges = from_BE, class_BE.clamp_max(classes - 1), to_BE
    from_BXE, class_BXE, to_BXE = (edge_BE[:, None].expand(-1, length, -1) for edge_BE in edges)
    weight_BXE = weight_BXC.gather(2, class_BXE)
    weight_DXE, outside_DX = (torch.cat((given, given.flip(1))) for given in (weight_BXE, line.outside_BX))
    source_DE, target_DE = torch.cat((from_BE, to_BE)), torch.cat((to_BE, from_BE))
    enter_BQ = weight_BXC.new_full((len(weight_BXC), states), NEVER)
    leave_BQ = enter_BQ.clone()
    leave_BQ[:, :-1] = torch.where(sweeps.distance_BQ <= line.room_B[:, None], 0.0, NEVER)
    found = [torch.cat((enter_BQ.scatter(1, line.state_B[:, None], 0.0), leave_BQ))]
    for x in range(length):
        moved_DQ = log_sums(found[-1].gather(1, source_DE) + weight_DXE[:, x], target_DE, states)
        found.append(torch.where(outside_DX[:, x, None], found[-1], moved_DQ))
    enter_BXQ, leave_BXQ = torch.stack(found, 1).chunk(2)
    whole_B11 = leave_BXQ[:, -1:].gather(2, line.state_B[:, None, None])
    through_BXE = enter_BXQ[:, :-1].gather(2, from_BXE) + leave_BXQ.flip(1)[:, 1:].gather(2, to_BXE)
    return log_sums(through_BXE - whole_B11, class_BXE, classes), whole_B11[:, 0, 0] > NEVER


def log_sums(value: Tensor, group: Tensor, groups: int) -> Tensor:
    """The log-sum-exp of each group along the last dimension; of none -inf."""
    shape = *value.shape[:-1], groups
    most = value.new_full(shape, NEVER).scatter_reduce(-1, group, value, "amax")
    most = most.masked_fill(most == NEVER, 0.0)
    return value.new_zeros(shape).scatter_add(-1, group, (value - most.gather(-1, group)).exp()).log() + most
