"""Drafts that stand at open positions in the next forward, which verifies them (I-DLM, Nemotron-Labs-Diffusion).

A decoder may ask for versions of its drafts: lanes beside a row's own, with keys of their own. Each has a path of
drafts from the first open position on and masks behind it; the row's own lane then has masks alone. Of the paths that
the model confirms to the end the longest is chosen, its keys become those of the row, and the masks right behind it
draft for the next step: a tree of drafts (arXiv:2401.10774) with masks at every node (arXiv:2507.11851).

Shape suffixes beside those of `dinfer.core.step.contracts`: X positions of the active region, C versions, the row's own
lane first, D drafts of a path, G = C * B lanes of the forward.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dinfer.core.abilities.registry import ABILITIES
from dinfer.core.abilities.traits import GUIDED, HELD, TEXT_BEHIND
from dinfer.core.kernels.canvas import store_rows
from dinfer.core.kernels.dispatch import triton, use_triton
from dinfer.core.memory import PagedAttend
from dinfer.core.provided import provided
from dinfer.core.refusals import Refusal, Trait
from dinfer.core.step.ability import ByPart, Decision, Extra, Forward, Known, Parts, Step, StepShape
from dinfer.core.step.contracts import State
from dinfer.core.step.cursors import BlockView, Phase, RowCursors, Status
from dinfer.core.step.mixins import MIXINS, Drafts, KeepsNothing, LeavesMasks, Slides
from dinfer.core.step.scores import needed_vocabulary, statistics, token_counts
from dinfer.core.step.shape import HostFacts, Planned, Sampled, Versioned
from dinfer.core.step.step import block_view, forward
from dinfer.core.step.versions import States, adopt, logits_of_versions
from dinfer.families.gated import passing

INEXACT = Trait(
    lambda cache: (
        not isinstance(cache, KeepsNothing) and (isinstance(cache, LeavesMasks) or not cache.plan(Phase.WINDOW).keeps)
    )
)
# Lanes of a step, up to which paths are tried: they cost little where a step waits for launches. A form leaves few
# paths that an answer may go on with, so three of them are worth more than what they cost.
LANES, HELD_LANES = 16, 64
SPECULATES = Trait(lambda runtime: runtime.speculate != 0, "`runtime.speculate`", instead="runtime.speculate=0")


@dataclass(frozen=True, slots=True)
class Undivided(Extra):
    """Rows whose positions depend on each other, so that a row takes one lane."""

    divides = False


class Idle:
    """The note of which rows of a forward nobody reads. bool [B, W]"""


class Confirms(Drafts, ABC):
    """A decoder whose drafts are fed at open positions, and confirmed by that forward."""

    @property
    def versions(self) -> int:
        """The most paths that it asks for. Its state "paths", int64 [versions, D], has them, the likeliest first; -1:
        no draft."""
        return 0

    @property
    def looks(self) -> int | None:
        """Of how many positions, from the first open one on, a row without drafts reads the logits; None: of all."""
        return None

    def redraft(self, logits_RLV: Tensor, first_R: Tensor, state: State) -> None:
        """Changes its paths, if it asks for versions. `first_R`: where in this region the next one begins."""
        raise NotImplementedError

    def within(self, find: Callable[[int, int, int], Any], state: State) -> None:
        """Changes the drafts of rows in languages.

        `find`: of a tree so wide at first (third), so many paths (first) of so many drafts (second) that answers may go
        on with, see `dinfer.structure.paths.Paths`; None: no row is in a language.
        """

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

    @classmethod
    def adds(cls, recipe: Parts, shape: StepShape, planned: Planned) -> Extra | None:
        if not isinstance(recipe.decoder, Confirms):
            return None
        # Powers of two, so that not each number of rows has a graph of its own.
        held = provided("in_languages")
        most = HELD_LANES if held is not None and held(shape) else LANES
        room, rows = planned.positions // max(shape.width, 1), max(planned.rows, 1)
        lanes = 1 << (max(min(min(most, room) // rows, shape.versions + 1), 1).bit_length() - 1)
        return Versioned(lanes - 1) if shape.versions else None

    def prepare(self, step: Step, run: Forward) -> PagedAttend | None:
        if step.shape.phase == Phase.PREFILL:
            return None
        lanes, state, count = step.lanes, step.state, step.shape.versions
        row_B, mask = state.block_rows(lanes.slot_B, lanes.block_B, 1), step.recipe.model.spec.mask
        drafts_NCX = state.decoder.rows["paths"] if count else state.decoder.rows["draft"][:, None]
        feeds = triton("drafts").feed if use_triton(run.pos_BW, "canvas") else fed
        made = feeds(run, lanes, row_B, drafts_NCX, count, mask, int(Status.OPEN))
        tokens_BW, (run.tokens_BW, step.notes[Confirms]) = run.tokens_BW, made
        if not count:
            return self._short(step, run, drafts_NCX[:, 0].index_select(0, row_B))
        states = States(
            lanes.slot_B, lanes.live_B, lanes.start_B, lanes.end_B, lanes.length_B, run.pos_BW,
            run.tokens_BW.view(count + 1, *tokens_BW.shape),
        )  # fmt: skip
        return states.attend(state.kv, run.pos_BW, run.place_BW, [run.seen[0]] * (count + 1), step.shape.pages)

    def _short(self, step: Step, run: Forward, draft_BX: Tensor) -> PagedAttend | None:
        """The attention without masks that draft behind what a row without drafts may keep; None: as it is.

        On a card the width of a step is what takes time, and reports show what is offered at every mask.
        """
        looks, lanes = self.part.looks, step.lanes
        if looks is None or step.shape.extras or use_triton(run.pos_BW, "canvas"):
            return None
        behind_BW = run.pos_BW - lanes.start_B[:, None] >= looks - step.recipe.model.spec.shift
        idle_BW = step.notes[Idle] = behind_BW & (draft_BX[:, :1] < 0)
        run.pos_BW, step.notes[Confirms] = run.pos_BW.masked_fill(idle_BW, -1), step.notes[Confirms] & ~idle_BW
        place_BW = run.place_BW.masked_fill(idle_BW, -1)
        return step.state.kv.attend(lanes.slot_B, run.pos_BW, run.seen, step.shape.pages, place_BW=place_BW)

    def ran(self, step: Step, run: Forward) -> None:
        if (idle_BW := step.notes.get(Idle)) is not None:  # kernels leave out rows of zeros
            run.h_BWD.masked_fill_(idle_BW[..., None], 0)

    def feed(self, step: Step, run: Forward) -> None:
        if step.shape.phase != Phase.PREFILL:
            run.model = passing(step.recipe.model, step.notes[Confirms]) or run.model

    def decisions(self, step: Step) -> Iterator[Known] | None:
        return self._confirmed(step) if step.shape.versions else None

    def _confirmed(self, step: Step) -> Iterator[Known]:
        """The logits of the version with the longest path that is confirmed to its end."""
        run, lanes, state, count = forward(step), step.lanes, step.state, step.shape.versions + 1
        row_R = state.block_rows(lanes.slot_B, lanes.block_B, step.shape.blocks)
        logits_CRLV = logits_of_versions(step, run, count)
        rows, hold = state.decoder.rows, provided("hold")
        held_CRLV = logits_CRLV if hold is None else hold(step, logits_CRLV, rows["paths"].index_select(0, row_R))
        token_CRL = offered(step, held_CRLV)
        chooses = triton("drafts").choose if use_triton(row_R, "commit") else chosen
        choice_R, draft_RL = chooses(token_CRL, rows["paths"], row_R)
        store_rows(rows["draft"], row_R, lanes.live_B, draft_RL)  # also for who looks at what was fed
        adopt(state.kv, run, choice_R)
        yield Known(logits_RLV=logits_CRLV[choice_R, torch.arange(len(choice_R), device=choice_R.device)])

    def adjust(self, step: Step, view: BlockView, logits_RLV: Tensor, state: State) -> Tensor:
        options = step.state.options(step.recipe, step.lanes.slot_B, "sampling", step.shape.blocks)
        none_R1 = torch.zeros_like(view.step_R, dtype=torch.float64)[:, None]
        self.part.confirm(logits_RLV, view, state, options.get("temperature", none_R1))
        return logits_RLV

    def proposed(self, step: Step, made: Decision) -> None:
        # Accepted drafts had keys of their own. The last new token was a prediction, and has none yet, like all that a
        # form writes behind it.
        counts = triton("drafts").committed if use_triton(made.lanes.start_B, "commit") else committed
        first_B = counts(made.proposal.commit_RL, made.view.masked_RL, step.shape.lanes)
        step.notes[Drafting] = made.lanes.start_B + first_B - step.recipe.model.spec.shift
        if self.part.versions:
            self.part.redraft(made.adjusted_RLV, first_B, made.decoder_state)

    def moved(self, step: Step, made: Decision) -> None:
        lanes, shift = step.lanes, step.recipe.model.spec.shift
        if (find := provided("paths_in_languages")) is not None:
            first_B = lanes.start_B - made.lanes.start_B  # behind what forms have written
            self.part.within(partial(find, step, made, first_B), made.decoder_state)
        kept_B = torch.minimum(lanes.start_B - shift, step.notes[Drafting])
        step.lanes = replace(lanes, kept_B=torch.where(made.moved.done_B, lanes.kept_B, kept_B))


def committed(commit_RL: Tensor, masked_RL: Tensor, lanes: int) -> Tensor:
    """Where in the active region of each lane the last new token ends; 0: none is new. int64 [B]"""
    commit_BX = (commit_RL & masked_RL).view(lanes, -1)
    return (commit_BX * torch.arange(1, commit_BX.shape[1] + 1, device=commit_BX.device)).amax(-1)


def fed(
    run: Forward, lanes: RowCursors, row_B: Tensor, drafts_NCX: Tensor, versions: int, mask: int, open_status: int
) -> tuple[Tensor, Tensor]:
    """The tokens of the window with drafts in open positions, and which of them are masks there. [G, W] each

    `drafts_NCX`: the drafts of each version or, with no versions, of the row's own lane, which has none beside others.
    """
    drafts_BCX, start_B1 = drafts_NCX.index_select(0, row_B), lanes.start_B[:, None]
    if versions:
        drafts_BCX = F.pad(drafts_BCX[:, :versions], (0, 0, 1, 0), value=-1)
    open_BW = (run.status_BW == open_status) & (run.pos_BW >= 0)
    place_BW, last = run.pos_BW - start_B1, drafts_NCX.shape[2] - 1
    takes_BW = open_BW & (place_BW >= 0) & (place_BW <= last) & (run.pos_BW < lanes.end_B[:, None])
    place_CBW = place_BW.clamp(0, last).expand(versions + 1, -1, -1)
    drafts_CBW = drafts_BCX.transpose(0, 1).gather(2, place_CBW)
    fed_GW = torch.where(takes_BW & (drafts_CBW >= 0), drafts_CBW, run.tokens_BW).flatten(0, 1)
    return fed_GW, open_BW.repeat(versions + 1, 1) & (fed_GW == mask)


def offered(step: Step, logits_CRLV: Tensor) -> Tensor:
    """The token at each position of each version. [C, R, L]"""
    view, lanes, draw, (count, *shape) = block_view(step, step.lanes), step.lanes, None, logits_CRLV.shape[:3]
    recipe, sampled, logits_GLV = step.recipe, step.shape.extra(Sampled), logits_CRLV.flatten(0, 1)
    if sampled is not None:
        slot_G, spec, columns = lanes.slot_B.repeat(count), recipe.model.spec, needed_vocabulary(step)
        options = step.state.options(recipe, slot_G, "sampling", step.shape.blocks)
        view_G = versions_of(view, count)
        logits_GLV = recipe.sampling.adjust(logits_GLV.clone(), view_G, options, spec, columns)
        count_GV = columns.part(token_counts(step.state.canvas, slot_G, spec))
        draw = recipe.sampling.draw(logits_GLV, count_GV, view_G, options, spec, sampled.top, columns)
    return statistics(step, logits_GLV, view.masked_RL.repeat(count, 1), draw).token_RL.view(count, *shape)


def versions_of(view: BlockView, count: int) -> BlockView:
    """The same for each version."""
    pos_GL, tokens_GL, masked_GL, given_GL = (
        x_RL.repeat(count, 1) for x_RL in (view.pos_RL, view.tokens_RL, view.masked_RL, view.given_RL)
    )
    each_R = view.step_R, view.quota_R, view.forward_R, view.seed_R, view.prompt_R, view.length_R
    step_G, quota_G, forward_G, seed_G, prompt_G, length_G = (x_R.repeat(count) for x_R in each_R)
    return BlockView(
        pos_GL, tokens_GL, masked_GL, given_GL, step_G, quota_G, forward_G, seed_G, prompt_G, length_G, view.options
    )


def chosen(token_CRL: Tensor, paths_NCD: Tensor, row_R: Tensor) -> tuple[Tensor, Tensor]:
    """The version with the longest path that is confirmed to its end, int64 [R], and its drafts; -1: none. [R, L]

    `paths_NCD`: of all slots; version 0 has none.
    """
    count, _, block = token_CRL.shape
    paths_RCD = F.pad(paths_NCD.index_select(0, row_R)[:, : count - 1], (0, 0, 1, 0), value=-1)
    there_RCD, depth = paths_RCD >= 0, paths_RCD.shape[2]
    right_RC = ((token_CRL.transpose(0, 1)[..., :depth] == paths_RCD) | ~there_RCD).all(-1)
    choice_R = torch.where(right_RC, there_RCD.sum(-1), -1).argmax(-1)
    draft_RD = paths_RCD[torch.arange(len(choice_R), device=choice_R.device), choice_R]
    return choice_R, F.pad(draft_RD, (0, block - depth), value=-1)
