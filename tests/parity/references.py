"""The rules of the references where they differ from what dinfer documents, as components that only parity uses."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from dinfer.core.abilities.registry import ABILITIES
from dinfer.core.decoders.editing import JointThreshold
from dinfer.core.decoders.schedule import Fixed
from dinfer.core.decoders.threshold import Threshold, confident
from dinfer.core.iterations.sweep import BlockSweep, Blockwise
from dinfer.core.kernels.attention import attention_interval
from dinfer.core.kernels.selection import descending_rank
from dinfer.core.recipe.recipe import Recipe
from dinfer.core.registry import SAMPLINGS, Registry
from dinfer.core.step.ability import Ability, Seen, Step
from dinfer.core.step.contracts import (
    BlockAfter,
    CachePolicy,
    Edit,
    ModelSpec,
    Moved,
    Proposal,
    State,
    TokenStats,
    WindowPlan,
)
from dinfer.core.step.cursors import BlockView, Phase, RowCursors
from dinfer.core.step.mixins import Adjusts, CanvasRows, Chooses
from dinfer.core.step.model import Parts
from dinfer.core.step.shape import StepShape
from dinfer.research.caches.widths import VicinityCache
from dinfer.research.decoders.confidence import Factor
from dinfer.research.decoders.editing import DMax
from dinfer.research.decoders.history import Credit
from dinfer.research.iterations.multi_block import DMaxSweep, MultiBlock
from dinfer.research.iterations.smooth import Smooth


class DinferRule:
    """dInfer's threshold: positions that the mask token wins are left out before anything else.

    Where none reaches the threshold, all within 1e-5 of the best are committed.
    """

    def select(self, stats: TokenStats, view: BlockView, state: State) -> Proposal:
        candidate_RL = view.masked_RL & ~stats.declined_RL
        score_RL = stats.confidence_RL.masked_fill(~candidate_RL, -1.0)
        bar_R1 = view.bar(view.options["threshold"]).to(score_RL.dtype)
        least_R1 = torch.minimum(bar_R1, score_RL.amax(-1, keepdim=True) - 1e-5)
        return Proposal(candidate_RL & (score_RL >= least_R1))


class DinferThreshold(DinferRule, Threshold):
    """dInfer's threshold."""


class DinferCredit(DinferRule, Credit):
    """Credit decoding with dInfer's threshold."""


class SglangThreshold(Threshold):
    """SGLang's threshold: a token must be surer than it, not as sure."""

    def select(self, stats: TokenStats, view: BlockView, state: State) -> Proposal:
        bar_R1, least_R1 = view.bar(view.options["threshold"]), view.at_least(view.options["least"])
        return Proposal(confident(stats, view.masked_RL, bar_R1, least=least_R1, above=True))


class DiffulexThreshold(SglangThreshold):
    """The same, with the mask token taken as impossible."""

    suppress_mask = True


@dataclass(frozen=True, kw_only=True)
class D2fThreshold(Threshold):
    """A token must be surer than the threshold. Where none is, the best one by another score is committed."""

    score: str = "default"

    @property
    def needs(self) -> tuple[str, ...]:
        return {"default": (), "neg_entropy": ("entropy",), "margin_confidence": ("margin",)}[self.score]

    def select(self, stats: TokenStats, view: BlockView, state: State) -> Proposal:
        sure_RL = confident(stats, view.masked_RL, view.bar(view.options["threshold"]), least=0, above=True)
        if self.score == "neg_entropy":
            score_RL = -stats.stat("entropy")
        else:
            score_RL = stats.stat("margin") if self.score == "margin_confidence" else stats.top_RL
        score_RL = score_RL.masked_fill(~view.masked_RL, -math.inf)
        needy_R1 = view.at_least(view.options["least"]) * ~sure_RL.any(-1, keepdim=True)
        return Proposal(sure_RL | (descending_rank(score_RL) < needy_R1) & view.masked_RL)


@dataclass(frozen=True, kw_only=True)
class LopaThreshold(D2fThreshold, Adjusts):
    """The first open position is decoded by the logits of the pass that stored the keys before it, for good."""

    blocks: int

    def fresh_state(self, spec: ModelSpec, block: int) -> State:
        return {"row": torch.zeros(spec.vocab), "held": torch.zeros((), dtype=torch.bool)}

    def adjust(self, logits_RLV: Tensor, view: BlockView, state: State) -> Tensor:
        first_R1 = (torch.arange(len(logits_RLV), device=logits_RLV.device) % self.blocks == 0)[:, None]
        held_R1 = state["held"][:, None]
        row_RV = torch.where(held_R1 & first_R1, state["row"], logits_RLV[:, 0])
        state["row"].copy_(row_RV)
        state["held"] |= first_R1[:, 0]
        return torch.cat((row_RV[:, None], logits_RLV[:, 1:]), 1)


