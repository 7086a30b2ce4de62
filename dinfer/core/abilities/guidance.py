"""Classifier-free guidance: away from what the model would say without the prompt (LLaDA, arXiv:2502.09992).

l_u + (s + 1) (l - l_u), where l_u are the logits with every given token masked, and s the request's `guidance`. The
second branch is a second lane of the same forward, with keys and values in pages of its own, so every cache works as
it does for the first. Steps in which no row is guided have one lane a row.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dinfer.core.abilities.registry import ABILITIES
from dinfer.core.abilities.traits import GUIDED, NO_MASK, REMEMBERS
from dinfer.core.memory import Seen
from dinfer.core.refusals import Refusal
from dinfer.core.step.ability import ByExtra, Extra, Forward, Parts, Request, Step
from dinfer.core.step.cursors import Status
from dinfer.core.step.model import Attend, Network, OwnLogits


@dataclass(frozen=True, slots=True)
class Guided(Extra):
    """Some row has a second branch, without the prompt."""

    whole_logits = True
    prefills = True
    divides = False


@dataclass(slots=True)
class GuidedModel:
    """The network of one step: its hidden states are those of both branches, side by side, its logits are guided."""

    model: Network
    bare_BW: Tensor  # the step's tokens, the mask in place of those that are given
    scale_B: Tensor  # 0 in rows that want no guidance

    def embed(self, tokens_BW: Tensor) -> Tensor:
        return self.model.embed(tokens_BW)

    def forward(self, x_BWD: Tensor, attend: Attend) -> Tensor:
        """[B, W, D] -> [B, W, 2 D]; `attend` has the lanes of the second branch behind those of the first."""
        both = torch.cat((x_BWD, self.model.embed(self.bare_BW)))
        return torch.cat(self.model.forward(both, attend).chunk(2), -1)

    def logits(self, h_BLD: Tensor) -> Tensor:
        """[R, L, 2 D] -> [R, L, V]"""
        return self._guided(self.model.logits, h_BLD)

    def own_logits(self, h_BLD: Tensor) -> Tensor:
        """See `OwnLogits`: guidance looks at each token by itself. [R, L, 2 D] -> [R, L, own]"""
        assert isinstance(self.model, OwnLogits)
        return self._guided(self.model.own_logits, h_BLD)

    def _guided(self, logits: Callable[[Tensor], Tensor], h_BLD: Tensor) -> Tensor:
        told_RLV, bare_RLV = logits(torch.cat(h_BLD.chunk(2, -1))).chunk(2)
        scale_R11 = self.scale_B.repeat_interleave(h_BLD.shape[0] // self.scale_B.shape[0])[:, None, None]
        wide = torch.promote_types(told_RLV.dtype, torch.float32)
        bare = bare_RLV.to(wide)
        guided_RLV = bare + (scale_R11.to(wide) + 1) * (told_RLV.to(wide) - bare)
        return torch.where(scale_R11 > 0, guided_RLV.to(told_RLV.dtype), told_RLV)


@ABILITIES.register("guidance", after=("feeding",))
class Guidance(ByExtra[Guided]):
    """Steps in which some rows are guided: the model runs on both branches."""

    refusals = (
        Refusal("sampling.guidance masks the prompt in a second branch, and this model has no mask token.",
                sampling=GUIDED, model=NO_MASK),
        Refusal("{iteration} feeds what it expects at the masks, and a branch without the prompt would expect others.",
                sampling=GUIDED, iteration=REMEMBERS),
    )  # fmt: skip

    kind = Guided

    @classmethod
    def adds_for(cls, recipe: Parts, request: Request) -> Extra | None:
        return Guided() if recipe.sampling_of(request.options).get("guidance", 0) > 0 else None

    def feed(self, step: Step, run: Forward) -> None:
        kv, slot_B = step.state.kv, step.lanes.slot_B
        scale_B = step.state.options(step.recipe, slot_B, "sampling")["guidance"][:, 0]
        bare_BW = torch.where(run.status_BW == int(Status.GIVEN), step.recipe.model.spec.mask, run.tokens_BW)
        twin_BW = torch.where(scale_B[:, None] > 0, run.pos_BW, -1)
        places = torch.cat((run.place_BW, torch.where(scale_B[:, None] > 0, run.place_BW, -1)))
        start_BW, end_BW = (torch.cat((bound_BW, bound_BW)) for bound_BW in run.seen[0])
        slots, positions = torch.cat((slot_B, kv.twin(slot_B))), torch.cat((run.pos_BW, twin_BW))
        run.fed = kv.attend(slots, positions, Seen((start_BW, end_BW)), step.shape.pages, place_BW=places)
        run.model = GuidedModel(run.model, bare_BW, scale_B)
