"""What callers give a pipeline, as Python, numpy and torch have it. Raises ValueError for anything else."""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch


def is_conversation(prompt: Any) -> bool:
    """A list of messages, each with a role and a text."""
    if not isinstance(prompt, Sequence) or not prompt:
        return False
    return all(
        isinstance(message, Mapping) and all(isinstance(message.get(key), str) for key in ("role", "content"))
        for message in prompt
    )


def listed(value: Any, name: str) -> list[Any]:
    """The items of a list, tuple, array or tensor."""
    lists = hasattr(value, "__len__") and hasattr(value, "__getitem__") and not isinstance(value, (str, bytes, Mapping))
    if not lists or getattr(value, "ndim", 1) == 0:  # a tensor or array of one number
        raise ValueError(f"{name} must be a list, not {value!r:.80}")
    return list(value)


def each(value: Any, count: int, name: str) -> list[Any]:
    """One value for each prompt: a list of them, or the same for all."""
    if isinstance(value, (str, Mapping)) or getattr(value, "ndim", None) == 0:
        return [value] * count
    if isinstance(value, Sequence) or hasattr(value, "ndim"):
        if len(value) != count:
            raise ValueError(f"{name} has {len(value)} values for {count} prompts: give one, or one for each")
        return list(value)
    return [value] * count


def as_int(value: Any, what: str) -> int:
    """An integer, also of numpy or torch."""
    try:
        if isinstance(value, bool) or getattr(value, "dtype", None) == torch.bool:
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{what}={value!r} must be an integer") from None
