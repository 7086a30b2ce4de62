"""What passes through one step: the step itself, its forward, what it decides by, and the decision.

Abilities (`dinfer.core.step.ability`) read and replace these fields. Shape suffixes as in `dinfer.core.step.cursors`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeVar

from torch import Tensor

from dinfer.core.memory import PagedAttend, Seen
from dinfer.core.step.commits import Commits
from dinfer.core.step.contracts import Moved, Proposal, State
from dinfer.core.step.cursors import BlockView, Phase, RowCursors
from dinfer.core.step.model import Network, Parts
from dinfer.core.step.shape import StepShape
from dinfer.core.step.state import BatchState
from dinfer.core.step.window import KeepsNothing, Window
from dinfer.core.terms.stats import TokenStats

T = TypeVar("T")


@dataclass(slots=True)
class Step:
    """What one step works on: a recipe, the state of the batch, a shape, and the rows it names."""

    recipe: Parts
    state: BatchState
    shape: StepShape
    abilities: tuple[Any, ...]  # `dinfer.core.step.ability.Ability`: those that take part in it
    lanes: RowCursors  # replaced as rows leave the step or move on
    region: RowCursors  # the rows as the window is planned for them: `lanes`, unless an ability has another region
    iteration_state: State
    cache_state: State
    notes: dict[Any, Any] = field(default_factory=dict)  # what an ability hands from one of its hooks to the next

    @classmethod
    def of(cls, recipe: Parts, state: BatchState, shape: StepShape, slot_B: Tensor) -> Self:
        lanes = state.canvas.lanes(slot_B, shape.phase)
        states = state.iteration.lanes(slot_B), state.cache.lanes(slot_B)
        return cls(recipe, state, shape, state.abilities(recipe, shape), lanes, lanes, *states)

    def kept(self, kind: type[Any]) -> Any:
        """What an ability keeps for all slots, see `Ability.alloc`."""
        return self.state.kept[kind]

    @property
    def refreshes(self) -> bool:
        """Whether this step is a full pass whose keys are kept."""
        return self.shape.phase == Phase.FULL and not isinstance(self.recipe.cache, KeepsNothing)

    def narrow(self, live_B: Tensor) -> None:
        """Leaves these rows alone in the step."""
        self.lanes = replace(self.lanes, live_B=live_B)


@dataclass(slots=True)
class Forward:
    """One pass of the network: what it computes, and what it leaves."""

    model: Network  # that runs in this step
    window: Window
    pos_BW: Tensor  # int64, the positions of the live rows; -1: padding
    place_BW: Tensor  # int64, where the row keeps their keys
    tokens_BW: Tensor
    status_BW: Tensor
    seen: Seen
    logit_place_RL: Tensor  # int64, for each position of the active blocks, which of the W hidden states decodes it
    attend: PagedAttend = field(init=False)  # attention of the window
    fed: PagedAttend | None = None  # another attention, which the network is given in its place
    x_BWD: Tensor | None = None  # what the network is fed; None: the embedded tokens
    needed_BX: Tensor | None = None  # which of the W hidden states are read; None: all
    decodes: bool = True  # False: the pass computes keys alone, and there is nothing to decide
    h_BWD: Tensor = field(init=False)  # what the network returns


@dataclass(slots=True)
class Known:
    """What a decision is made from: a forward, or logits of the active blocks that an ability has at hand."""

    run: Forward | None = None
    logits_RLV: Tensor | None = None
    hit: bool = False  # no forward is counted for it
    gained_B: Tensor | None = None  # int64, tokens that were committed between the last decision and this one
    opened_BK: Tensor | None = None  # bool, active blocks that were entered between them


@dataclass(slots=True)
class Decision:
    """What a step decides. The fields without a value are set one after the other."""

    known: Known
    lanes: RowCursors  # the rows before the decision
    view: BlockView
    row_R: Tensor  # int64, where the decoder keeps the state of each block
    decoder_state: State
    stats: TokenStats = field(init=False)
    adjusted_RLV: Tensor = field(init=False)  # the logits that `stats` describe
    proposal: Proposal = field(init=False)
    commits: Commits = field(init=False)
    moved: Moved = field(init=False)


def first(answers: Iterable[T | None]) -> T | None:
    """The answer of the first ability that has one; None: none has, and the step does what it always does."""
    return next((answer for answer in answers if answer is not None), None)
