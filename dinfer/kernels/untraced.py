"""Methods that torch.compile leaves as they are."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

M = TypeVar("M", bound=Callable[..., Any])
_MARKED: list[tuple[type, str]] = []


class _Mark:
    """Stands for a method until its class is made, and notes where it is."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method

    def __set_name__(self, owner: type, name: str) -> None:
        setattr(owner, name, self._method)
        _MARKED.append((owner, name))


def untraced(method: M) -> M:
    """Marks a method that `torch.compile` must not trace.

    `torch.compiler.disable` would load the compiler with the module, which takes longer than all other imports.
    """
    return _Mark(method)  # type: ignore[return-value]


def leave_untraced() -> None:
    """Tells the compiler of all marked methods. To be called before anything is compiled."""
    while _MARKED:
        owner, name = _MARKED.pop()
        setattr(owner, name, torch.compiler.disable(getattr(owner, name)))
