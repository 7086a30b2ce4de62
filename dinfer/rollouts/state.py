"""What is known of a network's weights beside their values: one for all engines that run them."""

import threading
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary


@dataclass(eq=False)
class WeightsState:
    """The version of the weights of a network, and what is wrong with them."""

    version: int = 0
    told: bool = False  # answers tell the version: from the first update on, or of a server for rollouts
    torn: set[str] = field(default_factory=set)  # tensors that an update has left unfinished, or that sleep forgot
    why: str = ""
    sent: set[str] = field(default_factory=set)  # tensors that are no longer those of the checkpoint on disk
    merged: set[str] = field(default_factory=set)  # tensors that an adapter was merged into since
    asleep: dict[str, Any] = field(default_factory=dict)  # what sleeps, "weights" or "keys", and how it comes back
    names: Any = None  # of its tensors, see `dinfer.rollouts.writing.Names`
    held: bool = False  # somebody has paused the engines, and has not resumed them
    owner: int | None = None  # the thread that updates, which cannot wait for itself
    turn: threading.Lock = field(default_factory=threading.Lock)  # one update at a time


_states = WeakIdKeyDictionary()  # by the first parameter, which copies of a network share


def state_of(model: Any) -> WeightsState | None:
    """What is known of the weights of a model; None: it is no network of torch, and cannot be updated."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    held = (one for part in modules for one in part._parameters.values())  # as `parameters`, in a third of the time
    if (first := next((one for one in held if one is not None), None)) is None:
        return None
    found: WeightsState = _states.setdefault(first, WeightsState())
    return found
