"""What a step leaves out: hidden states and logits that nobody reads, and rows whose keys it computes alone."""

from __future__ import annotations

from dataclasses import dataclass, is_dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from dinfer.core.abilities.registry import ABILITIES
from dinfer.core.kernels.canvas import rows_of, take
from dinfer.core.kernels.selection import compact
from dinfer.core.registry import values_of
from dinfer.core.step.ability import Ability, ByExtra, Decision, Extra, Forward, Parts, Step, StepShape, TokenStats
from dinfer.core.step.cursors import Phase
from dinfer.core.step.mixins import Adjusts, Edits, LeavesMasks, ReadsForward, scores_of
from dinfer.core.step.scores import proposed_tokens, read_logits, statistics
from dinfer.core.step.shape import KeysOnly, Planned, Sampled
from dinfer.speed.abilities.slices import Sliced

FEWEST = 64  # skip unread positions only if there are at least so many, since skipping adds a few kernels


@ABILITIES.register("read_positions", after=("key_passes",))
class ReadPositions(Ability):
    """Says which of the W hidden states are read, once all keys and values are kept.

    Of a prefill that decodes nothing none are, of other passes those whose logits decode the active blocks. Who
    keeps queries needs them all, some iterations all logits, and experts of limited capacity choose by all tokens
    of an attention block. Where rows are sliced, their active blocks are in several lanes.
    """

    @classmethod
    def of(cls, recipe: Parts, shape: StepShape) -> Self | None:
        experts = recipe.model.spec.experts
        everywhere = experts is not None and experts.capacity is not None
        few = shape.lanes * (shape.width - shape.blocks * shape.block) < FEWEST
        window = scores_of(recipe.iteration) == "window" and shape.phase != Phase.PREFILL
        return None if everywhere or few or window or shape.extra(Sliced) else cls()

    def feed(self, step: Step, run: Forward) -> None:
        lanes, logit_place_RL = step.shape.lanes, run.logit_place_RL
        if run.attend.queries is not None:
            return
        if step.shape.phase == Phase.PREFILL and run.window.final_until_B is not None:
            run.needed_BX = logit_place_RL.new_empty(lanes, 0)
        elif scores_of(step.recipe.iteration) != "window":
            run.needed_BX = logit_place_RL.clamp_min(0).view(lanes, -1)

    def ran(self, step: Step, run: Forward) -> None:
        h_BWD, shape = run.h_BWD, step.shape
        if run.decodes and run.needed_BX is not None and h_BWD.shape[1] == run.needed_BX.shape[1]:  # no other is there
            place_X = torch.arange(h_BWD.shape[1], device=h_BWD.device)
            place_RL = place_X.view(-1, shape.block).repeat(shape.lanes, 1)
            leaves = isinstance(step.recipe.cache, LeavesMasks)
            run.logit_place_RL = torch.where(run.logit_place_RL < 0, -1, place_RL) if leaves else place_RL


SHARES = 8  # the number of positions with logits is rounded up to eighths of those that may have some


