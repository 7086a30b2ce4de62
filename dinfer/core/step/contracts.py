"""The contracts of iterations, decoders and caches, and the data that passes between them.

Nothing here computes. Components depend on this module and on no other component: each returns a small piece of
data (which positions, what to feed, what to commit), and `dinfer.core.step.step.denoise_step` puts the pieces together.
Further base classes of components, such as `Edits` and `Slides`, each say one thing that few components do: see
`dinfer.core.step.mixins`. Shape suffixes as in `dinfer.core.step.cursors`.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

from torch import Tensor

from dinfer.core.options import check_options
from dinfer.core.step.cursors import BlockView, Phase, RowCursors
from dinfer.core.terms.plan import WindowPlan
from dinfer.core.terms.spec import ModelSpec
from dinfer.core.terms.stats import TokenStats

State = dict[str, Any]
"""What a component remembers from step to step: named tensors with a row for each lane, which it changes in place.

For decoders, a row is one active block. The step copies the rows of its lanes, and writes those of live lanes back. So
no component handles slots, padding or phases.
"""


class Large(NamedTuple):
    """State of a decoder that is too large to be copied, such as a number for each token of the vocabulary.

    The step passes it as `dinfer.core.kernels.canvas.Rows`, and does not reset it when a block begins.
    """

    fresh: Tensor


@dataclass(frozen=True, slots=True)
class Edit:
    """What a decoder asks for beside commits, if it derives from `Edits`."""

    # bool, decoded positions to mask again. Only rows that end the step with fewer masks do so, and those of `retry_R`.
    remask_RL: Tensor | None = None
    retry_R: Tensor | None = None  # bool, rows that may end with as many masks. The decoder limits how often
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


@dataclass(frozen=True, slots=True)
class BlockAfter:
    """The active blocks after this step's commits, as an iteration sees them."""

    view: BlockView  # the blocks before the commits
    stats: TokenStats  # what the decoder was shown
    stop_BKL: Tensor  # bool, the token ends an answer
    open_BKL: Tensor  # bool, still to be decoded
    finished_BK: Tensor  # bool, nothing is left to decode in the block
    next_B: Tensor  # the first open position behind the active blocks; the row's length if there is none

    @property
    def given_BKL(self) -> Tensor:
        """Part of the request, or padding."""
        return self.view.given_RL.view(self.open_BKL.shape)


@dataclass(frozen=True, slots=True)
class Moved:
    """Where an iteration moves its rows: cursors as `RowCursors` has them.

    With K > 1, block k begins at `start + k * L`. Blocks from `end` on are not open yet. Blocks leave from the first
    on, which `block_B` counts, and new ones enter behind the others. When a row enters a block, caches refresh its keys
    and its decoder begins anew. So `start_B` moves only as blocks leave, unless the iteration derives from `Slides`.
    """

    start_B: Tensor
    end_B: Tensor
    block_B: Tensor
    entered_BK: Tensor  # bool, block k of the row, counted after the move, is a new one
    done_B: Tensor  # bool, the row has nothing more to decode
    left_B: Tensor | None = None  # int64, how many blocks left. May be None if K = 1: then one left where one entered

    @property
    def entered_B(self) -> Tensor:
        """Rows that have other active blocks than before. bool [B]"""
        return self.entered_BK[:, 0] if self.left_B is None else self.entered_BK.any(-1) | (self.left_B > 0)


class Component(ABC):
    """What all components have in common."""

    kind: ClassVar[str]  # what settings and messages call it
    paper: ClassVar[str] = ""  # where the algorithm was published
    refusals: ClassVar[tuple[Any, ...]] = ()  # `dinfer.core.refusals.Refusal`: what it cannot go with

    def __post_init__(self) -> None:
        check_options(self.kind, self)

    def fitted(self, spec: ModelSpec) -> Self:
        """The same component for one model, with options filled in that were left open. Called before all else."""
        return self

    def incompatibility(self, spec: ModelSpec) -> str | None:
        """Why this component cannot be used with a model; None: it can. Called before any work.

        If another value of an option would do, the answer ends with that value ("Use cache.suffix=null."). Otherwise
        the message offers other components.
        """
        return None


class Decoder(Component):
    """Decides which positions of the active blocks to commit, and to what."""

    kind = "decoder"
    score: str = "low_confidence"  # what it orders positions by, see `TokenStats.surest`
    precision: ClassVar[str] = "float32"  # of the softmax that gives the statistics, as it was published

    @property
    def needs(self) -> tuple[str, ...]:
        """Which of the statistics "entropy", "margin" and "best" `select` reads. Others are not computed."""
        return (self.score,)

    def fresh_state(self, spec: ModelSpec, block: int) -> State:
        """The state of a block when a row enters it. Its tensors have no dimension R."""
        return {}

    @property
    def refuses(self) -> tuple[str, ...]:
        """Options of the sampling that this decoder cannot honour. A request that sets one is refused."""
        # `eos_last` takes the confidence of stop tokens as 0, so the score must be the confidence.
        return () if self.score == "low_confidence" else ("eos_last",)

    @abstractmethod
    def select(self, stats: TokenStats, view: BlockView, state: State) -> Proposal:
        """The positions to commit at this step. Changes `state` in place.

        `stats` are 0 where the decoder may not write: at all positions without a mask, or, if it edits, at given ones.
        With sampling, tokens are drawn at masks alone. At decoded positions the model's most likely token is proposed.
        """


class CachePolicy(Component):
    """Decides which positions to recompute, which keys to see, and when keys are out of date. Stores no keys."""

    kind = "cache"

    def fresh_state(self, spec: ModelSpec, length: int) -> State:
        """The state of a new request. Its tensors have no dimension B. A canvas has at most `length` positions."""
        return {}

    @abstractmethod
    def plan(self, phase: Phase) -> WindowPlan:
        """Which positions a step of `phase` computes. The host and the device both read this plan."""

    @abstractmethod
    def needs_full_pass(self, lanes: RowCursors, moved: Moved, phase: Phase, state: State) -> Tensor | bool:
        """Which unfinished rows must run a FULL pass next. The others run a WINDOW pass. bool [B], or one for all

        `phase`: of this step. `lanes`: where `moved` has put the rows; their counts do not have this step yet.
        """


class Iteration(Component):
    """Decides which part of the canvas is decoded when, and what the model is fed at masks."""

    kind = "iteration"
    blocks: int = 1  # K
    block: int = 0  # L; 0: as long as the generation

    def fresh_state(self, spec: ModelSpec, length: int) -> State:
        """The state of a new request. Its tensors have no dimension B. A canvas has at most `length` positions."""
        return {}

    @abstractmethod
    def first_region(self, prompt: int, length: int) -> tuple[int, int]:
        """The active region `[start, end)` a new request begins with. Host side."""

    @abstractmethod
    def advance(self, lanes: RowCursors, after: BlockAfter, state: State) -> Moved:
        """Where the rows go from here. Changes `state` in place."""
