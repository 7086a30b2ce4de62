"""Iterations that feed the model more than tokens, by the logits of earlier steps."""

from typing import Self

from dinfer.kernels.canvas import take
from dinfer.step.ability import Ability, Decision, Forward, Step
from dinfer.step.contracts import Iteration, Parts
from dinfer.step.scores import scored
from dinfer.step.shape import StepShape
from dinfer.step.stats import TokenStats


class Feeding(Ability):
    """Asks the iteration what is fed, and shows it the logits: of the whole window, or as the decoder adjusted them."""

    @property
    def whole_logits(self) -> bool:
        return True

    @classmethod
    def of(cls, recipe: Parts, shape: StepShape) -> Self | None:
        return None if type(recipe.iteration).embed is Iteration.embed and recipe.iteration.scores == "block" else cls()

    def feed(self, step: Step, run: Forward) -> None:
        assert run.attend is not None, "the attention is made"
        model, iteration = step.recipe.model, step.recipe.iteration
        run.x_BWD = iteration.embed(model, run.tokens_BW, run.attend.pos_BW, step.lanes, step.iteration_state)

    def statistics(self, step: Step, made: Decision) -> TokenStats | None:
        run = made.known.run
        if run is None or step.recipe.iteration.scores != "window":
            return None
        logits_BWV = step.notes[Feeding] = run.model.logits(run.h_BWD)
        return scored(step, made, take(logits_BWV, run.logits_RL))

    def written(self, step: Step, made: Decision) -> None:
        recipe, lanes, run = step.recipe, step.lanes, made.known.run
        if recipe.iteration.scores == "adjusted":
            pos_BX = made.view.pos_RL.view(lanes.slot_B.shape[0], -1)
            logits_BXV = made.adjusted_RLV.reshape(*pos_BX.shape, recipe.model.spec.vocab)
            recipe.iteration.observe(recipe.model, logits_BXV, pos_BX, lanes, step.iteration_state)
        elif recipe.iteration.scores == "window" and run is not None:
            recipe.iteration.observe(run.model, step.notes[Feeding], run.pos_BW, lanes, step.iteration_state)
