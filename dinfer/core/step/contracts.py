"""The contracts of iterations, decoders and caches, and the data that passes between them.

Nothing here computes. Components depend on this module and on no other component: each returns a small piece of
data (which positions, what to feed, what to commit), and `dinfer.core.step.step.denoise_step` puts the pieces together.

Shape suffixes, one letter a dimension, in order: N slots, B lanes (the rows of one step), K active blocks of a row, R =
B * K rows of blocks, L block length, S canvas length, W query positions of one forward, D hidden size, V vocabulary.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

from torch import Tensor

from dinfer.core.registry import check_options
from dinfer.core.step.cursors import BlockView, Phase, RowCursors
from dinfer.core.terms.plan import WindowPlan
from dinfer.core.terms.spec import ModelSpec
from dinfer.core.terms.stats import TokenStats

State = dict[str, Any]
"""Mutable state of a component: named tensors, one row a lane (decoder: a row of blocks), to be changed in place.

The step gathers the rows of its lanes and writes live ones back, so no component minds slots, padding or phases. What a
decoder's `fresh_state` wraps in `Large` is `dinfer.core.kernels.canvas.Rows` instead.
"""


class Large(NamedTuple):
    """Large state of a decoder: read and written in place, and not reset when a block begins."""

    fresh: Tensor


@dataclass(frozen=True, slots=True)
class Edit:
    """What a decoder that `Edits` asks for beside commits."""

    remask_RL: Tensor | None = None  # bool, decoded positions to mask again; not in a row that would gain no token
    retry_R: Tensor | None = None  # bool, rows that may gain none. The decoder limits how often this happens
    # int64. For each position, the position in the block from which its token moves here (-1: a new mask). All other
    # fields of a proposal use positions after the move.
    source_RL: Tensor | None = None
    length_R: Tensor | None = None  # int64, the length of the row from now on; only of decoders that grow


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a decoder asks for. The step, not the decoder, writes it."""

    commit_RL: Tensor  # bool; the step leaves out positions that may not be written
    token_RL: Tensor | None = None  # int64, what to write there; None: the tokens of the statistics
    busy_R: Tensor | None = None  # bool, rows that want another step although no mask is left
    edit: Edit = Edit()
    waits_R: Tensor | None = None  # bool, rows that need not commit in this step. The decoder limits how often
    verify_R: Tensor | None = None  # bool, rows whose draft a second pass checks before anything is committed
    # int64, what open positions hold until the next step; -1: fresh noise. Only for models without a mask token.
    draft_RL: Tensor | None = None


@dataclass(frozen=True, slots=True)
class BlockAfter:
    """The active blocks after this step's commits, as an iteration sees them."""

    view: BlockView  # the blocks before the commits
    stats: TokenStats  # what was proposed
    stop_BKL: Tensor  # bool: the token is one that ends an answer
    open_BKL: Tensor  # bool: still to be decoded
    finished_BK: Tensor  # bool: nothing is left to decode
    next_B: Tensor  # first position behind the active blocks that is to be decoded; the row's length if there is none

    @property
    def given_BKL(self) -> Tensor:
        """Part of the request, or padding."""
        return self.view.given_RL.view(self.open_BKL.shape)


@dataclass(frozen=True, slots=True)
class Moved:
    """Where an iteration moves its rows: cursors as `RowCursors` has them.

    With K > 1 block k begins at `start + k * L`; those from `end` on are not open yet. Blocks leave at the beginning,
    counted in `block_B`, and enter behind the others. `start_B` moves only as blocks leave, unless the iteration is one
    that `Slides`: where a block is entered, caches refresh keys and decoders begin anew.
    """

    start_B: Tensor
    end_B: Tensor
    block_B: Tensor
    entered_BK: Tensor  # bool, the active block, as it is counted now, is a new one
    done_B: Tensor  # bool, has nothing more to decode
    left_B: Tensor | None = None  # int64, how many of the first blocks left; None, for K = 1: one where one entered

    @property
    def entered_B(self) -> Tensor:
        """Rows whose active blocks are others now. bool [B]"""
        if self.left_B is None:
            return self.entered_BK[:, 0]
        return self.entered_BK.any(-1) | (self.left_B > 0)


