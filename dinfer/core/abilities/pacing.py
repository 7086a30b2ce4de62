"""Decoders that rewrite or lengthen what is decoded, and who asks a decoder for more or less.

Iterations do, and caches that leave masks out.
"""

from dataclasses import dataclass, replace
from typing import Self

import torch

from dinfer.core.abilities.registry import ABILITIES
from dinfer.core.abilities.traits import HELD, NO_MASK, TEXT_BEHIND, sampled
from dinfer.core.kernels.canvas import rows_of
from dinfer.core.refusals import Refusal, Trait
from dinfer.core.step.ability import Ability, ByPart, Decision, Extra, Parts, Proposal, Request, Step, StepShape
from dinfer.core.step.cursors import CURSORS, BlockView, RowCursors
from dinfer.core.step.mixins import Adjusts, Edits, Grows, LeavesDecoded, LeavesMasks, Moves, Paces, Verifies


@ABILITIES.register("editing")
class Editing(ByPart[Edits]):
    """Lets a decoder rewrite what is decoded."""

    kind = Edits
    refusals = (
        Refusal("{decoder} judges decoded tokens by their logits, which {cache} does not compute.",
                cache=LeavesDecoded, decoder=Edits),
        Refusal("{decoder} lengthens the canvas as it decodes, so its block must span the whole generation.",
                iteration=Trait(lambda part: part.block > 0 or part.blocks > 1, "an iteration in blocks"),
                decoder=Grows),
        Refusal("{decoder} may rewrite stop tokens, so it cannot honour sampling.eos_last=1.",
                sampling=sampled("eos_last", "of 1"), decoder=Edits),
        Refusal("there is text behind a gap, and {decoder} moves tokens behind the prompt.",
                decoder=Moves, request=TEXT_BEHIND),
    )  # fmt: skip

    @classmethod
    def first_length(cls, recipe: Parts, request: Request) -> int:
        if not isinstance(recipe.decoder, Grows):
            return request.length
        given = max((behind for behind, open in enumerate(request.open, 1) if not open), default=0)
        initial = int(recipe.values(request.options)["decoder.initial"])
        return min(max(request.start + initial, given), request.length)

    def view(self, step: Step, lanes: RowCursors, view: BlockView) -> BlockView:
        return replace(view, edits=True)

    def moved(self, step: Step, made: Decision) -> None:
        if (length_B := made.proposal.edit.length_R) is None:
            return
        length_B = torch.where(step.lanes.live_B, length_B, step.lanes.length_B)
        step.lanes = replace(step.lanes, length_B=length_B)
        step.state.canvas.cursors_NC[:, CURSORS.index("length_B")].index_copy_(0, step.lanes.slot_B, length_B)


@ABILITIES.register("pacing", after=("editing",))
class Pacing(ByPart[Paces]):
    """Tells a decoder what the iteration asks for: a least confidence, and which blocks must progress."""

    kind = Paces

    def view(self, step: Step, lanes: RowCursors, view: BlockView) -> BlockView:
        floor_B, blocks = self.part.floor(lanes), step.shape.blocks
        must_BK = self.part.must_progress(lanes, view.masked_RL.view(-1, blocks, step.shape.block))
        return replace(
            view,
            floor_R=None if floor_B is None else rows_of(floor_B, blocks),
            must_progress_R=None if must_BK is None else must_BK.flatten(),
        )


@dataclass(frozen=True, slots=True)
class Leftmost(Extra):
    """Some row decodes the leftmost masks of each block alone."""


@ABILITIES.register("holding")
@dataclass(frozen=True)
class Holding(Ability):
    """Shows the decoder no statistics of masks that are held back, and commits none of them."""

    refusals = (
        Refusal("{cache} leaves masks out, and {decoder} would take what is not computed there for certain.",
                cache=LeavesMasks, decoder=Trait(lambda part: isinstance(part, Adjusts) or "entropy" in part.needs)),
        Refusal("sampling.leftmost holds masks back, and {decoder} drafts all of a block.",
                sampling=HELD, decoder=Verifies | Moves),
        Refusal("sampling.leftmost holds masks back, and this model has no mask token.", sampling=HELD, model=NO_MASK),
    )  # fmt: skip

    leaves: bool  # the cache leaves masks out
    limits: bool  # some row has a limit

    @classmethod
    def of(cls, recipe: Parts, shape: StepShape) -> Self | None:
        holding = cls(isinstance(recipe.cache, LeavesMasks), shape.extra(Leftmost) is not None)
        return holding if holding.leaves or holding.limits else None

    @classmethod
    def adds_for(cls, recipe: Parts, request: Request) -> Extra | None:
        return Leftmost() if recipe.sampling_of(request.options).get("leftmost", 0) else None

    def select(self, step: Step, made: Decision) -> Proposal | None:
        free_RL = torch.ones_like(made.view.masked_RL)
        if self.leaves and made.known.run is not None:
            free_RL = made.known.run.logit_place_RL >= 0
        if self.limits:
            options = step.state.options(step.recipe, made.lanes.slot_B, "sampling", step.shape.blocks)
            masked_RL, most_R1 = made.view.masked_RL, options["leftmost"]
            free_RL = free_RL & (~masked_RL | (most_R1 == 0) | (masked_RL.cumsum(-1) <= most_R1))
        if made.view.must_progress_R is not None:  # one of several blocks may have no mask that it could commit
            must_R = made.view.must_progress_R & (made.view.masked_RL & free_RL).any(-1)
            made.view = replace(made.view, must_progress_R=must_R)
        # The masks that are held back have 0, as if the model preferred the mask there: no commit is forced on them.
        held_RL = ~free_RL
        declined_RL = made.stats.declined_RL | held_RL
        stats = made.stats.each(lambda stat_RL: stat_RL.masked_fill(held_RL, 0))
        made.stats = replace(stats, mask_drawn_RL=declined_RL)
        proposal = step.recipe.decoder.select(made.stats, made.view, made.decoder_state)
        return replace(proposal, commit_RL=proposal.commit_RL & free_RL)
