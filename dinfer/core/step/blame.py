"""Which component an error came from. It is asked once an error is there, so steps pay nothing for it."""

import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from inspect import CO_OPTIMIZED
from typing import Any

import torch
from torch import Tensor

from dinfer.core.options import values_of
from dinfer.core.step.ability import Ability
from dinfer.core.step.contracts import Component, Moved, Proposal
from dinfer.core.step.cursors import Phase
from dinfer.core.step.work import Decision
from dinfer.core.terms.plan import WindowPlan


class ComponentError(RuntimeError):
    """A component from outside this package failed; the message names it and its method."""


def blamed(error: Exception, parts: Mapping[str, Any]) -> Exception:
    """The error, or one that names the component it came from, and the method. `parts`: the components by kind.

    Errors of components in the box, and of devices, stay what they are.
    """
    if isinstance(error, MemoryError | torch.OutOfMemoryError | ComponentError):  # anybody asked for the last memory
        return error
    made: Decision | None = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        known, code = frame.f_locals, frame.f_code
        owner = next((known.get(name) for name in code.co_varnames[:1]), None)
        made = one if isinstance(one := known.get("made"), Decision) else made
        if isinstance(known, dict) and code.co_flags & CO_OPTIMIZED:  # a copy, that would keep the tensors
            known.clear()
        if (isinstance(owner, Component | Ability) or owner is parts["model"]) and _outside(owner):
            return _caused(f"{called(owner)}.{code.co_name} raised {type(error).__name__}: {error}", error)
    found = [*(() if made is None else _decided(made, parts)), *_asked_again(parts)]
    wrong = next((one for one in found if _outside(one[0])), None)
    return error if wrong is None else _caused(f"{called(wrong[0])}.{wrong[1]}", error)


@contextmanager
def blaming(parts: Mapping[str, Any]) -> Iterator[None]:
    """As `blamed`, while components are put together. A ValueError is what a component says of its options."""
    try:
        yield
    except ValueError:
        raise
    except Exception as error:
        raise blamed(error, parts)  # noqa: B904, it has its cause


def called(part: Any) -> str:
    """The kind and the class."""
    kind = part.kind if isinstance(part, Component) else "ability" if isinstance(part, Ability) else "model"
    return f"{kind} {type(part).__name__}"


def _outside(part: Any) -> bool:
    return not type(part).__module__.startswith("dinfer.")


def _caused(message: str, error: Exception) -> ComponentError:
    found = ComponentError(message).with_traceback(error.__traceback__)
    found.__cause__ = error
    return found


def _decided(made: Decision, parts: Mapping[str, Any]) -> Iterator[tuple[Any, str]]:
    """What the decoder or the iteration returned in a step that failed, if their contracts exclude it."""
    rows, length = made.view.masked_RL.shape
    shapes = {"R": (rows,), "RL": (rows, length)}
    with suppress(AttributeError):  # the step did not come so far
        if not isinstance(made.proposal, Proposal):
            yield parts["decoder"], f"select returned {_type(made.proposal)}, not Proposal"
            return
        for name, value in values_of(made.proposal).items():
            shape = shapes.get(name.rpartition("_")[2])
            if shape is not None and value is not None and not (isinstance(value, Tensor) and value.shape == shape):
                told = f"has the shape {[*value.shape]}" if isinstance(value, Tensor) else f"is {_type(value)}"
                yield parts["decoder"], f"select: Proposal.{name} {told}, not a tensor of {[*shape]}"
        if not isinstance(made.moved, Moved):
            yield parts["iteration"], f"advance returned {_type(made.moved)}, not Moved"


def _asked_again(parts: Mapping[str, Any]) -> Iterator[tuple[Any, str]]:
    """What methods that change nothing return, if their contracts exclude it."""
    spec, cache, iteration, decoder = parts["model"].spec, parts["cache"], parts["iteration"], parts["decoder"]
    asked: list[tuple[Any, str, type, Callable[[], Any]]] = [
        (cache, "plan", WindowPlan, lambda: cache.plan(Phase.WINDOW)),
        (iteration, "first_region", tuple, lambda: iteration.first_region(1, 2)),
        (decoder, "needs", tuple, lambda: decoder.needs),
    ]
    asked += [(part, "fresh_state", dict, partial(part.fresh_state, spec, 1)) for part in (iteration, decoder, cache)]
    for part, name, expected, ask in asked:
        with suppress(Exception):
            if not isinstance(found := ask(), expected):
                yield part, f"{name} returned {_type(found)}, not {expected.__name__}"


def _type(value: Any) -> str:
    return type(value).__name__
