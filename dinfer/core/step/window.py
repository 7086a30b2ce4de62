"""The window of a step, made from the plan of the cache policy."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dinfer.core.kernels.canvas import span, window_positions
from dinfer.core.kernels.selection import compact
from dinfer.core.step.canvas import Canvas
from dinfer.core.step.contracts import CachePolicy, ModelSpec, State
from dinfer.core.step.cursors import Cursors, Phase, RowCursors, Status
from dinfer.core.step.model import Parts
from dinfer.core.step.shape import KeysOnly, StepShape
from dinfer.core.terms.plan import Place
from dinfer.core.terms.spec import AttentionLayout


class KeepsNothing:
    """A cache whose keys do not outlive the step that computed them."""


class CanvasRows(NamedTuple):
    """The canvases of the lanes of a step, as a cache sees them. The last column is scratch."""

    canvas: Canvas
    slot_B: Tensor

    @property
    def tokens_BS(self) -> Tensor:
        """int64 [B, S + 1]"""
        return self.canvas.tokens_NS.index_select(0, self.slot_B)

    @property
    def open_BS(self) -> Tensor:
        """Still to be decoded. bool [B, S + 1]"""
        return self.canvas.status_NS.index_select(0, self.slot_B) == int(Status.OPEN)


class Chooses(ABC):
    """A cache whose plan says `chosen`: it computes some positions of its window."""

    @abstractmethod
    def choose(self, lanes: RowCursors, rows: CanvasRows, spec: ModelSpec, phase: Phase, state: State) -> Tensor:
        """Which positions to compute. bool [B, S + 1]

        Changes `state` in place. It is stored after every pass, also if that decodes nothing.
        """


@dataclass(frozen=True, slots=True)
class Window:
    """The positions one step computes, -1 where a row has fewer than W."""

    pos_BW: Tensor  # int64, absolute positions
    place_BW: Tensor  # int64, where the row keeps their keys: at their positions, but for `WindowPlan.last`
    fits_B: Tensor  # bool: W is enough for the row, which otherwise sits the step out
    logit_place_RL: Tensor  # int64, where in W the logits that decode each active position are; -1: padding only
    kept_B: Tensor | None = None  # int64, `lanes.kept_B` once the forward has run; None: it stays what it was
    final_until_B: Tensor | None = None  # int64, `kept_B` after a pass for keys alone; -1: it decodes; None: all do
    stop_B: Tensor | None = None  # int64, the first place that nobody sees; None: as the cache says


def place(now: Cursors) -> Place[int]:
    """What the width of a row's window depends on. Host side."""
    return Place(now.start, now.end, now.length, now.kept, now.prompt, now.seen, now.start)


def places(lanes: RowCursors) -> Place[Tensor]:
    """What the width of each row's window depends on."""
    start_B = lanes.start_B
    return Place(start_B, lanes.end_B, lanes.length_B, lanes.kept_B, lanes.prompt_B, lanes.seen_B, start_B)