class Component(ABC):
    """What all components have in common."""

    kind: ClassVar[str]  # what settings and messages call it
    paper: ClassVar[str] = ""  # where the algorithm was published
    refusals: ClassVar[tuple[Any, ...]] = ()  # `dinfer.core.refusals.Refusal`: what it cannot go with

    def __post_init__(self) -> None:
        check_options(self.kind, self)

    def fitted(self, spec: ModelSpec) -> Self:
        """The same for one model: options that it leaves open are filled in. Called before anything else."""
        return self

    def incompatibility(self, spec: ModelSpec) -> str | None:
        """Why it cannot be used with a model; None: it can. Called before any work.

        An option's fix belongs to it ("Use cache.suffix=null."). Without one, the message offers other components.
        """
        return None


class Decoder(Component):
    """Decides which positions of the active blocks to commit, and to what."""

    kind = "decoder"
    score: str = "low_confidence"  # what it orders positions by, see `TokenStats.surest`
    precision: ClassVar[str] = "float32"  # of the softmax behind the statistics, as published; see `Sampling.precision`

    @property
    def needs(self) -> tuple[str, ...]:
        """Which further statistics `select` reads: "entropy", "margin" and "best" are computed if they are named."""
        return (self.score,)

    def fresh_state(self, spec: ModelSpec, block: int) -> State:
        """State of a row that enters a block; tensors without the leading R."""
        return {}

    @property
    def refuses(self) -> tuple[str, ...]:
        """Options of the sampling that this decoder cannot honour; a request that sets one is refused."""
        # `eos_last` takes the confidence of stop tokens as 0, so the score must be the confidence.
        return () if self.score == "low_confidence" else ("eos_last",)

    @abstractmethod
    def select(self, stats: TokenStats, view: BlockView, state: State) -> Proposal:
        """The positions to commit at this step; changes `state` in place.

        Statistics are 0 where the decoder may not write: where nothing is masked, or, if it edits, at given tokens.
        Tokens are drawn at masks alone. At decoded positions the proposed token is the model's most likely one.
        """


class CachePolicy(Component):
    """Decides which positions to recompute, which keys to see, and when keys are out of date. Stores no keys."""

    kind = "cache"

    def fresh_state(self, spec: ModelSpec, length: int) -> State:
        """State of a row that enters, for canvases of at most `length` positions; tensors without the leading B."""
        return {}

    @abstractmethod
    def plan(self, phase: Phase) -> WindowPlan:
        """Which positions a step of `phase` computes, as data: host and device read the same integers."""

    @abstractmethod
    def needs_full_pass(self, lanes: RowCursors, moved: Moved, phase: Phase, state: State) -> Tensor | bool:
        """Which rows, if they are not done, need a FULL pass after a step of `phase`, and not a WINDOW pass.

        bool [B], or one for all. `lanes` counts this step not yet.
        """


class Iteration(Component):
    """Decides how the canvas is swept and what the model is fed at positions that are still masked."""

    kind = "iteration"
    blocks: int = 1  # K
    block: int = 0  # L; 0: as long as the generation

    def fresh_state(self, spec: ModelSpec, length: int) -> State:
        """State of a row that enters, for canvases of at most `length` positions; tensors without the leading B."""
        return {}

    @abstractmethod
    def first_region(self, prompt: int, length: int) -> tuple[int, int]:
        """The active region `[start, end)` a new request begins with. Host side."""

    @abstractmethod
    def advance(self, lanes: RowCursors, after: BlockAfter, state: State) -> Moved:
        """Where the rows go from here. Changes `state` in place."""
