"""Drafts that stand at open positions in the next forward, which verifies them (I-DLM, Nemotron-Labs-Diffusion).

A decoder may ask for versions of its drafts: lanes beside a row's own, with keys of their own, of which the first has
no drafts, the next the first draft alone, and so on, and masks in place of the others. Whichever draft is refused, one
of them holds the masks right behind those before it, and they draft for the next step (arXiv:2507.11851, quadratic
decoding). Tokens are those of the row's own lane.

Shape suffixes beside those of `dinfer.core.step.contracts`: X positions of the active region, C versions, the row's own
lane first, G = C * B lanes of the forward.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dinfer.core.abilities.registry import ABILITIES
from dinfer.core.abilities.traits import GUIDED, HELD, TEXT_BEHIND
from dinfer.core.kernels.canvas import span
from dinfer.core.memory import PagedAttend
from dinfer.core.refusals import Refusal, Trait
from dinfer.core.step.ability import ByPart, Decision, Extra, Forward, Known, Parts, Step
from dinfer.core.step.contracts import State
from dinfer.core.step.cursors import BlockView, Phase, Status
from dinfer.core.step.mixins import MIXINS, Drafts, KeepsNothing, LeavesMasks, Slides
from dinfer.core.step.scores import proposed_tokens
from dinfer.core.step.shape import HostFacts
from dinfer.core.step.step import block_view, forward
from dinfer.core.step.versions import States, logits_of_versions
from dinfer.core.terms.stats import TokenStats
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

    @property
    def versions(self) -> int:
        """How many versions of its drafts it asks for: those with 0, 1, ... drafts."""
        return 0

    def confirmed(self, stats: TokenStats, state: State) -> Tensor:
        """How many drafts become tokens, if it asks for versions. int64 [R, 1]"""
        raise NotImplementedError

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

    @classmethod
    def facts(cls, recipe: Parts) -> HostFacts:
        return HostFacts(versions=recipe.decoder.versions if isinstance(recipe.decoder, Confirms) else 0)

    def prepare(self, step: Step, run: Forward) -> PagedAttend | None:
        if step.shape.phase == Phase.PREFILL:
            return None
        lanes, state, count = step.lanes, step.state, step.shape.versions
        draft_BX = state.decoder.rows["draft"].index_select(0, state.block_rows(lanes.slot_B, lanes.block_B, 1))
        pos_BX = span(lanes.start_B, lanes.end_B, draft_BX.shape[1])
        tokens_BX, status_BX = state.canvas.gather(lanes.slot_B, pos_BX)
        feeds_BX = (status_BX == int(Status.OPEN)) & (draft_BX >= 0)
        place_X = torch.arange(draft_BX.shape[1], device=draft_BX.device)
        most = [len(place_X), *range(count)]  # drafts of each version
        fed = [torch.where(feeds_BX & (place_X < drafts), draft_BX, tokens_BX) for drafts in most]
        states = States(
            lanes.slot_B, lanes.live_B, lanes.start_B, lanes.end_B, lanes.length_B, pos_BX, torch.stack(fed)
        )
        run.tokens_BW = states.windows(run.pos_BW, run.tokens_BW)
        if not count:
            return None
        return states.attend(state.kv, run.pos_BW, run.place_BW, [run.seen[0]] * (count + 1), step.shape.pages)

    def feed(self, step: Step, run: Forward) -> None:
        if step.shape.phase != Phase.PREFILL:
            open_BW = (run.status_BW == int(Status.OPEN)) & (run.pos_BW >= 0)
            open_GW = open_BW.repeat(step.shape.versions + 1, 1)
            masks_GW = open_GW & (run.tokens_BW == step.recipe.model.spec.mask)
            run.model = passing(step.recipe.model, masks_GW) or run.model

    def decisions(self, step: Step) -> Iterator[Known] | None:
        return self._confirmed(step) if step.shape.versions else None

    def _confirmed(self, step: Step) -> Iterator[Known]:
        """The logits of the row's own lane up to the token behind the last draft that is confirmed; further ones are
        those of the version that has no draft but these."""
        run, lanes, state = forward(step), step.lanes, step.state
        logits_CRLV = logits_of_versions(step, run, step.shape.versions + 1)
        decoder_state = state.decoder.lanes(state.block_rows(lanes.slot_B, lanes.block_B, step.shape.blocks))
        stats, *_ = proposed_tokens(step, lanes, block_view(step, lanes), logits_CRLV[0].clone(), decoder_state)
        count_R1 = self.part.confirmed(stats, decoder_state)
        all_R1 = count_R1 >= (decoder_state["draft"] >= 0).sum(-1, keepdim=True)
        version_R1 = torch.where(all_R1, 0, count_R1 + 1)
        place_L = torch.arange(logits_CRLV.shape[2], device=count_R1.device)
        # From here on there are no others, also for who looks at what was fed.
        decoder_state["draft"] = torch.where(place_L < count_R1, decoder_state["draft"], -1)
        rows_R = state.block_rows(lanes.slot_B, lanes.block_B, step.shape.blocks)
        state.decoder.store(rows_R, decoder_state, lanes.live_B)
        version_RL = torch.where(place_L > count_R1, version_R1, 0)
        row_R1 = torch.arange(len(count_R1), device=count_R1.device)[:, None]
        yield Known(logits_RLV=logits_CRLV[version_RL, row_R1, place_L])

    def adjust(self, step: Step, view: BlockView, logits_RLV: Tensor, state: State) -> Tensor:
        options = step.state.options(step.recipe, step.lanes.slot_B, "sampling", step.shape.blocks)
        none_R1 = torch.zeros_like(view.step_R, dtype=torch.float64)[:, None]
        self.part.confirm(logits_RLV, view, state, options.get("temperature", none_R1))
        return logits_RLV

    def proposed(self, step: Step, made: Decision) -> None:
        # Accepted drafts had keys of their own. The last new token was a prediction, and has none yet, like all that a
        # form writes behind it.
        commit_BL = (made.proposal.commit_RL & made.view.masked_RL).view(step.shape.lanes, -1)
        place_L = torch.arange(1, commit_BL.shape[1] + 1, device=commit_BL.device)
        step.notes[Drafting] = made.lanes.start_B + (commit_BL * place_L).amax(-1) - step.recipe.model.spec.shift

    def moved(self, step: Step, made: Decision) -> None:
        lanes, shift = step.lanes, step.recipe.model.spec.shift
        kept_B = torch.minimum(lanes.start_B - shift, step.notes[Drafting])
        step.lanes = replace(lanes, kept_B=torch.where(made.moved.done_B, lanes.kept_B, kept_B))
