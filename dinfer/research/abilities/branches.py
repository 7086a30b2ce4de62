"""Branches: versions of the active blocks that differ by a token run side by side, and the surest one goes on (LoPA).

Each step proposes tokens that it does not commit. A branch is the present state with one of the surest of these filled
in, or several (`Shares`). A forward evaluates all branches of a row, as lanes with keys of their own. The iteration
says what each is worth. The best one gives the logits of the step: its tokens are committed, and its keys are the row's
from then on. The others are forgotten. This is not lossless: a branch's token is committed because it makes others
surer.

Shape suffixes beside those of `dinfer.core.step.contracts`: X = K * L positions of the active blocks, C branches, the
present state first, J the others, Q tokens that each of these adds at most, G = C * B lanes of the forward.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from dinfer.core.abilities.registry import ABILITIES
from dinfer.core.abilities.traits import GUIDED
from dinfer.core.kernels.canvas import rows_of, span, store_rows
from dinfer.core.kernels.selection import descending_rank
from dinfer.core.memory import KVPool, PagedAttend
from dinfer.core.refusals import Refusal, Trait
from dinfer.core.step.ability import Ability, Decision, Entry, Extra, Forward, Known, Parts, Step, StepShape, Window
from dinfer.core.step.canvas import Canvas
from dinfer.core.step.contracts import Decoder, Iteration, Large
from dinfer.core.step.cursors import BlockView, Phase, RowCursors, Status
from dinfer.core.step.mixins import Branches, Edits, LeavesDecoded, Verifies
from dinfer.core.step.record import Raw, Said, Written, records, said_of, tell
from dinfer.core.step.scores import proposed_tokens
from dinfer.core.step.shape import HostFacts
from dinfer.core.step.step import block_view, forward, seen
from dinfer.core.step.versions import States, adopt, columns_of, logits_of_versions
from dinfer.core.step.window import deciding
from dinfer.research.abilities.following import Watches


@dataclass(frozen=True, slots=True)
class Added:
    """What each branch of a slot adds to the present state."""

    pos_NJQ: Tensor  # int64, -1: no token. A branch without a first one is not there
    token_NJQ: Tensor  # int64
    value_NJ: Tensor  # float64
    said_NJQ: Said  # in rows whose steps record
    end_N: Tensor  # int64, end of the active region before a block opened behind it

    @classmethod
    def alloc(cls, slots: int, branches: int, size: int, device) -> Self:
        none_NJQ = torch.full((slots, branches, size), -1, dtype=torch.int64, device=device)
        value_NJ = torch.zeros_like(none_NJQ[..., 0], dtype=torch.float64)
        said_NJQ = Said(*(torch.full_like(none_NJQ, float("nan"), dtype=torch.float32) for _ in range(3)))
        return cls(none_NJQ, torch.zeros_like(none_NJQ), value_NJ, said_NJQ, none_NJQ[:, 0, 0].clone())

    def there(self, slot_B: Tensor) -> Tensor:
        """Which slots have branches beside the present state. bool [B]"""
        return (self.pos_NJQ[..., 0].index_select(0, slot_B) >= 0).any(-1)

    def keep(self, step: Step, made: Decision, value_RL: Tensor) -> None:
        """Takes the surest tokens that a step has left open in live rows."""
        view, by_lane = made.view, (len(step.lanes.slot_B), -1)
        value_BX = value_RL.double().masked_fill(~made.commits.open_RL, float("-inf")).view(by_lane)
        value_BJ, place_BJ = value_BX.sort(dim=-1, descending=True, stable=True)
        count = self.pos_NJQ.shape[1]
        value_BJ, place_BJ = (fitted(x_BX, count) for x_BX in (value_BJ, place_BJ))
        pos_BJ = torch.where(value_BJ > float("-inf"), view.pos_RL.view(by_lane).gather(1, place_BJ), -1)
        self.store(step, made, pos_BJ[..., None], place_BJ[..., None], value_BJ)

    def store(self, step: Step, made: Decision, pos_BJQ: Tensor, place_BJQ: Tensor, value_BJ: Tensor) -> None:
        """Takes the proposed tokens at these places of the active blocks. `pos_BJQ`: -1 where there is to be none."""
        lanes, token_RL = step.lanes, made.stats.token_RL

        def there(x_RL: Tensor) -> Tensor:
            return x_RL.view(len(place_BJQ), -1).gather(1, place_BJQ.flatten(1)).view(place_BJQ.shape)

        new = pos_BJQ, there(token_RL), value_BJ, made.lanes.end_B
        for held, of_lanes in zip((self.pos_NJQ, self.token_NJQ, self.value_NJ, self.end_N), new, strict=True):
            store_rows(held, lanes.slot_B, lanes.live_B, of_lanes)
        if Raw in step.notes:
            said, kept = said_of(step, token_RL), self.said_NJQ
            for held, told_RL in ((kept.logit, said.logit), (kept.log_sum, said.log_sum), (kept.drawn, said.drawn)):
                store_rows(held, lanes.slot_B, lanes.live_B, there(told_RL))


def fitted(x_BX: Tensor, count: int) -> Tensor:
    """The first `count` columns; the last one again where there are fewer."""
    return x_BX[:, torch.arange(count, device=x_BX.device).clamp_max(x_BX.shape[1] - 1)]


@dataclass(slots=True)
class Versions:
    """The branches that one forward evaluates."""

    states: States  # their tokens
    adds_CBX: Tensor  # bool, where each branch adds a token; nowhere in the present state
    pos_BCQ: Tensor  # int64, the same as positions; -1: none
    token_BCQ: Tensor
    value_BC: Tensor  # float64
    end_BC: Tensor  # int64, where its active region ends
    there_BC: Tensor  # bool: the branch takes part

    @classmethod
    def of(cls, added: Added, canvas: Canvas, lanes: RowCursors, iteration: Branches, shape: StepShape) -> Self:
        """The present state of each lane, and the branches beside it. Each opens blocks by its own progress."""
        slot_B, length_B = lanes.slot_B, lanes.length_B
        pos_BJQ, token_BJQ, value_BJ, was_B = (
            x.index_select(0, slot_B) for x in (added.pos_NJQ, added.token_NJQ, added.value_NJ, added.end_N)
        )
        pos_BX = span(lanes.start_B, length_B, shape.blocks * shape.block)
        tokens_BX, status_BX = canvas.gather(slot_B, pos_BX)
        open_BX, given_BX = status_BX == int(Status.OPEN), status_BX == int(Status.GIVEN)
        next_B = canvas.next_NS[slot_B, was_B.clamp(0, canvas.capacity)]
        states, ends, adds = [tokens_BX], [lanes.end_B], [torch.zeros_like(open_BX)]
        for pos_BQ, token_BQ in zip(pos_BJQ.unbind(1), token_BJQ.unbind(1), strict=True):
            adds_BX, state_BX = added_to(tokens_BX, pos_BX, pos_BQ, token_BQ)
            adds.append(adds_BX)
            states.append(state_BX)
            left_BX = open_BX & ~adds_BX & (pos_BX < was_B[:, None])
            said_BX = (pos_BX >= 0) & (pos_BX < was_B[:, None]) & ~left_BX & ~given_BX
            stopped_B = (canvas.is_stop(state_BX) & said_BX).any(-1) & (lanes.stops_B > 0)
            opens_B = iteration.opens(left_BX, stopped_B, lanes.start_B, was_B, next_B, length_B)
            end_B = torch.minimum(was_B + opens_B * shape.block, length_B)
            ends.append(torch.where(pos_BQ[:, 0] >= 0, end_B, lanes.end_B))
        none_B1Q, end_BC = torch.full_like(pos_BJQ[:, :1], -1), torch.stack(ends, 1)
        versions = States(slot_B, lanes.live_B, lanes.start_B, end_BC.amax(1), length_B, pos_BX, torch.stack(states))
        there_BJ = pos_BJQ[..., 0] >= 0
        present_B1 = iteration.present(~there_BJ.any(1))[:, None]
        return cls(
            versions,
            torch.stack(adds),
            torch.cat((none_B1Q, pos_BJQ), 1),
            torch.cat((torch.zeros_like(none_B1Q), token_BJQ), 1),
            torch.cat((torch.ones_like(value_BJ[:, :1]), value_BJ), 1),
            end_BC,
            torch.cat((present_B1, there_BJ), 1),
        )

    @property
    def count(self) -> int:
        return self.pos_BCQ.shape[1]

    def region(self, lanes: RowCursors, branch: int | None = None) -> RowCursors:
        """The lanes with the active region of a branch; None: with the longest of all."""
        return replace(lanes, end_B=self.end_BC.amax(1) if branch is None else self.end_BC[:, branch])

    def view(self, branch: int, view: BlockView) -> BlockView:
        """The view of the branch's region, with its tokens."""
        adds_RL = self.adds_CBX[branch].view_as(view.masked_RL)
        tokens_RL = torch.where(adds_RL, self.states.states_CBX[branch].view_as(view.tokens_RL), view.tokens_RL)
        return replace(view, tokens_RL=tokens_RL, masked_RL=view.masked_RL & ~adds_RL)

    def best(self, worth_BC: Tensor) -> Tensor:
        """The branch that goes on: the most worth, of equal ones the first added, the present state last. int64 [B]"""
        worth_BC = worth_BC.masked_fill(~self.there_BC, float("-inf")).roll(-1, 1)
        return ((descending_rank(worth_BC) == 0).to(torch.int64).argmax(1) + 1) % self.count

    def adopted(self, step: Step, added: Added, choice_B: Tensor) -> Written:
        """What the chosen branches write, before they do. X = Q."""
        lanes = step.lanes
        pos_BQ, new_BQ = chosen(self.pos_BCQ, choice_B), chosen(self.token_BCQ, choice_B)
        pos_BQ = pos_BQ.masked_fill(~lanes.live_B[:, None], -1)
        old_BQ, _ = step.state.canvas.gather(lanes.slot_B, pos_BQ)
        adds_BQ = pos_BQ >= 0

        def said() -> Said:
            held = added.said_NJQ.logit, added.said_NJQ.log_sum, added.said_NJQ.drawn
            return Said(*(chosen(x.index_select(0, lanes.slot_B), (choice_B - 1).clamp_min(0)) for x in held))

        return Written(lanes.slot_B, lanes.steps_B, pos_BQ, old_BQ, new_BQ, adds_BQ, torch.zeros_like(adds_BQ), said)

    def follow(
        self, choice_B: Tensor, canvas: Canvas, lanes: RowCursors, kv: KVPool, run: Forward, block: int
    ) -> tuple[RowCursors, Tensor, Tensor]:
        """Makes the chosen branch of each live lane the present state: tokens, region and keys.

        Returns the lanes, how many tokens that commits, int64 [B], and which active blocks are new, bool [B, K].
        """
        pos_BQ, token_BQ = chosen(self.pos_BCQ, choice_B), chosen(self.token_BCQ, choice_B)
        end_B1 = self.end_BC.gather(1, choice_B[:, None])
        adds_BQ = (pos_BQ >= 0) & lanes.live_B[:, None]
        canvas.write(lanes.slot_B, pos_BQ, token_BQ, adds_BQ, torch.zeros_like(adds_BQ))
        adopt(kv, run, choice_B.masked_fill(~lanes.live_B, 0))
        first_BK = lanes.start_B[:, None] + block * torch.arange(lanes.step_BK.shape[1], device=pos_BQ.device)
        opened_BK = (first_BK >= lanes.end_B[:, None]) & (first_BK < end_B1)
        lanes = replace(lanes, end_B=end_B1[:, 0], step_BK=lanes.step_BK.masked_fill(opened_BK, 0))
        canvas.store(lanes)
        return lanes, adds_BQ.sum(-1), opened_BK


