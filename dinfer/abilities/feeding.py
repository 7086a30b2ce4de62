"""What a model is fed and sees beside tokens: by iterations that read earlier logits, and by models with an encoder."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

from torch import Tensor

from dinfer.kernels.attention import encoder_intervals, local_interval
from dinfer.kernels.canvas import take
from dinfer.memory import Seen
from dinfer.step.ability import Ability, Decision, Forward, Step
from dinfer.step.canvas import RowCursors
from dinfer.step.contracts import Iteration, State
from dinfer.step.model import Model
from dinfer.step.parts import Parts
from dinfer.step.scores import scored
from dinfer.step.shape import StepShape
from dinfer.step.stats import TokenStats


class Feeds(ABC):
    """An iteration that feeds more than tokens."""

    scores: ClassVar[Literal["window", "adjusted", "none"]] = "none"  # which logits it sees, see `observe`
    mixes: ClassVar[bool] = False  # feeds decoded tokens in mixtures, so no other request may have their keys

    @abstractmethod
    def embed(self, model: Model, tokens_BW: Tensor, pos_BW: Tensor, lanes: RowCursors, state: State) -> Tensor:
        """What the model is fed. [B, W, D] Reads `state` and never changes it: a prefill does not store it."""

    def observe(self, model: Model, logits_BWV: Tensor, pos_BW: Tensor, lanes: RowCursors, state: State) -> None:
        """Sees logits, after the commits: if `scores` is "window", those of the whole window; if "adjusted", those of
        the active blocks as the decoder has adjusted them, before any draw."""
        raise NotImplementedError(f"{type(self).__name__} has scores={self.scores!r}, so it must define `observe`")


def scores_of(iteration: Iteration) -> str:
    """Which logits an iteration sees: "window", "adjusted" or "none"."""
    return iteration.scores if isinstance(iteration, Feeds) else "none"


@dataclass(frozen=True)
class Feeding(Ability):
    """Asks the iteration what is fed, and shows it the logits: of the whole window, or as the decoder adjusted them."""

    sees: bool

    @property
    def whole_logits(self) -> bool:
        return self.sees

    @classmethod
    def of(cls, recipe: Parts, shape: StepShape) -> Self | None:
        return cls(scores_of(recipe.iteration) != "none") if isinstance(recipe.iteration, Feeds) else None

    def feed(self, step: Step, run: Forward) -> None:
        assert run.attend is not None, "the attention is made"
        model, iteration = step.recipe.model, step.recipe.iteration
        assert isinstance(iteration, Feeds)
        run.x_BWD = iteration.embed(model, run.tokens_BW, run.attend.pos_BW, step.lanes, step.iteration_state)

    def statistics(self, step: Step, made: Decision) -> TokenStats | None:
        run = made.known.run
        if run is None or scores_of(step.recipe.iteration) != "window":
            return None
        logits_BWV = step.notes[Feeding] = run.model.logits(run.h_BWD)
        return scored(step, made, take(logits_BWV, run.logits_RL))

    def written(self, step: Step, made: Decision) -> None:
        recipe, lanes, run = step.recipe, step.lanes, made.known.run
        iteration = recipe.iteration
        assert isinstance(iteration, Feeds)
        if iteration.scores == "adjusted":
            pos_BX = made.view.pos_RL.view(lanes.slot_B.shape[0], -1)
            logits_BXV = made.adjusted_RLV.reshape(*pos_BX.shape, recipe.model.spec.vocab)
            iteration.observe(recipe.model, logits_BXV, pos_BX, lanes, step.iteration_state)
        elif iteration.scores == "window" and run is not None:
            iteration.observe(run.model, step.notes[Feeding], run.pos_BW, lanes, step.iteration_state)


class Encoder(Ability):
    """What positions of a model with an encoder see."""

    @classmethod
    def of(cls, recipe: Parts, shape: StepShape) -> Self | None:
        return cls() if recipe.model.spec.encoder else None

    def seen(self, step: Step, lanes: RowCursors, place_BW: Tensor) -> Seen | None:
        local = step.recipe.model.spec.local
        context_BW, interval_BW = encoder_intervals(place_BW, lanes.start_B, lanes.end_B)
        if local is None:
            return interval_BW, None, context_BW
        return interval_BW, local_interval(interval_BW, place_BW, lanes.start_B, local.window), context_BW