@dataclass(frozen=True, kw_only=True)
class LopaCache(CachePolicy, Chooses):
    """Keys before the active blocks stay as the pass after their block was finished left them, whatever they saw."""

    def plan(self, phase: Phase) -> WindowPlan:
        return WindowPlan(None, 1, chosen=True)

    def fresh_state(self, spec: ModelSpec, length: int) -> State:
        return {"kept": torch.zeros((), dtype=torch.int64)}

    def choose(self, lanes: RowCursors, rows: CanvasRows, spec: ModelSpec, phase: Phase, state: State) -> Tensor:
        pos_S = torch.arange(rows.tokens_BS.shape[1], device=lanes.slot_B.device)
        flags_BS = pos_S >= state["kept"][:, None]
        state["kept"].copy_(lanes.start_B)
        return flags_BS

    def needs_full_pass(self, lanes: RowCursors, moved: Moved, phase: Phase, state: State) -> bool:
        return False


class EndsSight(Ability):
    """With `LopaCache`, nobody sees what is behind the active blocks."""

    @classmethod
    def of(cls, recipe: Parts, shape: StepShape) -> Self | None:
        return cls() if isinstance(recipe.cache, LopaCache) else None

    def seen(self, step: Step, lanes: RowCursors, place_BW: Tensor) -> Seen:
        return Seen(attention_interval(place_BW, None, lanes.end_B, step.recipe.model.spec.causal_block, None))


class ReferenceRecipe(Recipe):
    """A recipe whose steps ask the abilities of this module too, and whose decoder may say `suppress_mask`."""

    abilities = (EndsSight, *ABILITIES.ordered())

    def __post_init__(self) -> None:
        if getattr(self.decoder, "suppress_mask", False):
            object.__setattr__(self, "sampling", SAMPLINGS.build({"name": "standard", "suppress_mask": True}))
        super().__post_init__()


class D2CacheFactor(Factor):
    """The last rank is never taken with the others, and a rank that is exactly sure enough is not."""

    def select(self, stats: TokenStats, view: BlockView, state: State) -> Proposal:
        score_RL = stats.top_RL.masked_fill(~view.masked_RL, -1.0)
        rank_RL, count_R1 = descending_rank(score_RL), view.masked_RL.sum(-1, keepdim=True)
        fails_RL = (rank_RL + 2) * (1 - score_RL) >= view.options["factor"]
        first_R1 = torch.where(fails_RL | (rank_RL == count_R1 - 1), rank_RL, count_R1).amin(-1, keepdim=True)
        return Proposal((rank_RL < first_R1.clamp_min(1)) & view.masked_RL & ~stats.declined_RL)


class SglangJointThreshold(JointThreshold):
    """A block that changed in its last step of editing makes one more forward, which is idle."""

    def select(self, stats: TokenStats, view: BlockView, state: State) -> Proposal:
        found = super().select(stats, view, state)
        assert found.edit.remask_RL is not None
        return replace(found, busy_R=(found.commit_RL | found.edit.remask_RL).any(-1))


class DiffulexJointThreshold(JointThreshold):
    """A block is ready once nothing is left to write, or when its time is up, and then everything is written."""

    def select(self, stats: TokenStats, view: BlockView, state: State) -> Proposal:
        full_R = ~view.masked_RL.any(-1)
        state["post_edits"] += full_R
        budget_R, begun_R = view.options["post_edits"][:, 0], (view.given_RL & (view.pos_RL >= 0)).any(-1)
        late_R = view.step_R + begun_R >= view.pos_RL.shape[1] + budget_R
        fill_RL = confident(stats, view.masked_RL, view.options["threshold"], least=1, above=True)
        fill_RL = fill_RL | (late_R[:, None] & view.masked_RL & ~stats.declined_RL)
        edit_RL = ~view.masked_RL & ~view.given_RL & (stats.top_RL > view.options["edit_threshold"])
        remask_RL, edit_RL = edit_RL & stats.declined_RL, edit_RL & (stats.token_RL != view.tokens_RL)
        edit_RL = edit_RL & ~stats.declined_RL
        spent_R1 = (full_R & (state["post_edits"] > budget_R) & ~late_R)[:, None]
        chosen_RL, remask_RL = (fill_RL | edit_RL) & ~spent_R1, remask_RL & ~spent_R1
        busy_R = (chosen_RL | remask_RL).any(-1) & ~late_R
        return Proposal(chosen_RL, busy_R=busy_R, edit=Edit(remask_RL=remask_RL, retry_R=torch.ones_like(full_R)))