def added_to(tokens_BX: Tensor, pos_BX: Tensor, pos_BQ: Tensor, token_BQ: Tensor) -> tuple[Tensor, Tensor]:
    """Where these tokens stand in the active blocks, bool [B, X], and the blocks with them, [B, X]."""
    places = [(pos_BX == pos_B1) & (pos_B1 >= 0) for pos_B1 in pos_BQ.split(1, 1)]
    for at_BX, token_B1 in zip(places, token_BQ.split(1, 1), strict=True):
        tokens_BX = torch.where(at_BX, token_B1, tokens_BX)
    return reduce(torch.logical_or, places), tokens_BX


def chosen(x_BCQ: Tensor, choice_B: Tensor) -> Tensor:
    """Of each lane the chosen row. [B, Q]"""
    return x_BCQ[torch.arange(len(choice_B), device=choice_B.device), choice_B]


LARGE = Trait(
    lambda parts: any(isinstance(x, Large) for x in parts["decoder"].fresh_state(parts["model"].spec, 1).values()),
    "a decoder that keeps large state, as over the vocabulary",
)
ALONE = "{iteration} runs versions of the active blocks side by side, and {%s} can follow one alone."


def branches_of(iteration: Iteration) -> int:
    """How many versions run beside the active blocks."""
    return iteration.branches if isinstance(iteration, Branches) else 0


