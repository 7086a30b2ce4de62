"""Drafts that stand at open positions in the next forward, which verifies them (I-DLM, Nemotron-Labs-Diffusion)."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dinfer.core.abilities.registry import ABILITIES
from dinfer.core.abilities.traits import GUIDED, HELD, TEXT_BEHIND
from dinfer.core.memory import PagedAttend
from dinfer.core.refusals import Refusal, Trait
from dinfer.core.step.ability import ByPart, Decision, Extra, Forward, Step
from dinfer.core.step.contracts import State
from dinfer.core.step.cursors import BlockView, Phase, Status
from dinfer.core.step.mixins import MIXINS, Drafts, KeepsNothing, LeavesMasks, Slides
from dinfer.families.gated import passing

INEXACT = Trait(
    lambda cache: (
        not isinstance(cache, KeepsNothing) and (isinstance(cache, LeavesMasks) or not cache.plan(Phase.WINDOW).keeps)
    )
)
SPECULATES = Trait(lambda runtime: runtime.speculate != 0, "`runtime.speculate`", instead="runtime.speculate=0")


@dataclass(frozen=True, slots=True)
class Undivided(Extra):
    """Rows whose positions depend on each other, so that a row takes one lane."""

    divides = False


class Confirms(Drafts, ABC):
    """A decoder whose drafts are fed at open positions, and confirmed by that forward."""

    @abstractmethod
    def confirm(self, logits_RLV: Tensor, view: BlockView, state: State, heat_R1: Tensor) -> None:
        """Sees the model's logits, of the forward that was fed the drafts, before any draw; changes `state` in place.

        `heat_R1`: the temperature of the sampling, float64; 0: the most likely token is taken.
        """


MIXINS["decoder"] += [Confirms]


@ABILITIES.register("drafting")
class Drafting(ByPart[Confirms]):
    """Feeds a decoder's drafts, and keeps the keys of those that became tokens."""

    kind = Confirms
    whole_logits = True
    refusals = (
        Refusal("{decoder} feeds drafts from the first open position on, where the active region must begin.",
                decoder=Confirms, iteration=Trait(lambda iteration: not isinstance(iteration, Slides))),
        Refusal("{decoder} writes the keys of its drafts, and {cache} may keep them.",
                cache=INEXACT, decoder=Confirms),
        Refusal("runtime.speculate has no candidates for drafts of {decoder}.",
                decoder=Confirms, runtime=SPECULATES),
        Refusal("{decoder} feeds drafts, and guidance has a branch that it does not feed.",
                decoder=Confirms, sampling=GUIDED),
        Refusal("sampling.leftmost holds masks back, and {decoder} verifies all of its drafts.",
                decoder=Confirms, sampling=HELD),
        Refusal("{decoder} verifies drafts from left to right, so no text may stand behind a gap.",
                decoder=Confirms, request=TEXT_BEHIND),
    )  # fmt: skip

    def prepare(self, step: Step, run: Forward) -> PagedAttend | None:
        if step.shape.phase == Phase.PREFILL:
            return None
        lanes, state = step.lanes, step.state
        draft_BL = state.decoder.rows["draft"].index_select(0, state.block_rows(lanes.slot_B, lanes.block_B, 1))
        place_BW = run.pos_BW - lanes.start_B[:, None]
        open_BW = (place_BW >= 0) & (place_BW < draft_BL.shape[1]) & (run.status_BW == int(Status.OPEN))
        fed_BW = draft_BL.gather(1, place_BW.clamp(0, draft_BL.shape[1] - 1))
        run.tokens_BW = torch.where(open_BW & (fed_BW >= 0), fed_BW, run.tokens_BW)
        return None

    def feed(self, step: Step, run: Forward) -> None:
        if step.shape.phase != Phase.PREFILL:
            open_BW = (run.status_BW == int(Status.OPEN)) & (run.pos_BW >= 0)
            masks_BW = open_BW & (run.tokens_BW == step.recipe.model.spec.mask)
            run.model = passing(step.recipe.model, masks_BW) or run.model

    def adjust(self, step: Step, view: BlockView, logits_RLV: Tensor, state: State) -> Tensor:
        options = step.state.options(step.recipe, step.lanes.slot_B, "sampling", step.shape.blocks)
        none_R1 = torch.zeros_like(view.step_R, dtype=torch.float64)[:, None]
        self.part.confirm(logits_RLV, view, state, options.get("temperature", none_R1))
        return logits_RLV

    def moved(self, step: Step, made: Decision) -> None:
        # Accepted drafts had keys of their own. The last new token was a prediction, and has none yet.
        lanes, shift = step.lanes, step.recipe.model.spec.shift
        step.lanes = replace(lanes, kept_B=torch.where(made.moved.done_B, lanes.kept_B, lanes.start_B - shift))