@dataclass(frozen=True, kw_only=True)
class DiffulexMultiBlock(MultiBlock):
    """A stop token ends a row as soon as no mask is left, whatever the decoder would still edit.

    Behind what was the last block when there was a stop token, none opens before all have left, even if the token was
    edited away. `forces`: where no token is sure, the best one is committed, even if the mask token wins.
    """

    forces: bool = True

    def must_progress(self, lanes: RowCursors, open_BKL: Tensor) -> Tensor:
        must_BK = super().must_progress(lanes, open_BKL)
        return must_BK if self.forces else torch.zeros_like(must_BK)

    def fresh_state(self, spec: ModelSpec, length: int) -> State:
        return {"last": torch.zeros((), dtype=torch.int64)}

    def advance(self, lanes: RowCursors, after: BlockAfter, state: State) -> Moved:
        stopped_B = (after.stop_BKL & ~after.given_BKL).flatten(1).any(-1) & (self.stop != "off")
        state["last"].copy_(torch.where(stopped_B, lanes.end_B, state["last"]))
        whole_B = stopped_B & ~after.open_BKL.flatten(1).any(-1)
        return super().advance(lanes, replace(after, finished_BK=after.finished_BK | whole_B[:, None]), state)

    def holds(self, lanes: RowCursors, state: State) -> Tensor:
        return state["last"] == lanes.end_B


@dataclass(frozen=True, kw_only=True)
class DiffulexDMax(DMax):
    """The mask token may replace any token. `fast`: what stood there counts as certain; else prompts are judged too."""

    fast: bool = True

    def select(self, stats: TokenStats, view: BlockView, state: State) -> Proposal:
        found = super().select(stats, replace(view, must_progress_R=None), state)
        return replace(found, edit=replace(found.edit, retry_R=torch.ones_like(view.masked_RL[:, 0])))

    def judged(self, view: BlockView) -> Tensor:
        return super().judged(view) if self.fast else ~view.masked_RL & (view.pos_RL >= 0)

    def confidence(self, stats: TokenStats, view: BlockView) -> Tensor:
        return super().confidence(stats, view) if self.fast else stats.top_RL


@dataclass(frozen=True, kw_only=True)
class DiffulexDMaxSweep(DiffulexMultiBlock, DMaxSweep):
    """The same with mixtures. `fast`: of what stood there, the probability is 1, not that of the new prediction.

    The prompt's part of a block is judged with it, and is not predicted as it is.
    """

    fast: bool = True

    def fresh_state(self, spec: ModelSpec, length: int) -> State:
        return DiffulexMultiBlock.fresh_state(self, spec, length) | DMaxSweep.fresh_state(self, spec, length)

    def advance(self, lanes: RowCursors, after: BlockAfter, state: State) -> Moved:
        state["before"] = state["belief"].clone()
        return super().advance(lanes, after, state)

    def stability(self, lanes: RowCursors, after: BlockAfter, state: State) -> Tensor:
        stable_BK = super().stability(lanes, after, state)
        held_BX = state["before"].gather(1, self.places(lanes, after, state)) > 0
        held_BK, given_BK = held_BX.view_as(after.open_BKL).sum(-1), after.given_BKL.sum(-1)
        share_BK = held_BK / (held_BK + given_BK).clamp_min(1)
        return torch.where(given_BK > 0, stable_BK * share_BK, stable_BK)

    def belief(self, confidence_BX: Tensor, held_BX: Tensor) -> Tensor:
        return super().belief(confidence_BX, held_BX) if self.fast else confidence_BX


class FastdllmFactor(Factor):
    """If only the last rank fails, it is committed too."""

    def ranked(self, stats: TokenStats, view: BlockView) -> tuple[Tensor, Tensor]:
        rank_RL, count_R1 = super().ranked(stats, view)
        masks_R1 = view.masked_RL.sum(-1, keepdim=True)
        return rank_RL, torch.where(count_R1 == masks_R1 - 1, masks_R1, count_R1)


@dataclass(frozen=True, kw_only=True)
class DinferSweep(BlockSweep):
    """Stop tokens of the prompt count too.

    `linger`: after so many forwards, a pass that refreshes keys is followed by a window pass even if the block is
    finished; None: none is. `lockstep`: rows of a batch enter their blocks together.
    """

    linger: int | None = None
    lockstep: bool = False

    def advance(self, lanes: RowCursors, after: BlockAfter, state: State) -> Moved:
        finished_BK = after.finished_BK
        if self.linger is not None:
            lingers_B = (lanes.phase_B == int(Phase.FULL)) & (lanes.forwards_B >= self.linger)
            finished_BK = finished_BK & ~lingers_B[:, None]
        if self.lockstep:
            finished_BK = finished_BK & (finished_BK.all(-1) | ~lanes.live_B).all()
        view = replace(after.view, given_RL=torch.zeros_like(after.view.given_RL))
        after = replace(after, finished_BK=finished_BK, view=view)
        return super().advance(lanes, after, state)