class LooksAhead(Branches):
    """An iteration whose branches are offered and judged by `dinfer.research.abilities.looking`."""

    by = "entropy"
    own_entropy: bool  # the entropies of the added tokens' positions count, too

    @property
    @abstractmethod
    def fills(self) -> bool:
        """Whether behind a stop token all masks become EOS at once."""

    @abstractmethod
    def offers(self, confidence_RL: Tensor, view: BlockView, share_R1: Tensor, size: int) -> Tensor:
        """Sets of places in the block to try next, each set once; -1: none. int64 [R, J, size]

        `share_R1`: how many places a set has, at most `size`. Confidences are below 0 where no token may be tried.
        """


class Shares(ABC):
    """A decoder with state "share": int64 [R], how many tokens a branch of the block adds."""

    @abstractmethod
    def most(self, block: int) -> int:
        """The largest share of a block of this length. Host side."""


def size_of(recipe: Parts, block: int) -> int:
    """How many tokens a branch adds at most."""
    return recipe.decoder.most(block) if isinstance(recipe.decoder, Shares) else 1


@ABILITIES.register("branches")
@dataclass(frozen=True)
class Branched(Ability):
    """Steps that evaluate versions of the active blocks, and go on with the best."""

    refusals: ClassVar[tuple[Refusal, ...]] = (
        Refusal(ALONE % "decoder", iteration=Branches, decoder=Edits | Verifies),
        Refusal(ALONE % "decoder", iteration=Branches, decoder=Decoder, recipe=LARGE),
        Refusal(ALONE % "cache", iteration=Branches, cache=Watches | LeavesDecoded),
        Refusal("{iteration} needs further lanes for one branch, and guidance takes two.",
                sampling=GUIDED, iteration=Branches),
    )  # fmt: skip

    iteration: Branches
    count: int  # versions beside the present state; 0: the step has no room for them
    waits: bool  # rows that have versions wait for a step with room

    @classmethod
    def of(cls, recipe: Parts, shape: StepShape) -> Self | None:
        return None if isinstance(recipe.iteration, LooksAhead) else cls.made(recipe, shape)

    @classmethod
    def made(cls, recipe: Parts, shape: StepShape) -> Self | None:
        """The ability in these steps, whoever judges the branches."""
        iteration = recipe.iteration
        if not isinstance(iteration, Branches) or shape.phase == Phase.PREFILL:
            return None
        return cls(iteration, shape.versions, not shape.versions and shape.phase == deciding(recipe))

    @classmethod
    def facts(cls, recipe: Parts) -> HostFacts:
        count = branches_of(recipe.iteration)
        looks = isinstance(recipe.iteration, LooksAhead)
        offered = size_of(recipe, recipe.iteration.block) if looks else 0
        return HostFacts(versions=count, offered=offered, opens=count > 0 and not looks)

    def needs(self, step: Step) -> tuple[str, ...]:
        return (self.iteration.by,)

    @classmethod
    def alloc(cls, recipe: Parts, canvas: Canvas, block: int, extras: Sequence[Extra]) -> Any:
        slots, count = canvas.tokens_NS.shape[0], branches_of(recipe.iteration)
        return Added.alloc(slots, count, size_of(recipe, block), canvas.tokens_NS.device) if count else None

    @classmethod
    def admit(cls, kept: Added, slot_A: Tensor, entries: Sequence[Entry]) -> None:
        kept.pos_NJQ.index_fill_(0, slot_A, -1)

    def begin(self, step: Step) -> None:
        added, lanes = step.kept(Branched), step.lanes
        if self.waits:
            step.narrow(lanes.live_B & ~added.there(lanes.slot_B))
        if self.count:
            versions = Versions.of(added, step.state.canvas, lanes, self.iteration, step.shape)
            step.notes[Branched] = versions
            step.region = versions.region(lanes)

    def window(self, step: Step, window: Window) -> Window:
        return replace(window, fits_B=window.fits_B & forks(step.state.kv, window.place_BW)) if self.count else window

    def prepare(self, step: Step, run: Forward) -> PagedAttend | None:
        if not self.count:
            return None
        versions: Versions = step.notes[Branched]
        regions = (versions.region(step.lanes, branch) for branch in range(versions.count))
        intervals = [seen(step, own, run.place_BW, run.window.stop_B)[0] for own in regions]
        run.tokens_BW = versions.states.windows(run.pos_BW, run.tokens_BW)
        return versions.states.attend(step.state.kv, run.pos_BW, run.place_BW, intervals, step.shape.pages)

    def decisions(self, step: Step) -> Iterator[Known] | None:
        return self._best(step) if self.count else None

    def _best(self, step: Step) -> Iterator[Known]:
        run, versions = forward(step), step.notes[Branched]
        logits_CRLV = logits_of_versions(step, run, self.count + 1)
        lanes, state = step.lanes, step.state
        by_lane, worth = (lanes.slot_B.shape[0], -1), list[Tensor]()
        for branch, logits_RLV in enumerate(logits_CRLV):
            own = versions.region(lanes, branch)
            view = versions.view(branch, block_view(step, own))
            decoder_state = state.decoder.lanes(state.block_rows(lanes.slot_B, lanes.block_B, step.shape.blocks))
            stats, *_ = proposed_tokens(step, own, view, logits_RLV.clone(), decoder_state)
            value_BX, masked_BX = stats.surest(self.iteration.by).view(by_lane), view.masked_RL.view(by_lane)
            worth.append(self.iteration.worth(value_BX, masked_BX, versions.value_BC[:, branch]))
        yield self.best(step, run, torch.stack(worth, 1), logits_CRLV)

    def best(self, step: Step, run: Forward, worth_BC: Tensor, logits_CRLV: Tensor) -> Known:
        """Goes on with the branch that is most worth, and decides by its logits."""
        versions: Versions = step.notes[Branched]
        choice_B = versions.best(worth_BC)
        record = versions.adopted(step, step.kept(Branched), choice_B) if records(step) else None
        step.lanes, gained_B, opened_BK = versions.follow(
            choice_B, step.state.canvas, step.lanes, step.state.kv, run, step.shape.block
        )
        if record is not None:
            tell(step, record)
        row_R = torch.arange(logits_CRLV.shape[1], device=choice_B.device)
        logits_RLV = logits_CRLV[rows_of(choice_B, step.shape.blocks), row_R]
        return Known(logits_RLV=logits_RLV, gained_B=gained_B, opened_BK=opened_BK)

    def moved(self, step: Step, made: Decision) -> None:
        value_RL = made.stats.surest(self.iteration.by)
        for ability in step.abilities:
            if (fits_RL := ability.fits(step, made)) is not None:
                value_RL = value_RL.masked_fill(~fits_RL, float("-inf"))
        step.kept(Branched).keep(step, made, value_RL)


def forks(kv: KVPool, pos_BW: Tensor) -> Tensor:
    """Where the positions lie in as few pages as a candidate has. bool [B]"""
    first_B, last_B = columns_of(kv, pos_BW)
    return last_B - first_B < kv.fork
