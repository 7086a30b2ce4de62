"""Steps of a causal model some of whose rows are masks with weights of their own (tools/convert_ar --gaps).

Known tokens are fed as the base feeds them, causally. The masks of the active region take the adapter, and see all of
the region. So the row before the first mask predicts as the base does, and its token is decoded in any case: it would
be no other in a later step.
"""

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from dinfer.core.abilities.registry import ABILITIES
from dinfer.core.abilities.traits import GUIDED
from dinfer.core.kernels.attention import attention_interval
from dinfer.core.memory import Seen
from dinfer.core.refusals import Refusal, Trait
from dinfer.core.step.ability import Ability, Decision, Extra, Forward, Parts, Proposal, Request, Step, StepShape
from dinfer.core.step.cursors import Phase, RowCursors, Status
from dinfer.core.step.mixins import Branches, Verifies
from dinfer.core.terms.spec import ModelSpec
from dinfer.families.abilities.drafting import INEXACT, SPECULATES, Confirms, Undivided
from dinfer.families.gated import passing


@dataclass(frozen=True, slots=True, kw_only=True)
class GapSpec(ModelSpec):
    """A causal model whose masks see all of their region. Logits predict the next token."""


GAPS = Trait(lambda model: isinstance(model.spec, GapSpec), "a model with gaps")


@ABILITIES.register("gaps")
class Gaps(Ability):
    """Says what masks see, that they take the adapter, and that the first of them is always decoded."""

    refusals = (
        Refusal("keys of this model's masks are of one step, and {cache} may keep them.",
                cache=INEXACT, model=GAPS),
        Refusal("runtime.speculate has candidates that all see the same, and masks of this model see more than tokens.",
                model=GAPS, runtime=SPECULATES),
        Refusal("{iteration} runs versions that all see the same, and masks of this model see more than tokens.",
                model=GAPS, iteration=Branches),
        Refusal("{decoder} has a pass of its own, in which masks would not see what this model's masks see.",
                model=GAPS, decoder=Verifies),
        Refusal("this model's masks take an adapter, and guidance has a branch that does not.",
                model=GAPS, sampling=GUIDED),
    )  # fmt: skip

    @classmethod
    def of(cls, recipe: Parts, shape: StepShape) -> Self | None:
        there = isinstance(recipe.model.spec, GapSpec) and not isinstance(recipe.decoder, Confirms)
        return cls() if there and shape.phase != Phase.PREFILL else None

    @classmethod
    def adds_for(cls, recipe: Parts, request: Request) -> Extra | None:
        return Undivided() if isinstance(recipe.model.spec, GapSpec) else None

    def seen(self, step: Step, lanes: RowCursors, place_BW: Tensor) -> Seen | None:
        start_BW, end_BW = attention_interval(place_BW, None, lanes.length_B, 1)
        status_BW = step.state.canvas.gather(lanes.slot_B, place_BW)[1]
        stop_B1 = lanes.end_B[:, None] - step.recipe.model.spec.shift  # the last position is read, and not fed
        fills_BW = (status_BW == int(Status.OPEN)) & (place_BW >= 0) & (place_BW < stop_B1)
        return Seen((start_BW, torch.where(fills_BW, stop_B1, end_BW)))

    def feed(self, step: Step, run: Forward) -> None:
        masks_BW = (run.status_BW == int(Status.OPEN)) & (run.pos_BW >= 0)
        run.model = passing(step.recipe.model, masks_BW) or run.model

    def select(self, step: Step, made: Decision) -> Proposal | None:
        masked_RL, stats = made.view.masked_RL, made.stats
        first_RL = masked_RL & (masked_RL.cumsum(-1) == 1)
        sure = replace(stats, confidence_RL=stats.confidence_RL.masked_fill(first_RL, 1.0))
        if stats.entropy_RL is not None:
            sure = replace(sure, entropy_RL=stats.entropy_RL.masked_fill(first_RL, 0.0))
        if stats.margin_RL is not None:
            sure = replace(sure, margin_RL=stats.margin_RL.masked_fill(first_RL, 1.0))
        return step.recipe.decoder.select(sure, made.view, made.decoder_state)
