"""What a model is fed and sees beside tokens, and what iterations and caches see of a forward."""

from dataclasses import replace
from functools import partial
from typing import Self

from torch import Tensor

from dinfer.core.abilities.registry import ABILITIES
from dinfer.core.abilities.traits import REMEMBERS
from dinfer.core.kernels.attention import encoder_intervals, local_interval
from dinfer.core.kernels.canvas import take
from dinfer.core.memory import Seen
from dinfer.core.refusals import Refusal, Trait
from dinfer.core.step.ability import Ability, ByPart, Decision, Forward, Parts, Step, StepShape, TokenStats
from dinfer.core.step.cursors import Phase, RowCursors
from dinfer.core.step.mixins import Feeds, Follows, Moves, Watches, Weighs
from dinfer.core.step.scores import scored

SEES_MASKS = Trait(lambda cache: cache.plan(Phase.WINDOW).front > 0)


@ABILITIES.register("feeding")
class Feeding(ByPart[Feeds]):
    """Asks the iteration what is fed, and shows it the logits: of the whole window, or as the decoder adjusted them."""

    kind = Feeds
    refusals = (
        Refusal("{cache} computes the first masks, fed as tokens and masks, and {iteration} reads more.",
                cache=SEES_MASKS, iteration=REMEMBERS),
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
        return scored(step, made, take(logits_BWV, run.logits_RL))

    def written(self, step: Step, made: Decision) -> None:
        recipe, lanes, run, iteration = step.recipe, step.lanes, made.known.run, self.part
        if iteration.scores == "adjusted":
            pos_BX = made.view.pos_RL.view(lanes.slot_B.shape[0], -1)
            logits_BXV = made.adjusted_RLV.reshape(*pos_BX.shape, recipe.model.spec.vocab)
            iteration.observe(recipe.model, logits_BXV, pos_BX, lanes, step.iteration_state)
        elif iteration.scores == "window" and run is not None:
            iteration.observe(recipe.model, step.notes[Feeding], run.pos_BW, lanes, step.iteration_state)


@ABILITIES.register("encoder")
class Encoder(Ability):
    """What positions of a model with an encoder see."""

    @classmethod
    def of(cls, recipe: Parts, shape: StepShape) -> Self | None:
        return cls() if recipe.model.spec.encoder else None

    def seen(self, step: Step, lanes: RowCursors, place_BW: Tensor) -> Seen | None:
        local = step.recipe.model.spec.local
        context_BW, interval_BW = encoder_intervals(place_BW, lanes.start_B, lanes.end_B)
        if local is None:
            return Seen(interval_BW, None, context_BW)
        return Seen(interval_BW, local_interval(interval_BW, place_BW, lanes.start_B, local.window), context_BW)


@ABILITIES.register("following")
class Following(ByPart[Follows]):
    """Shows a cache the attention of each forward."""

    kind = Follows

    def feed(self, step: Step, run: Forward) -> None:
        run.attend = replace(run.attend, queries=[])

    def ran(self, step: Step, run: Forward) -> None:
        confidence, shift = partial(self.confidence, step, run), step.recipe.model.spec.shift
        self.part.follow(run.attend, confidence, run.pos_BW, step.lanes, shift, step.shape.phase, step.cache_state)

    def confidence(self, step: Step, run: Forward) -> Tensor:
        """The confidence of the most likely token that each position of the window predicts. [B, W]"""
        top_BWX, token_BWX = run.model.logits(run.h_BWD).float().softmax(-1).topk(2, -1)
        top_BW, next_BW = top_BWX.unbind(-1)
        if self.part.score == "margin":
            return top_BW - next_BW
        if not isinstance(decoder := step.recipe.decoder, Weighs):
            return top_BW
        state, slot_B, blocks = step.state, step.lanes.slot_B, step.shape.blocks
        row_B = state.block_rows(slot_B, step.lanes.block_B, blocks).view(-1, blocks)[:, 0]
        options = state.options(step.recipe, slot_B, "decoder")
        return decoder.weighed(top_BW, token_BWX[..., 0], options, state.decoder.lanes(row_B))


@ABILITIES.register("watching")
class Watching(ByPart[Watches]):
    """Shows a cache the last layer's values before and after each forward."""

    kind = Watches

    def feed(self, step: Step, run: Forward) -> None:
        step.notes[Watching] = run.attend.values()

    def ran(self, step: Step, run: Forward) -> None:
        old_BWX = step.notes[Watching]
        self.part.observe(run.pos_BW, old_BWX, run.attend.values(), step.lanes, step.cache_state)
