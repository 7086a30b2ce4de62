"""Classifier-free guidance: away from what the model would say without the prompt (LLaDA, arXiv:2502.09992).

l_u + (s + 1) (l - l_u), where l_u are the logits with every given token masked, and s the request's `guidance`. The
second branch is a second lane of the same forward, with keys and values in pages of its own, so every cache works as
it does for the first. Steps in which no row is guided have one lane a row.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dinfer.memory.kv import PagedAttend
from dinfer.recipe.recipe import Recipe
from dinfer.step.canvas import Status
from dinfer.step.contracts import Attend, Divided, Model, ModelSpec
from dinfer.step.state import BatchState


@dataclass(slots=True)
class Guided:
    """A `Model` for one step: its hidden states are those of both branches, side by side, its logits are guided."""

    model: Model
    spec: ModelSpec
    bare_BW: Tensor  # the step's tokens, the mask in place of those that are given
    scale_B: Tensor  # 0 in rows that want no guidance

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def device(self) -> torch.device:
        return self.model.device

    def embed(self, tokens_BW: Tensor) -> Tensor:
        return self.model.embed(tokens_BW)

    def forward(self, x_BWD: Tensor, attend: Attend) -> Tensor:
        """[B, W, D] -> [B, W, 2 D]; `attend` has the lanes of the second branch behind those of the first."""
        both = torch.cat((x_BWD, self.model.embed(self.bare_BW)))
        return torch.cat(self.model.forward(both, attend).chunk(2), -1)

    def mix(self, logits_BWV: Tensor) -> Tensor:
        return self.model.mix(logits_BWV)

    def logits(self, h_BLD: Tensor) -> Tensor:
        """[R, L, 2 D] -> [R, L, V]"""
        return self._guided(self.model.logits, h_BLD)

    def own_logits(self, h_BLD: Tensor) -> Tensor:
        """See `dinfer.step.model.Divided`: guidance looks at each token by itself. [R, L, 2 D] -> [R, L, own]"""
        assert isinstance(self.model, Divided)
        return self._guided(self.model.own_logits, h_BLD)

    def _guided(self, logits: Callable[[Tensor], Tensor], h_BLD: Tensor) -> Tensor:
        told_RLV, bare_RLV = logits(torch.cat(h_BLD.chunk(2, -1))).chunk(2)
        scale_R11 = self.scale_B.repeat_interleave(h_BLD.shape[0] // self.scale_B.shape[0])[:, None, None]
        wide = torch.promote_types(told_RLV.dtype, torch.float32)
        bare = bare_RLV.to(wide)
        guided_RLV = bare + (scale_R11.to(wide) + 1) * (told_RLV.to(wide) - bare)
        return torch.where(scale_R11 > 0, guided_RLV.to(told_RLV.dtype), told_RLV)


def guided(
    recipe: Recipe, state: BatchState, slot_B: Tensor, pos_BW: Tensor, place_BW: Tensor, tokens_BW: Tensor,
    status_BW: Tensor, interval_BW: tuple[Tensor, Tensor], pages: int,
) -> tuple[Model, PagedAttend]:  # fmt: skip
    """The model of a step in which some rows are guided, and its attention over both branches."""
    scale_B = state.options(recipe, slot_B, "sampling")["guidance"][:, 0]
    bare_BW = torch.where(status_BW == int(Status.GIVEN), recipe.model.spec.mask, tokens_BW)
    twin_BW = torch.where(scale_B[:, None] > 0, pos_BW, -1)
    places = torch.cat((place_BW, torch.where(scale_B[:, None] > 0, place_BW, -1)))
    start_BW, end_BW = (torch.cat((bound_BW, bound_BW)) for bound_BW in interval_BW)
    slots, positions = torch.cat((slot_B, state.kv.twin(slot_B))), torch.cat((pos_BW, twin_BW))
    return Guided(recipe.model, recipe.model.spec, bare_BW, scale_B), state.kv.attend(
        slots, positions, (start_BW, end_BW), pages, place_BW=places
    )
