"""Look-ahead: candidates of one more token each, of which the one that leaves the other masks surest is committed.

These are branches (`branches.py`) of another kind. They are there where the decoder has committed nothing, at positions
that the iteration draws, and are judged by the entropy of all masks that the forward computes (Info-Gain). A decoder
that `Shares` has them add several tokens each.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from dinfer.core.abilities.registry import ABILITIES
from dinfer.core.kernels.canvas import padded, rows_of, take
from dinfer.core.refusals import Refusal
from dinfer.core.step.ability import Decision, Extra, Forward, Known, Parts, Step, StepShape
from dinfer.core.step.canvas import Canvas
from dinfer.core.step.cursors import Status
from dinfer.core.step.record import Said, Written, records, tell
from dinfer.core.step.shape import HostFacts
from dinfer.core.step.step import forward
from dinfer.research.abilities.branches import Added, Branched, LooksAhead, Versions


@ABILITIES.register("looking", after=("branches", "read_positions"))
@dataclass(frozen=True)
class Looking(Branched):
    """Steps that try candidates where the last one committed nothing. What they keep is that of `Branched`."""

    refusals: ClassVar[tuple[Refusal, ...]] = ()
    iteration: LooksAhead

    @classmethod
    def of(cls, recipe: Parts, shape: StepShape) -> Self | None:
        return cls.made(recipe, shape) if isinstance(recipe.iteration, LooksAhead) else None

    @classmethod
    def facts(cls, recipe: Parts) -> HostFacts:
        return HostFacts()

    @classmethod
    def alloc(cls, recipe: Parts, canvas: Canvas, block: int, extras: Sequence[Extra]) -> Any:
        return None

    def written(self, step: Step, made: Decision) -> None:
        if not self.iteration.fills:
            return
        commits, view = made.commits, made.view
        filled_BS, stopped_B = fill(step)
        filled_RL = filled_BS.gather(1, padded(view.pos_RL, filled_BS.shape[1] - 1).view(len(filled_BS), -1))
        filled_RL = filled_RL.view_as(view.pos_RL)
        left_RL, eos_id = commits.open_RL & ~filled_RL, step.recipe.model.spec.eos_id
        made.commits = replace(
            commits, tokens_RL=commits.tokens_RL.masked_fill(filled_RL, eos_id), open_RL=left_RL,
            finished_R=~left_RL.any(-1), next_B=torch.where(stopped_B, step.lanes.length_B, commits.next_B),
        )  # fmt: skip

    def feed(self, step: Step, run: Forward) -> None:
        if self.count:
            run.needed_BX = None  # all masks of the window are read

    def _best(self, step: Step) -> Iterator[Known]:
        run, versions = forward(step), step.notes[Branched]
        h_CBWD = run.h_BWD.unflatten(0, (self.count + 1, -1))
        logits, worth = list[Tensor](), list[Tensor]()
        for branch, h_BWD in enumerate(h_CBWD):
            logits_BWV = run.model.logits(h_BWD)
            worth.append(self.worth(logits_BWV, run, versions, branch, step.recipe.model.spec.shift))
            logits.append(take(logits_BWV, run.logit_place_RL))
        yield self.best(step, run, torch.stack(worth, 1), torch.stack(logits))

    def best(self, step: Step, run: Forward, worth_BC: Tensor, logits_CRLV: Tensor) -> Known:
        known = super().best(step, run, worth_BC, logits_CRLV)
        if self.iteration.fills:
            fill(step)
        return known

    def worth(self, logits_BWV: Tensor, run: Forward, versions: Versions, branch: int, shift: int) -> Tensor:
        """Less the mean entropy of the masks that a branch leaves, and that of its own tokens before. float64 [B]

        `shift`: the logits at a position predict the token so many further, see `ModelSpec.shift`.
        """
        chance_BWV = logits_BWV.float().softmax(-1).clamp_min(1e-12)
        entropy_BW = -(chance_BWV * chance_BWV.log()).sum(-1).roll(shift, 1)
        left_BW = (run.status_BW == int(Status.OPEN)) & (run.pos_BW.roll(shift, 1) == run.pos_BW - shift)
        added_BW = (run.pos_BW[:, :, None] == versions.pos_BCQ[:, branch, None]).any(-1)
        left_BW = left_BW & (run.pos_BW >= 0) & ~added_BW
        mean_B = (entropy_BW * left_BW).sum(-1) / left_BW.sum(-1).clamp_min(1)
        own = versions.value_BC[:, branch].float() if branch and self.iteration.own_entropy else 0.0
        return (own - mean_B).double()

    def moved(self, step: Step, made: Decision) -> None:
        added: Added = step.kept(Branched)
        view, stats, open_RL = made.view, made.stats, made.commits.open_RL
        offered_RL = open_RL
        for ability in step.abilities:
            if (fits_RL := ability.fits(step, made)) is not None:
                offered_RL = offered_RL & fits_RL
        waits_R = (
            ~(view.masked_RL & ~open_RL).any(-1) & open_RL.any(-1) & ~rows_of(made.moved.done_B, step.shape.blocks)
        )
        share_R = made.decoder_state.get("share", torch.ones_like(view.step_R))
        size = added.pos_NJQ.shape[2]
        place_RJQ = self.iteration.offers(
            stats.confidence_RL.masked_fill(~offered_RL, -1), view, share_R[:, None], size
        )

        def there(x_RL: Tensor) -> Tensor:
            return x_RL.gather(1, place_RJQ.clamp_min(0).flatten(1)).view(place_RJQ.shape)

        there_RJQ = (place_RJQ >= 0) & waits_R[:, None, None] & there(offered_RL)
        entropy_RJQ = there(stats.stat("entropy")).masked_fill(~there_RJQ, 0)
        pos_RJQ = torch.where(there_RJQ, there(view.pos_RL), -1)
        added.store(step, made, pos_RJQ, place_RJQ.clamp_min(0), -entropy_RJQ.double().sum(-1))


def fill(step: Step) -> tuple[Tensor, Tensor]:
    """Writes EOS at all masks behind the first generated stop token of each live row that minds it.

    Where that is, bool [B, S], and whether there is such a token, bool [B]. No cursor counts them as decoded.
    """
    lanes, canvas, eos_id = step.lanes, step.state.canvas, step.recipe.model.spec.eos_id
    pos_S = torch.arange(canvas.capacity, device=lanes.slot_B.device)
    tokens_BS, status_BS = (x_NS.index_select(0, lanes.slot_B)[:, :-1] for x_NS in (canvas.tokens_NS, canvas.status_NS))
    heeds_B1 = ((lanes.stops_B > 0) & lanes.live_B)[:, None]
    stop_BS = canvas.is_stop(tokens_BS) & (status_BS == int(Status.DONE)) & (pos_S < lanes.length_B[:, None]) & heeds_B1
    filled_BS = (stop_BS.cumsum(-1) > 0) & (status_BS == int(Status.OPEN))
    pos_BS, new_BS = torch.where(filled_BS, pos_S, -1), torch.full_like(tokens_BS, eos_id)
    canvas.write(lanes.slot_B, pos_BS, new_BS, filled_BS, open_BS := torch.zeros_like(filled_BS))
    if records(step):
        unsaid_BS = torch.full(pos_BS.shape, float("nan"), device=pos_S.device)
        said = Said(unsaid_BS, unsaid_BS, unsaid_BS)
        told = Written(lanes.slot_B, lanes.steps_B, pos_BS, tokens_BS, new_BS, filled_BS, open_BS, lambda: said)
        tell(step, told)
    return filled_BS, stop_BS.any(-1)