def window(
    cache: CachePolicy, lanes: RowCursors, canvas: Canvas, spec: ModelSpec, shape: StepShape, state: State
) -> Window:
    """The positions that a step computes; changes the cache's `state` in place."""
    plan, active = cache.plan(shape.phase), shape.blocks * shape.block
    if not plan.chosen:
        place_B = places(lanes)
        if plan.front:  # the first open position of the active region; its end, if none is
            pos_BX = span(lanes.start_B, lanes.end_B, active)
            open_BX = (canvas.gather(lanes.slot_B, pos_BX)[1] == int(Status.OPEN)) & (pos_BX >= 0)
            place_B = place_B._replace(mask=torch.where(open_BX, pos_BX, lanes.end_B[:, None]).amin(-1))
        pos_BW, fits_B, logits_BX, kept_B, final_until_B = window_positions(
            plan, place_B, spec.attention_layout, width=shape.width, active=active,
            prefill=shape.phase == Phase.PREFILL, keys_only=shape.extra(KeysOnly) is not None,
        )  # fmt: skip
        place_BW, stop_B = pos_BW, None
        if plan.last:
            stop_B = plan.bounds(places(lanes), spec.attention_layout)[1]
            pos_BW = torch.where(place_BW == stop_B[:, None] - 1, lanes.length_B[:, None] - 1, place_BW)
        return Window(pos_BW, place_BW, fits_B, logits_BX.view(-1, shape.block), kept_B, final_until_B, stop_B)
    if not isinstance(cache, Chooses):
        raise TypeError(f"{type(cache).__name__}.plan says `chosen`, so it must derive from Chooses")
    flags_BS = cache.choose(lanes, CanvasRows(canvas, lanes.slot_B), spec, shape.phase, state)
    first_B, stop_B, _ = plan.bounds(places(lanes), spec.attention_layout)
    pos_S = torch.arange(flags_BS.shape[1], device=flags_BS.device)
    pos_BW, place_BS = compact(flags_BS & (pos_S >= first_B[:, None]) & (pos_S < stop_B[:, None]), shape.width)
    pos_BX = span(lanes.start_B, lanes.end_B, active)
    logits_BX = torch.where(pos_BX >= 0, place_BS.gather(1, (pos_BX - spec.shift).clamp_min(0)), -1)
    fits_B = plan.width(places(lanes), lanes.forwards_B, spec.attention_layout) <= shape.width
    return Window(pos_BW, pos_BW, fits_B, logits_BX.clamp_max(shape.width - 1).view(-1, shape.block))


def deciding(recipe: Parts) -> Phase:
    """The phase of the passes that decide, once all keys are there."""
    return Phase.FULL if isinstance(recipe.cache, KeepsNothing) else Phase.WINDOW


def widest(recipe: Parts, block: int, length: int) -> int:
    """The most positions that such a pass computes for a row. `block`: L, `length`: of the canvas."""
    plan, region = recipe.cache.plan(deciding(recipe)), recipe.iteration.blocks * block
    region += 1 + (recipe.model.spec.attention_block or 1)  # logits that predict the next token; whole attention blocks
    if plan.keeps:  # the region before is computed once more
        return min(2 * region, length)
    return length if plan.back is None or plan.ahead is None else min(region + plan.back + plan.ahead, length)


def exact(cache: CachePolicy, layout: AttentionLayout, alignment: int) -> bool:
    """Whether every step sees the keys and values that a pass without a cache would compute.

    `layout`: `ModelSpec.attention_layout`. `alignment`: where active blocks begin and end (`Recipe.alignment`).
    """
    return isinstance(cache, KeepsNothing) or cache.plan(Phase.WINDOW).exact(layout, alignment)


def width_of(cache: CachePolicy, spec: ModelSpec, now: Cursors) -> int:
    """Positions that a step must have room for to compute what a row with these cursors needs. Host side.

    A prefill may be given less, any multiple of the attention block: it then goes on in the next step.
    """
    if now.phase == Phase.VERIFY:  # the block twice: filled with the draft, and as masks
        return 2 * (now.end - now.start)
    plan = cache.plan(Phase(now.phase))
    if now.phase == Phase.PREFILL:
        first, _, settled = plan.bounds(place(now), spec.attention_layout)
        return settled - first
    return plan.width(place(now), now.forwards, spec.attention_layout)


def prefilled(cache: CachePolicy, spec: ModelSpec, start: int) -> int:
    """The end of the positions that a prefill computes, if the active region begins at `start`. Host side.

    These keys depend on the tokens before them alone, so requests whose prompts begin alike may share them.
    """
    plan, at_start = cache.plan(Phase.PREFILL), Place(start, start, start, 0, start, 0, start)
    return plan.bounds(at_start, spec.attention_layout)[2] if plan.keeps else 0


def first_phase(cache: CachePolicy, spec: ModelSpec, start: int) -> Phase:
    """The first phase of a request, if its active region begins at `start`. Host side."""
    if not cache.plan(Phase.PREFILL).keeps:
        return Phase.FULL
    return Phase.PREFILL if prefilled(cache, spec, start) else Phase.WINDOW
