"""What callers give a pipeline, as Python, numpy and torch have it. Raises ValueError for anything else."""

import operator
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
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


def encodable(text: str) -> str:
    """The text. Raises ValueError for half of a surrogate pair, which JSON can spell, but which is no character."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{text!r:.80} must be text, and holds half of a surrogate pair: take it out") from error
    return text


def listed(value: Any, name: str) -> list[Any]:
    """The items of a list, tuple, array or tensor."""
    if (items := _items(value)) is None:
        raise ValueError(f"{name} must be a list, not {value!r:.80}")
    return items


def each(value: Any, count: int, name: str) -> list[Any]:
    """One value for each prompt: a list of them, or the same for all."""
    if (items := _items(value)) is None:
        return [value] * count
    if len(items) != count:
        raise ValueError(f"{name} has {len(items)} values for {count} prompts: give one, or one for each")
    return items


def _items(value: Any) -> list[Any] | None:
    """The items of what has any in an order; None: it has not."""
    if not isinstance(value, Collection) or isinstance(value, (str, bytes, Mapping, Set)):
        return None
    try:
        return list(value)
    except TypeError:  # a tensor or array of one number
        return None


@contextmanager
def named(what: str) -> Iterator[None]:
    """Puts the name of one of several inputs in front of what is wrong with it."""
    try:
        yield
    except ValueError as error:
        raise type(error)(f"{what}: {error}") from error


def as_int(value: Any, what: str) -> int:
    """An integer, also of numpy or torch."""
    try:
        if isinstance(value, bool) or (isinstance(value, torch.Tensor) and value.dtype == torch.bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{what}={value!r} must be an integer") from None
