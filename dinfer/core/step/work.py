"""What passes through one step: the step itself, its forward, what it decides by, and the decision.

Abilities (`dinfer.core.step.ability`) read and replace these fields. Shape suffixes as in `dinfer.core.step.contracts`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeVar

from torch import Tensor

from dinfer.core.memory import PagedAttend, Seen
from dinfer.core.step.commits import Commits
from dinfer.core.step.contracts import Moved, Proposal, State
from dinfer.core.step.cursors import BlockView, Phase, RowCursors
from dinfer.core.step.mixins import KeepsNothing
from dinfer.core.step.model import Network, Parts
from dinfer.core.step.shape import StepShape
from dinfer.core.step.state import BatchState
from dinfer.core.step.window import Window
from dinfer.core.terms.stats import TokenStats

T = TypeVar("T")
SHAPES = 256  # whose abilities are remembered


@dataclass(slots=True)
class Step:
    """What one step works on: a recipe, the state of the batch, a shape, and the rows it names."""

    recipe: Parts
    state: BatchState
    shape: StepShape
    abilities: tuple[Any, ...]  # `dinfer.core.step.ability.Ability`: those that take part in it
    lanes: RowCursors  # replaced as rows leave the step or move on
    region: RowCursors  # the rows whose window is computed: `lanes`, if no ability computes that of another region
    iteration_state: State
    cache_state: State
    notes: dict[Any, Any] = field(default_factory=dict)  # what an ability hands from one of its hooks to the next

    @classmethod
    def of(cls, recipe: Parts, state: BatchState, shape: StepShape, slot_B: Tensor) -> Self:
        if (abilities := state.resolved.get(shape)) is None:
            found = (kind.of(recipe, shape) for kind in recipe.abilities)
            if len(state.resolved) == SHAPES:  # without graphs, shapes are as many as mixtures of requests
                state.resolved.clear()
            abilities = state.resolved[shape] = tuple(ability for ability in found if ability is not None)
        lanes = state.canvas.lanes(slot_B, shape.phase)
        states = state.iteration.lanes(slot_B), state.cache.lanes(slot_B)
        return cls(recipe, state, shape, abilities, lanes, lanes, *states)

    def kept(self, kind: type[Any]) -> Any:
        """What an ability keeps for all slots, see `Ability.alloc`."""
        return self.state.kept[kind]

    @property
    def refreshes(self) -> bool:
        """It is a full pass whose keys are kept."""
        return self.shape.phase == Phase.FULL and not isinstance(self.recipe.cache, KeepsNothing)

    def narrow(self, live_B: Tensor) -> None:
        """Takes all other rows out of the step."""
        self.lanes = replace(self.lanes, live_B=live_B)


@dataclass(slots=True)
class Forward:
    """One pass of the network: what it computes, and what it leaves."""

    model: Network  # of this step
    window: Window
    pos_BW: Tensor
    place_BW: Tensor
    tokens_BW: Tensor
    status_BW: Tensor
    seen: Seen
    logits_RL: Tensor  # where in W the hidden states are that decode the active blocks
    attend: PagedAttend = field(init=False)  # of the lanes
    fed: PagedAttend | None = None  # what the model is given, if not `attend`
    x_BWD: Tensor | None = None  # what it is fed; None: the embedded tokens
    needed_BX: Tensor | None = None  # which of the hidden states are read; None: all
    decodes: bool = True  # False: it computes keys, and there is nothing to decide
    h_BWD: Tensor = field(init=False)


@dataclass(slots=True)
class Known:
    """What a decision goes by: a forward, or the logits of the active blocks."""

    run: Forward | None = None
    logits_RLV: Tensor | None = None
    hit: bool = False  # no forward is counted for it
    gained_B: Tensor | None = None  # int64, tokens committed on the way to it
    opened_BK: Tensor | None = None  # bool, active blocks that are new since the last decision


@dataclass(slots=True)
class Decision:
    """What is decided in the lanes of a step, as far as it has come."""

    known: Known
    lanes: RowCursors  # as they are before the decision
    view: BlockView
    row_R: Tensor  # where the decoder's state of each block is
    decoder_state: State
    stats: TokenStats = field(init=False)
    adjusted_RLV: Tensor = field(init=False)  # logits that the statistics were taken of
    proposal: Proposal = field(init=False)
    commits: Commits = field(init=False)
    moved: Moved = field(init=False)


def first(answers: Iterable[T | None]) -> T | None:
    """The answer of the first ability that has one; None: none has, and the step does what it always does."""
    return next((answer for answer in answers if answer is not None), None)
