"""Lossless speculation: a forward evaluates the active blocks as they are, and as the next commits may leave them.

If the commits of a step lead to one of these candidates, its logits are known, and the next denoise step takes no
forward (Spiffy; Self-Speculative Decoding, arXiv:2510.04147). Only equal tokens count as a hit. So drafts change how
many forwards a request takes, and never its tokens.

Shape suffixes beside those of `dinfer.core.step.contracts`: X = K * L positions of the active blocks, C candidates, the
present state among them, G = C * B lanes of the forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from dinfer.core.abilities.registry import ABILITIES
from dinfer.core.abilities.traits import GUIDED, KEEPS_KEYS, NO_MASK
from dinfer.core.kernels.canvas import rows_of, span, store_rows
from dinfer.core.memory import PagedAttend
from dinfer.core.refusals import Refusal, Trait
from dinfer.core.step.ability import ByExtra, Decision, Entry, Extra, Forward, Known, Parts, Step, StepShape
from dinfer.core.step.canvas import Canvas
from dinfer.core.step.cursors import RowCursors
from dinfer.core.step.mixins import Branches, Feeds, Grows, Verifies
from dinfer.core.step.shape import Versioned
from dinfer.core.step.step import forward
from dinfer.core.step.versions import States, logits_of_versions

# Which drafts each candidate fills in, by rank of confidence: a tree of states, as in Spiffy. It is calibrated: a set
# is the one that saves most forwards beside those before it, on 24 problems of another seed than the benchmarks',
# averaged over the recipes of benchmarks/results/speculation-*.json.
DRAFTED = (
    (0,), (0, 1), (1,), (0, 1, 2), (0, 2), (0, 1, 2, 3), (2,), (0, 1, 3), (0, 1, 2, 3, 4), (0, 1, 2, 4), (1, 2), (0, 3),
    (3,), (0, 1, 2, 3, 4, 5), (0, 2, 3), (0, 1, 4),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Guesses:
    """What the last known logits propose for each active position."""

    token_NX: Tensor  # int64
    confidence_NX: Tensor  # float32; -1: nothing is proposed

    @classmethod
    def alloc(cls, slots: int, active: int, device) -> Self:
        token_NX = torch.zeros(slots, active, dtype=torch.int64, device=device)
        return cls(token_NX, torch.full((slots, active), -1.0, device=device))

    def keep(self, lanes: RowCursors, made: Decision) -> None:
        """Keeps the proposals of a step at open positions of live rows. Rows that entered a block have none."""
        shape = (lanes.slot_B.shape[0], -1)
        kept_BX = made.commits.open_RL.view(shape) & ~made.moved.entered_B[:, None]
        confidence_BX = made.stats.confidence_RL.view(shape).float().masked_fill(~kept_BX, -1.0)
        store_rows(self.token_NX, lanes.slot_B, lanes.live_B, made.stats.token_RL.view(shape))
        store_rows(self.confidence_NX, lanes.slot_B, lanes.live_B, confidence_BX)

    def states(self, slot_B: Tensor, tokens_BX: Tensor, count: int) -> Tensor:
        """The present state, and those with the drafts of the first `count` sets filled in. int64 [C, B, X]"""
        confidence_BX = self.confidence_NX.index_select(0, slot_B)
        rank_BX = confidence_BX.argsort(stable=True, dim=-1, descending=True).argsort(dim=-1)
        filled_CBX = torch.zeros((count + 1, *rank_BX.shape), dtype=torch.bool, device=slot_B.device)
        for filled_BX, ranks in zip(filled_CBX[1:], DRAFTED, strict=False):
            for rank in ranks:
                filled_BX |= rank_BX == rank
        filled_CBX &= confidence_BX >= 0
        return torch.where(filled_CBX, self.token_NX.index_select(0, slot_B), tokens_BX)


def states_of(guesses: Guesses, canvas: Canvas, lanes: RowCursors, shape: StepShape, count: int) -> States:
    """The present state of each lane, and `count` others."""
    pos_BX = span(lanes.start_B, lanes.end_B, shape.blocks * shape.block)
    states_CBX = guesses.states(lanes.slot_B, canvas.gather(lanes.slot_B, pos_BX)[0], count)
    return States(lanes.slot_B, lanes.live_B, lanes.start_B, lanes.end_B, lanes.length_B, pos_BX, states_CBX)


SPECULATES = Trait(lambda runtime: runtime.speculate != 0, "`runtime.speculate`", instead="runtime.speculate=0")


@ABILITIES.register("speculation", after=("branches",))
class Speculation(ByExtra[Versioned]):
    """Denoise steps without a forward, where a candidate of the forward before is what the commits led to."""

    refusals = (
        Refusal("runtime.speculate needs a cache that recomputes the whole window in every pass, which {cache} does "
                "not.",
                cache=KEEPS_KEYS, runtime=SPECULATES),
        Refusal("runtime.speculate needs an iteration that feeds the model tokens alone. What {iteration} feeds at "
                "masks depends on the logits of the step before.",
                iteration=Feeds, runtime=SPECULATES),
        Refusal("runtime.speculate and {iteration} both fill a forward with further states.",
                iteration=Branches, runtime=SPECULATES),
        Refusal("runtime.speculate has no candidates for the second pass of {decoder}.",
                decoder=Verifies, runtime=SPECULATES),
        Refusal("runtime.speculate needs rows whose length stays, and {decoder} lengthens them.",
                decoder=Grows, runtime=SPECULATES),
        Refusal("runtime.speculate needs a model with a mask token: what open positions of this one hold changes at "
                "every step.",
                model=NO_MASK, runtime=SPECULATES),
        Refusal("sampling.guidance takes a second branch, which runtime.speculate has no candidates for.",
                sampling=GUIDED, runtime=SPECULATES),
    )  # fmt: skip

    kind = Versioned

    @classmethod
    def of(cls, recipe: Parts, shape: StepShape) -> Self | None:
        return None if recipe.facts.versions else super().of(recipe, shape)

    @classmethod
    def alloc(cls, recipe: Parts, canvas: Canvas, block: int, extras: Sequence[Extra]) -> Any:
        if recipe.facts.versions or not any(extra.count for extra in extras if isinstance(extra, Versioned)):
            return None
        slots, device = canvas.tokens_NS.shape[0], canvas.tokens_NS.device
        return Guesses.alloc(slots, recipe.iteration.blocks * block, device)

    @classmethod
    def admit(cls, kept: Guesses, slot_A: Tensor, entries: Sequence[Entry]) -> None:
        kept.confidence_NX.index_fill_(0, slot_A, -1.0)

    def prepare(self, step: Step, run: Forward) -> PagedAttend | None:
        if not (count := self.extra.count):
            return None
        states = states_of(step.kept(Speculation), step.state.canvas, step.lanes, step.shape, count)
        run.tokens_BW = states.windows(run.pos_BW, run.tokens_BW)
        step.notes[Speculation] = states
        return states.attend(step.state.kv, run.pos_BW, run.place_BW, [run.seen[0]] * (count + 1), step.shape.pages)

    def decisions(self, step: Step) -> Iterator[Known] | None:
        return self._chain(step) if self.extra.count else None

    def _chain(self, step: Step) -> Iterator[Known]:
        run, states = forward(step), step.notes[Speculation]
        logits_CRLV = logits_of_versions(step, run, self.extra.count + 1)
        row_R = torch.arange(logits_CRLV.shape[1], device=logits_CRLV.device)
        yield Known(logits_RLV=logits_CRLV[0].clone())
        for _ in range(max(map(len, DRAFTED[: self.extra.count]))):  # if each step commits at least one token
            states.live_B = step.lanes.live_B
            step.lanes, choice_B = states.reached(step.state.canvas, step.shape.phase)
            slot_B, state = step.lanes.slot_B, step.state
            step.iteration_state, step.cache_state = state.iteration.lanes(slot_B), state.cache.lanes(slot_B)
            yield Known(logits_RLV=logits_CRLV[rows_of(choice_B, step.shape.blocks), row_R], hit=True)

    def moved(self, step: Step, made: Decision) -> None:
        step.kept(Speculation).keep(step.lanes, made)
