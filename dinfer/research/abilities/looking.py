"""Look-ahead: candidates of one more token each, of which the one that leaves the other masks surest is committed.

These are branches (`branches.py`) of another kind. They are there where the decoder has committed nothing, at positions
that the iteration draws, and are judged by the entropy of all masks that the forward computes (Info-Gain).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from dinfer.core.abilities.registry import ABILITIES
from dinfer.core.kernels.canvas import rows_of, take
from dinfer.core.refusals import Refusal
from dinfer.core.step.ability import Decision, Extra, Forward, Known, Parts, Step, StepShape
from dinfer.core.step.canvas import Canvas
from dinfer.core.step.cursors import Status
from dinfer.core.step.shape import HostFacts
from dinfer.core.step.step import forward
from dinfer.research.abilities.branches import Added, Branched, LooksAhead, Versions


@ABILITIES.register("looking", after=("branches", "read_positions"))
@dataclass(frozen=True)
class Looking(Branched):
    """Steps that try candidates where the last one committed nothing. What they keep is that of `Branched`."""

    refusals: ClassVar[tuple[Refusal, ...]] = ()

    @classmethod
    def of(cls, recipe: Parts, shape: StepShape) -> Self | None:
        return cls.made(recipe, shape) if isinstance(recipe.iteration, LooksAhead) else None

    @classmethod
    def facts(cls, recipe: Parts) -> HostFacts:
        return HostFacts()

    @classmethod
    def alloc(cls, recipe: Parts, canvas: Canvas, block: int, extras: Sequence[Extra]) -> Any:
        return None

    def feed(self, step: Step, run: Forward) -> None:
        if self.count:
            run.needed_BX = None  # all masks of the window are read

    def _best(self, step: Step) -> Iterator[Known]:
        run, versions = forward(step), step.notes[Branched]
        h_CBWD = run.h_BWD.unflatten(0, (self.count + 1, -1))
        logits, worth = list[Tensor](), list[Tensor]()
        for branch, h_BWD in enumerate(h_CBWD):
            logits_BWV = run.model.logits(h_BWD)
            worth.append(self.worth(logits_BWV, run, versions, branch))
            logits.append(take(logits_BWV, run.logit_place_RL))
        yield self.best(step, run, torch.stack(worth, 1), torch.stack(logits))

    def worth(self, logits_BWV: Tensor, run: Forward, versions: Versions, branch: int) -> Tensor:
        """Less the mean entropy of the masks that a branch leaves, and that of its own token before. float64 [B]"""
        chance_BWV = logits_BWV.float().softmax(-1).clamp_min(1e-12)
        entropy_BW = -(chance_BWV * chance_BWV.log()).sum(-1)
        left_BW = (run.status_BW == int(Status.OPEN)) & (run.pos_BW >= 0)
        left_BW = left_BW & (run.pos_BW != versions.pos_BC[:, branch, None])
        mean_B = (entropy_BW * left_BW).sum(-1) / left_BW.sum(-1).clamp_min(1)
        own = versions.value_BC[:, branch].float() if branch and self.own_entropy else 0.0
        return (own - mean_B).double()

    @property
    def own_entropy(self) -> bool:
        assert isinstance(self.iteration, LooksAhead)
        return self.iteration.own_entropy

    def moved(self, step: Step, made: Decision) -> None:
        assert isinstance(self.iteration, LooksAhead)
        added: Added = step.kept(Branched)
        view, stats, open_RL = made.view, made.stats, made.commits.open_RL
        offered_RL = open_RL
        for ability in step.abilities:
            if (fits_RL := ability.fits(step, made)) is not None:
                offered_RL = offered_RL & fits_RL
        waits_R = (
            ~(view.masked_RL & ~open_RL).any(-1) & open_RL.any(-1) & ~rows_of(made.moved.done_B, step.shape.blocks)
        )
        place_RJ = self.iteration.offers(stats.confidence_RL.masked_fill(~offered_RL, -1), view)
        at_RJ = place_RJ.clamp_min(0)
        there_RJ = (place_RJ >= 0) & waits_R[:, None] & offered_RL.gather(1, at_RJ)
        pos_RJ = torch.where(there_RJ, view.pos_RL.gather(1, at_RJ), -1)
        added.store(step, made, pos_RJ, at_RJ, -stats.stat("entropy").gather(1, at_RJ).double())