@dataclass(frozen=True, slots=True)
class OpenOnly(Extra):
    """So many open positions get logits, over all lanes, `TOGETHER` at a time. Without it, whole active blocks do."""

    count: int
    narrows: ClassVar[bool] = True
    repeats: ClassVar[bool] = False

    def bucket(self, shape: StepShape, vocab: int) -> OpenOnly:
        whole = shape.lanes * shape.blocks * shape.block
        share = -(-min(whole, shape.lanes * shape.width) // SHARES)
        return OpenOnly(min(-(-self.count // share) * share, whole))

    def kernels(self) -> OpenOnly:
        return OpenOnly(1)

    def holds(self, asked: Self | None, own: StepShape, shape: StepShape) -> bool:
        most = shape.lanes * min(shape.width, shape.blocks * shape.block) if asked is None else asked.count
        return most <= self.count


TOGETHER = 1024  # positions whose logits are in memory at a time; fewer would leave a product's tiles idle
MANY = 1024  # positions of active blocks from which on the LM head runs on the open ones alone


def scores_open(recipe: Parts) -> bool:
    """Whether the logits of open positions are all that a step without a draw or guidance needs.

    A row for which there is no room repeats its step. A cache that watches values change must not see that.
    """
    reads = isinstance(recipe.decoder, Adjusts | Edits) or scores_of(recipe.iteration) != "none"
    return not reads and not isinstance(recipe.cache, ReadsForward)


@ABILITIES.register("open_positions", after=("branches", "slices", "speculation"))
class OpenPositions(ByExtra[OpenOnly]):
    """Takes the statistics of open positions. Rows whose open positions do not all fit sit the step out."""

    kind = OpenOnly

    @classmethod
    def adds(cls, recipe: Parts, shape: StepShape, planned: Planned) -> Extra | None:
        most = planned.rows * shape.blocks * shape.block
        plain = shape.phase in (Phase.FULL, Phase.WINDOW) and not any(extra.whole_logits for extra in shape.extras)
        if not (most >= MANY and plain and scores_open(recipe)):
            return None
        count = planned.open()
        return OpenOnly(min(count, most)) if count > 0 else None

    def statistics(self, step: Step, made: Decision) -> TokenStats | None:
        run, view, blocks, live_B = made.known.run, made.view, step.shape.blocks, step.lanes.live_B
        count = self.extra.count
        if run is None or any(ability.whole_logits for ability in step.abilities):  # one that no extra stands for
            return None
        (rows, length), width = view.masked_RL.shape, run.h_BWD.shape[1]
        flags_RL = view.masked_RL & (run.logit_place_RL >= 0) & rows_of(live_B, blocks)[:, None]
        index_1M, place_1X = compact(flags_RL.view(1, -1), count)
        fits_B = (place_1X < count).view(live_B.shape[0], -1).all(-1)
        lane_R = torch.arange(rows, device=live_B.device)[:, None] // blocks
        where_X = (run.logit_place_RL.clamp_min(0) + lane_R * width).flatten()
        h_1MD = run.h_BWD.flatten(0, 1).index_select(0, where_X.index_select(0, index_1M[0].clamp_min(0)))[None]
        parts = zip(h_1MD.split(TOGETHER, 1), (index_1M >= 0).split(TOGETHER, 1), strict=True)
        found = [self._scored(step, made, *part) for part in parts]
        back_X = place_1X[0].clamp(0, count - 1)

        def placed(*stats_1M: Tensor) -> Tensor:
            stat_M = (stats_1M[0] if len(stats_1M) == 1 else torch.cat(stats_1M, 1))[0]
            return stat_M.index_select(0, back_X).view(rows, length).masked_fill(~flags_RL, 0)

        step.narrow(live_B & fits_B)
        return found[0].each(placed, *found[1:])

    def _scored(self, step: Step, made: Decision, h_1MD: Tensor, wanted_1M: Tensor) -> TokenStats:
        """The statistics of some positions, in no order of the view's."""
        assert made.known.run is not None
        logits_1MV = read_logits(step, made.known.run.model, h_1MD)
        for ability in step.abilities:
            logits_1MV = ability.allow(step, made.view, logits_1MV)
        return statistics(step, logits_1MV, wanted_1M)


@ABILITIES.register("drawn_parts", after=("open_positions",))
class DrawnParts(Ability):
    """Takes the logits of a few rows at a time where some row draws, since a draw needs several copies of them."""

    @classmethod
    def of(cls, recipe: Parts, shape: StepShape) -> Self | None:
        large = shape.phase in (Phase.FULL, Phase.WINDOW) and shape.lanes * shape.blocks * shape.block > MANY
        whole = {type(extra) for extra in shape.extras if extra.whole_logits}
        return cls() if large and whole == {Sampled} and not shape.versions and scores_open(recipe) else None

    def statistics(self, step: Step, made: Decision) -> TokenStats | None:
        run, shape, found = made.known.run, step.shape, list[TokenStats]()
        if run is None or any(ability.whole_logits for ability in step.abilities):
            return None
        each = max(TOGETHER // (shape.blocks * shape.block), 1)
        for first in range(0, shape.lanes, each):
            lanes, rows = slice(first, first + each), slice(first * shape.blocks, (first + each) * shape.blocks)
            logits_RLV = read_logits(step, run.model, take(run.h_BWD[lanes], run.logit_place_RL[rows]))
            of_rows = part(step.lanes, lanes), part(made.view, rows)
            found.append(proposed_tokens(step, *of_rows, logits_RLV, made.decoder_state)[0])
        return found[0].each(lambda *stats_RL: torch.cat(stats_RL), *found[1:])


def part(of: Any, rows: slice) -> Any:
    """Some rows of a tensor, or of all tensors within."""
    if isinstance(of, torch.Tensor):
        return of[rows]
    if isinstance(of, dict):
        return {name: part(value, rows) for name, value in of.items()}
    return replace(of, **part(values_of(of), rows)) if is_dataclass(of) and not isinstance(of, type) else of


@ABILITIES.register("key_passes", after=("following", "watching"))
class KeyPasses(Ability):
    """Stores the cursors of such rows after the forward, and takes them out of the step."""

    @classmethod
    def of(cls, recipe: Parts, shape: StepShape) -> Self | None:
        return cls() if shape.phase == Phase.PREFILL or shape.extra(KeysOnly) else None

    def ran(self, step: Step, run: Forward) -> None:
        final_until_B, lanes, prefill = run.window.final_until_B, step.lanes, step.shape.phase == Phase.PREFILL
        if final_until_B is None:  # the cache has none
            return
        kept_B = lanes.kept_B if run.window.kept_B is None else run.window.kept_B
        rest_B = (final_until_B < kept_B) & prefill  # a prefill continues in the next step where keys are missing
        passed = replace(
            lanes,
            live_B=lanes.live_B & (final_until_B >= 0),
            kept_B=final_until_B,
            forwards_B=lanes.forwards_B + 1,
            phase_B=torch.where(rest_B, int(Phase.PREFILL), int(Phase.WINDOW)),
        )
        step.state.canvas.store(passed)
        step.state.cache.store(lanes.slot_B, step.cache_state, passed.live_B)
        run.decodes = not prefill
        if run.decodes:
            step.narrow(lanes.live_B & ~passed.live_B)
