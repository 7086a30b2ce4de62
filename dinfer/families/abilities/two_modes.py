"""Steps of a model that reads blocks of masks bidirectionally and all else causally (Nemotron-Labs-Diffusion).

A row is in one of two modes. Where masks before the last position of its active region are open and have no draft, the
token before the region and the region's masks see each other, and each row of logits is of its own position. Else the
pass is causal: its rows predict the next token, the last position of the region is decoded, or drafts are verified.
"""

from dataclasses import replace
from typing import Self

import torch
from torch import Tensor

from dinfer.core.abilities.registry import ABILITIES
from dinfer.core.abilities.traits import GUIDED, HELD
from dinfer.core.kernels.attention import attention_interval
from dinfer.core.kernels.canvas import span
from dinfer.core.memory import Seen
from dinfer.core.refusals import Refusal, Trait
from dinfer.core.step.ability import Ability, Decision, Extra, Forward, Parts, Proposal, Request, Step, StepShape
from dinfer.core.step.cursors import Phase, RowCursors, Status
from dinfer.core.step.mixins import Adjusts, Edits, Slides
from dinfer.core.step.window import Window
from dinfer.families.abilities.drafting import INEXACT, SPECULATES, Confirms, Undivided
from dinfer.families.abilities.encoder import encoder_intervals
from dinfer.families.gated import passing
from dinfer.families.nemotron import TwoModeSpec


class Seeds:
    """An iteration whose regions follow a decoded token, and whose last position a causal pass decodes."""


TWO_MODES = Trait(lambda model: isinstance(model.spec, TwoModeSpec), "a model of the family `nemotron`")
ONE_MODE = Trait(lambda model: not isinstance(model.spec, TwoModeSpec), "a model of another family than `nemotron`")
READS_ALL = Trait(lambda decoder: isinstance(decoder, Adjusts | Edits) or "entropy" in decoder.needs)
OTHER_BLOCKS = Trait(lambda iteration: not isinstance(iteration, Seeds) and iteration.block != 1)


@ABILITIES.register("two_modes", after=("drafting",))
class TwoModes(Ability):
    """Chooses the mode of each row, what its positions see, and which row of logits decodes which position."""

    whole_logits = True
    refusals = (
        Refusal("{iteration} drafts, which {decoder} does not.",
                iteration=Trait(lambda part: isinstance(part, Seeds) and isinstance(part, Slides)),
                decoder=Trait(lambda part: not isinstance(part, Confirms))),
        Refusal("this model decodes several positions at once behind a token of its causal pass, which {iteration} "
                "does not know.",
                model=TWO_MODES, iteration=OTHER_BLOCKS),
        Refusal("{iteration} needs a model that reads blocks of masks bidirectionally and all else causally.",
                model=ONE_MODE, iteration=Seeds),
        Refusal("{decoder} reads all of a block, and in a region of {iteration} a position has no logits of its own.",
                iteration=Seeds, decoder=READS_ALL),
        Refusal("{iteration} chooses by what is open how keys are computed, and {cache} may keep them.",
                cache=INEXACT, iteration=Seeds),
        Refusal("runtime.speculate has no candidates for the passes of {iteration}.",
                iteration=Seeds, runtime=SPECULATES),
        Refusal("sampling.leftmost holds masks back, as {iteration} does itself.", iteration=Seeds, sampling=HELD),
        Refusal("{iteration} has passes of its own, and guidance a branch that they do not have.",
                iteration=Seeds, sampling=GUIDED),
    )  # fmt: skip

    @classmethod
    def of(cls, recipe: Parts, shape: StepShape) -> Self | None:
        there = isinstance(recipe.model.spec, TwoModeSpec) and isinstance(recipe.iteration, Seeds)
        return cls() if there and shape.phase != Phase.PREFILL else None

    @classmethod
    def adds_for(cls, recipe: Parts, request: Request) -> Extra | None:
        return Undivided() if isinstance(recipe.iteration, Seeds) else None

    def begin(self, step: Step) -> None:
        step.notes[TwoModes] = bidirectional(step)

    def window(self, step: Step, window: Window) -> Window:
        own_B = step.notes[TwoModes].repeat_interleave(window.logit_place_RL.shape[0] // step.shape.lanes)
        place_RL = (window.logit_place_RL + own_B[:, None]).clamp_max(step.shape.width - 1)
        return replace(window, logit_place_RL=torch.where(window.logit_place_RL < 0, -1, place_RL))

    def seen(self, step: Step, lanes: RowCursors, place_BW: Tensor) -> Seen | None:
        causal_BW = attention_interval(place_BW, None, lanes.length_B, 1)
        _, both_BW = encoder_intervals(place_BW, lanes.start_B - 1, lanes.end_B - 1)
        own_B1 = step.notes[TwoModes][:, None]
        start_BW, end_BW = (torch.where(own_B1, *pair) for pair in zip(both_BW, causal_BW, strict=True))
        return Seen((start_BW, end_BW))

    def feed(self, step: Step, run: Forward) -> None:
        if isinstance(step.recipe.decoder, Confirms):
            block_BW = run.pos_BW >= step.lanes.start_B[:, None] - 1
            rows_BW = step.notes[TwoModes][:, None] & block_BW
            run.model = passing(step.recipe.model, rows_BW) or run.model

    def select(self, step: Step, made: Decision) -> Proposal | None:
        decoder, view, own_B = step.recipe.decoder, made.view, step.notes[TwoModes]
        if isinstance(decoder, Confirms):
            made.decoder_state["drafting"].copy_(own_B)
            return None
        last_RL = view.pos_RL == made.lanes.end_B[:, None] - 1
        free_RL = last_RL ^ own_B[:, None]
        stats = made.stats.each(lambda stat_RL: stat_RL.masked_fill(~free_RL, 0))
        made.stats = replace(stats, mask_drawn_RL=made.stats.declined_RL | ~free_RL)
        proposal = decoder.select(made.stats, view, made.decoder_state)
        return replace(proposal, commit_RL=proposal.commit_RL & free_RL)

    def moved(self, step: Step, made: Decision) -> None:
        if isinstance(step.recipe.decoder, Confirms):
            return
        # A causal pass leaves the keys of all that is decoded before the last token.
        lanes, own_B = step.lanes, step.notes[TwoModes]
        step.lanes = replace(lanes, kept_B=torch.where(own_B | made.moved.done_B, lanes.kept_B, lanes.start_B - 1))


def bidirectional(step: Step) -> Tensor:
    """Rows in which masks before the last position of the region are open and have no draft. bool [B]"""
    lanes, state = step.lanes, step.state
    pos_BX = span(lanes.start_B, lanes.end_B, step.shape.block)
    open_BX = (state.canvas.gather(lanes.slot_B, pos_BX)[1] == int(Status.OPEN)) & (pos_BX >= 0)
    if isinstance(step.recipe.decoder, Confirms):
        draft_BX = state.decoder.rows["draft"].index_select(0, state.block_rows(lanes.slot_B, lanes.block_B, 1))
        # The first pass of a request, over the prompt, gives its first token.
        open_BX = open_BX & (draft_BX < 0) & (lanes.steps_B > 0)[:, None]
    return (open_BX & (pos_BX < lanes.end_B[:, None] - 1)).any(-1)
