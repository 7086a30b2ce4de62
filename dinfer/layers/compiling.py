"""torch.compile for the parts of a block beside attention and experts (`runtime.compile`).

Attention writes keys and values in place, which a traced graph would do to a copy of the whole pool.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from dinfer.kernels.deferred import close

Args = ParamSpec("Args")
Result = TypeVar("Result")


class Untraced:
    """Stands for an `untraced` method while its class is made, then notes the method and puts it back."""

    waiting: ClassVar[list[tuple[type, str]]] = []

    def __init__(self, method: Callable[..., Any]) -> None:
        self.method = method

    def __set_name__(self, owner: type, name: str) -> None:
        setattr(owner, name, self.method)
        self.waiting.append((owner, name))


def untraced(method: Callable[Args, Result]) -> Callable[Args, Result]:
    """Marks a method that torch.compile is to leave out, because our kernels are faster than what it makes.

    `compiled_pieces` calls `torch.compiler.disable`, not this decorator: that imports the compiler, which takes as long
    as torch itself and 145 MB.
    """
    return cast(Callable[Args, Result], Untraced(method))


def compiled_pieces(
    before: Callable[..., Any], after: Callable[..., Any], mode: str
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """What precedes attention in a block, and what follows it, compiled. All `untraced` methods are left out.

    `mode` as torch.compile has it, but never with CUDA graphs of its own: they would be captured in ours.
    """
    while Untraced.waiting:
        owner, name = Untraced.waiting.pop()
        setattr(owner, name, torch.compiler.disable(getattr(owner, name)))
    mode = "max-autotune-no-cudagraphs" if mode == "max-autotune" else mode
    before, behind = torch.compile(before, mode=mode), torch.compile(after, mode=mode)

    def closed(block: Any, x_BWD: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
        # Dynamo would trace `before` once for each kind of deferred value, more often than it allows.
        x_BWD, delta_BWD = behind(block, x_BWD, *others)
        return x_BWD, close(delta_BWD).view_as(x_BWD)

    return before, closed
