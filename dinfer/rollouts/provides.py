"""What core gets from this layer, see `dinfer.core.provided`."""

from typing import Any


def rollout(pipe: Any, prompts: Any, **how: Any) -> Any:
    """Samples with their trajectories, see `dinfer.rollouts.run.rollout`."""
    from dinfer.rollouts import run  # needs torch

    return run.rollout(pipe, prompts, **how)


def weights_of(pipe: Any) -> Any:
    """The weights of a pipeline, which may be changed, see `dinfer.rollouts.weights.Weights`."""
    from dinfer.rollouts.weights import Weights

    return Weights(pipe)


def transport() -> Any:
    """How weights come from another process: the module `dinfer.rollouts.transport`."""
    from dinfer.rollouts import transport as module

    return module


def was_aborted(counts: Any) -> bool:
    """Whether an update of the weights ended a request before its time."""
    from dinfer.rollouts.abilities.versions import Aborted

    return counts.tells(Aborted) is not None


def version_of(counts: Any) -> int | None:
    """The version of the weights that wrote the end of an answer; None if no update was told."""
    from dinfer.rollouts.abilities.versions import MadeWith  # needs torch

    return None if (made := counts.tells(MadeWith)) is None else made.versions[-1][0]
