"""What a model is fed and sees beside tokens, and what iterations and caches see of a forward."""

from dinfer.core.abilities.registry import ABILITIES
from dinfer.core.abilities.traits import REMEMBERS
from dinfer.core.kernels.canvas import take
from dinfer.core.refusals import Refusal, Trait
from dinfer.core.step.ability import ByPart, Decision, Forward, Step, TokenStats
from dinfer.core.step.cursors import Phase
from dinfer.core.step.mixins import Feeds, Moves
from dinfer.core.step.scores import scored


@ABILITIES.register("feeding")
class Feeding(ByPart[Feeds]):
    """Asks the iteration what is fed, and shows it the logits: of the whole window, or as the decoder adjusted them."""

    kind = Feeds
    refusals = (
        Refusal("{cache} computes the first masks, fed as tokens and masks, and {iteration} reads more.",
                cache=Trait(lambda cache: cache.plan(Phase.WINDOW).front > 0), iteration=REMEMBERS),
        Refusal("{decoder} moves tokens, and {iteration} remembers what it expects at each position.",
                decoder=Moves, iteration=REMEMBERS),
    )  # fmt: skip

    @property
    def whole_logits(self) -> bool:
        return self.part.scores != "none"

    def feed(self, step: Step, run: Forward) -> None:
        model, pos_BW = step.recipe.model, run.attend.pos_BW
        run.x_BWD = self.part.embed(model, run.tokens_BW, pos_BW, step.lanes, step.iteration_state)

    def statistics(self, step: Step, made: Decision) -> TokenStats | None:
        run = made.known.run
        if run is None or self.part.scores != "window":
            return None
        logits_BWV = step.notes[Feeding] = run.model.logits(run.h_BWD)
        return scored(step, made, take(logits_BWV, run.logit_place_RL))

    def written(self, step: Step, made: Decision) -> None:
        recipe, lanes, run, iteration = step.recipe, step.lanes, made.known.run, self.part
        if iteration.scores == "adjusted":
            pos_BX = made.view.pos_RL.view(lanes.slot_B.shape[0], -1)
            logits_BXV = made.adjusted_RLV.reshape(*pos_BX.shape, recipe.model.spec.vocab)
            iteration.observe(recipe.model, logits_BXV, pos_BX, lanes, step.iteration_state)
        elif iteration.scores == "window" and run is not None:
            iteration.observe(recipe.model, step.notes[Feeding], run.pos_BW, lanes, step.iteration_state)