@dataclass(frozen=True, kw_only=True)
class DinferBlockwise(DinferSweep, Blockwise):
    """dInfer's BlockWise."""


@dataclass(frozen=True, kw_only=True)
class DinferSmooth(DinferSweep, Smooth):
    """dInfer's IterSmooth."""


class DinferVicinity(VicinityCache):
    """Keys first kept in a later block are refreshed once more there."""

    def fresh_state(self, spec: ModelSpec, length: int) -> State:
        no = torch.zeros((), dtype=torch.bool)
        return super().fresh_state(spec, length) | {"kept": no, "again": no}

    def needs_full_pass(self, lanes: RowCursors, moved: Moved, phase: Phase, state: State) -> Tensor:
        kept_B, again_B = state["kept"], state["again"]
        keeps_B = state["passes"] >= self.warmup
        full_B = super().needs_full_pass(lanes, moved, phase, state)
        if phase != Phase.FULL:
            full_B = full_B | again_B
            again_B.zero_()
            return full_B
        later_B = lanes.block_B - moved.entered_B.long() > 0
        again_B.copy_(keeps_B & ~kept_B & later_B & ~moved.entered_B)
        kept_B |= keeps_B
        return full_B


class A2dFixed(Fixed):
    """A2D's share of a step: what is left times a chance of its noise schedule, in its float32, half to even.

    Steps without a token are left out. A position where the mask token wins takes part, as any other.
    """

    def fresh_state(self, spec: ModelSpec, block: int) -> State:
        return {"taken": torch.zeros((), dtype=torch.int64)}

    def select(self, stats: TokenStats, view: BlockView, state: State) -> Proposal:
        steps_R1, left_R1 = view.options["steps"], view.masked_RL.sum(-1, keepdim=True)
        step_R1 = torch.maximum(state["taken"][:, None], steps_R1 - 2 * left_R1 + 1).clamp_max(steps_R1 - 1)
        now_R1, next_R1 = (1 - (steps_R1 - step_R1 - done).float() / steps_R1 for done in (0, 1))
        share_R1 = (left_R1.double() * (1 - (1 - next_R1) / (1 - now_R1)).double()).round().long()
        state["taken"].copy_(torch.where(left_R1 > share_R1, step_R1 + 1, 0)[:, 0])
        score_RL = stats.confidence_RL.masked_fill(~view.masked_RL, float("-inf"))
        return Proposal((descending_rank(score_RL) < share_R1) & view.masked_RL)


# The name of a component and the reference whose rule it has.
REFERENCES: dict[tuple[str, str], type] = {
    ("fixed", "a2d"): A2dFixed,
    ("threshold", "dinfer"): DinferThreshold,
    ("threshold", "sglang"): SglangThreshold,
    ("threshold", "diffulex"): DiffulexThreshold,
    ("threshold", "d2f"): D2fThreshold,
    ("threshold", "lopa"): LopaThreshold,
    ("none", "lopa"): LopaCache,
    ("credit", "dinfer"): DinferCredit,
    ("factor", "fastdllm"): FastdllmFactor,
    ("factor", "d2cache"): D2CacheFactor,
    ("joint_threshold", "sglang"): SglangJointThreshold,
    ("joint_threshold", "diffulex"): DiffulexJointThreshold,
    ("multi_block", "diffulex"): DiffulexMultiBlock,
    ("dmax", "diffulex"): DiffulexDMaxSweep,
    ("dmax", "diffulex_decoder"): DiffulexDMax,
    ("blockwise", "dinfer"): DinferBlockwise,
    ("smooth", "dinfer"): DinferSmooth,
    ("vicinity", "dinfer"): DinferVicinity,
}


def build(registry: Registry, config: Mapping[str, Any], **more: Any) -> Any:
    """A component as `Registry.build` makes it, or, if the mapping names a `reference`, with that one's rule.

    `more`: options that only the reference has.
    """
    options = dict(config)
    reference = options.pop("reference", None)
    fixed: dict[str, Any] = {name: options.pop(name) for name in ("precision", "suppress_mask") if name in options}
    options = dict(registry.check(options))
    name = options.pop("name")
    kind = registry.get(name) if reference is None else REFERENCES[name, reference]
    return type(kind.__name__, (kind,), fixed)(**options, **more) if fixed else kind(**options, **more)
