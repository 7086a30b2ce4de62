"""The problem families by name."""

from collections.abc import Callable
from random import Random

from dinfer.demo.problems.families.ages import ages
from dinfer.demo.problems.families.chains import chain
from dinfer.demo.problems.families.lists import lists
from dinfer.demo.problems.families.purchases import purchase
from dinfer.demo.problems.families.sharing import sharing
from dinfer.demo.problems.families.travel import travel
from dinfer.demo.problems.families.turns import turns, walk
from dinfer.demo.problems.problem import Draft

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
