"""A second pass of a denoise step, which checks a draft as if the model wrote token by token (S2D2).

The draft is what the block's pass proposes for its masks. The verification computes the block twice: filled with the
draft, and as masks at the same positions. A token sees what stands before it, a mask the tokens before its position and
itself. That is what a model of block size 1 sees. So one pass gives the logits of every token of the draft, given the
tokens before it.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from dinfer.core.abilities.registry import ABILITIES
from dinfer.core.abilities.traits import GUIDED, KEEPS_KEYS
from dinfer.core.kernels.canvas import span
from dinfer.core.memory import Seen
from dinfer.core.refusals import Refusal, Trait
from dinfer.core.step.ability import ByPart, Decision, Known, Parts, Proposal, Step
from dinfer.core.step.cursors import Phase, Status
from dinfer.core.step.mixins import Verifies, scores_of
from dinfer.core.step.shape import HostFacts

LOOKS_FURTHER = Trait(lambda iteration: iteration.blocks > 1 or scores_of(iteration) != "none")


@ABILITIES.register("verification")
class Verification(ByPart[Verifies]):
    """Steps whose draft a second pass checks before anything is committed, and these passes."""

    whole_logits = True
    kind = Verifies
    refusals = (
        Refusal("{decoder} verifies the draft of one block, fed as tokens and masks.",
                decoder=Verifies, iteration=LOOKS_FURTHER),
        Refusal("{decoder} writes the keys of its draft, and {cache} may keep them.",
                decoder=Verifies, cache=KEEPS_KEYS),
        Refusal("{decoder} needs further lanes for one branch, and guidance takes two.",
                sampling=GUIDED, decoder=Verifies),
    )  # fmt: skip

    @classmethod
    def facts(cls, recipe: Parts) -> HostFacts:
        return HostFacts(phases=(Phase.VERIFY,), page_sets=1) if isinstance(recipe.decoder, Verifies) else HostFacts()

    def decisions(self, step: Step) -> Iterator[Known] | None:
        return iter([Known(logits_RLV=verified(step))]) if step.shape.phase == Phase.VERIFY else None

    def select(self, step: Step, made: Decision) -> Proposal | None:
        if step.shape.phase != Phase.VERIFY:
            return None
        return self.part.verify(made.adjusted_RLV, made.view, made.decoder_state)

    def proposed(self, step: Step, made: Decision) -> None:
        if made.proposal.verify_R is None:
            return
        lanes = step.lanes
        verify_B = made.proposal.verify_R & (made.stats.finite_RL | ~made.view.masked_RL).all(-1)
        waits_B = lanes.live_B & verify_B
        step.state.decoder.store(made.row_R, made.decoder_state, waits_B)
        # The step counts in lanes whose draft is to be verified. They take no part in the rest of it.
        step.state.canvas.store(
            replace(
                lanes,
                live_B=waits_B,
                phase_B=torch.full_like(lanes.phase_B, int(Phase.VERIFY)),
                forwards_B=lanes.forwards_B + 1,
                steps_B=lanes.steps_B + 1,
                refreshes_B=lanes.refreshes_B + step.refreshes,
            )
        )
        step.narrow(lanes.live_B & ~waits_B)


def verified(step: Step) -> Tensor:
    """The logits of each position of the active block, given what stands before it and the draft. [R, L, V]"""
    model, state, shape, lanes = step.recipe.model, step.state, step.shape, step.lanes
    slot_B, pos_BL = lanes.slot_B, span(lanes.start_B, lanes.end_B, shape.block)
    pos_BL = torch.where(lanes.live_B[:, None], pos_BL, -1)
    tokens_BL, status_BL = state.canvas.gather(slot_B, pos_BL)
    draft_BL = state.decoder.rows["draft"].index_select(0, state.block_rows(slot_B, lanes.block_B, 1))
    tokens_BL = torch.where(status_BL == int(Status.OPEN), draft_BL, tokens_BL)
    pos_BW = pos_BL.repeat(1, 2)
    end_BW = torch.cat(((pos_BL + 1).clamp_min(1), pos_BL.clamp_min(0)), 1)
    interval_BW = torch.zeros_like(end_BW), end_BW
    attend = state.kv.attend(slot_B, pos_BW, Seen(interval_BW), shape.pages, self_keys=shape.block)
    masks_BL = torch.full_like(tokens_BL, model.spec.mask)
    h_BWD = model.forward(model.embed(torch.cat((tokens_BL, masks_BL), 1)), attend)
    return model.logits(h_BWD[:, shape.block :])
