"""The problem families by name."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from dinfer.problems.families.ages import ages
from dinfer.problems.families.chains import chain
from dinfer.problems.families.lists import lists
from dinfer.problems.families.purchases import purchase
from dinfer.problems.families.sharing import sharing
from dinfer.problems.families.travel import travel
from dinfer.problems.families.turns import turns, walk
from dinfer.problems.problem import Draft

FAMILIES: dict[str, Callable[[Random], Draft]] = {
    "purchases": purchase,
    "sharing": sharing,
    "travel": travel,
    "ages": ages,
    "chains": chain,
    "turns": turns,
    "walks": walk,
    "lists": lists,
}
