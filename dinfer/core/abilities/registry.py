"""The abilities that steps ask, and their order.

A module registers its abilities as it is imported. They are looked for in the folders `abilities` of dinfer and of its
layers, and in the entry points `dinfer.ability` of other distributions, each of which names such a module.
"""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

import dinfer
from dinfer.core.registry import entry_points
from dinfer.core.step.ability import Ability

GROUP = "dinfer.ability"
A = TypeVar("A", bound=type[Ability])


class Registered(NamedTuple):
    """An ability, and the names of those that its hooks are called before and after."""

    ability: type[Ability]
    before: frozenset[str]
    after: frozenset[str]


class Abilities:
    """Every ability by name. Who is not told before or after whom to come goes by name."""

    def __init__(self) -> None:
        self._table: dict[str, Registered] = {}
        self._ordered: tuple[type[Ability], ...] = ()
        self._found = False

    def register(self, name: str, *, before: tuple[str, ...] = (), after: tuple[str, ...] = ()) -> Callable[[A], A]:
        """A class decorator. Names that are not registered, as those of a layer that was removed, order nothing.

        Raises ValueError for a name that another class has.
        """

        def add(ability: A) -> A:
            known = self._table.get(name)
            if known is not None and known.ability is not ability:
                other = f"{known.ability.__module__}.{known.ability.__qualname__}"
                raise ValueError(
                    f"ability {name!r} is already {other}: take another name, or call ABILITIES.unregister({name!r}) "
                    "first"
                )
            self._table[name] = Registered(ability, frozenset(before), frozenset(after))
            self._ordered = ()
            return ability

        return add

    def unregister(self, name: str) -> None:
        """Takes an ability out, for a notebook that defines it anew. Recipes that were made before keep theirs."""
        self._table.pop(name, None)
        self._ordered = ()

    def names(self) -> tuple[str, ...]:
        """In the order in which a step asks them. Raises ValueError if they are told to come before each other."""
        self._find()
        earlier = {name: {*entry.after} & self._table.keys() for name, entry in self._table.items()}
        for name, entry in self._table.items():
            for later in entry.before & self._table.keys():
                earlier[later].add(name)
        found: dict[str, None] = {}
        while left := sorted(self._table.keys() - found.keys()):
            ready = next((name for name in left if earlier[name] <= found.keys()), None)
            if ready is None:
                raise ValueError(f"abilities {', '.join(left)} are to come before each other: change before= or after=")
            found[ready] = None
        return tuple(found)

    def ordered(self) -> tuple[type[Ability], ...]:
        """In the order in which a step asks them."""
        if not self._ordered:
            self._ordered = tuple(self._table[name].ability for name in self.names())
        return self._ordered

    def _find(self) -> None:
        """Imports the modules that register abilities, once."""
        if self._found:
            return
        for root in map(Path, dinfer.__path__):
            for path in sorted((*root.glob("abilities/*.py"), *root.glob("*/abilities/*.py"))):
                importlib.import_module(".".join(("dinfer", *path.relative_to(root).with_suffix("").parts)))
        for entry in entry_points().select(group=GROUP):
            entry.load()
            modules = {registered.ability.__module__ for registered in self._table.values()}
            if not any(f"{module}.".startswith(f"{entry.module}.") for module in modules):
                raise ValueError(
                    f"the entry point {entry.value!r} in the group {GROUP} registers no ability: put "
                    '@ABILITIES.register("a name") above its class'
                )
        self._found = True


ABILITIES = Abilities()
