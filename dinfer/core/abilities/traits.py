"""What several abilities cannot go with, see `dinfer.core.refusals`."""

from dinfer.core.options import values_of
from dinfer.core.refusals import Trait
from dinfer.core.step.mixins import RecomputesEveryKey, scores_of


def sampled(name: str, value: str) -> Trait:
    """Sampling with an option that is not 0."""
    return Trait(
        lambda part: values_of(part).get(name, 0) != 0, f"`sampling.{name}` {value}", instead=f"sampling.{name}=0"
    )


GUIDED = sampled("guidance", "above 0")
HELD = sampled("leftmost", "above 0")
NO_MASK = Trait(lambda model: model.spec.mask_id is None, "a model without a mask token")
REMEMBERS = Trait(lambda iteration: scores_of(iteration) != "none")
KEEPS_KEYS = Trait(lambda cache: not isinstance(cache, RecomputesEveryKey))
TEXT_BEHIND = Trait(lambda request: request.text_behind_a_gap, "text behind a gap", instead="gaps at the end alone")
