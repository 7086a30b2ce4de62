"""How deep recursion is unrolled."""

from __future__ import annotations

from collections.abc import Callable

from dinfer.structure.automaton import Automaton
from dinfer.structure.constraint import DEEPEST
from dinfer.structure.limits import Budget, ConstraintError, TooLarge

AIM = 4096  # recursion is unrolled further as long as fewer states than this are expected


def deepest(
    unrolled: Callable[[int], tuple[Automaton, bool]], asked: int | None, what: str, budget: Budget
) -> tuple[Automaton, int | None]:
    """The automaton of the depth asked for, or else of the largest that takes few states, and its depth.

    `unrolled(depth)`: the automaton, and whether recursion was cut. The depth is None if it was not.
    Raises TooLarge if even depth 1 has too many states, ConstraintError if nothing is accepted.
    """
    best: tuple[Automaton, int | None] | None = None
    most = budget.limits.states
    for depth in [asked] if asked else range(1, DEEPEST + 1):
        try:
            automaton, cut = unrolled(depth)
            if automaton.states >= most:
                raise TooLarge(f"has {automaton.states:,} states; at most {most - 1:,} are possible")
        except TooLarge:
            if best is None:
                raise
            break
        growth = automaton.states / best[0].states if best else 1.0
        best = automaton, depth if cut else None
        if not cut or automaton.states * growth > AIM:
            break
    assert best is not None
    if best[0].empty:
        raise ConstraintError(what + (f" within depth {best[1]}" if best[1] else ""))
    return best
