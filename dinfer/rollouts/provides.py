"""What core and other layers get from this one, see `dinfer.core.provided`."""

from typing import Any

ADDRESSES = {
    "rollout": "dinfer.rollouts.run:rollout",
    "weights_of": "dinfer.rollouts.weights:Weights",
    "transport": "dinfer.rollouts.transport",
}


def was_aborted(counts: Any) -> bool:
    """Whether an update of the weights ended a request before its time."""
    from dinfer.rollouts.abilities.versions import Aborted

    return counts.tells(Aborted) is not None


def version_of(counts: Any) -> int | None:
    """The version of the weights that wrote the end of an answer; None if no update was told."""
    from dinfer.rollouts.abilities.versions import MadeWith  # needs torch

    return None if (made := counts.tells(MadeWith)) is None else made.versions[-1][0]
