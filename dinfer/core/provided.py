"""What layers give to core, which imports none of them.

A layer is a folder of `dinfer` beside `core`, and may be left out. What it gives stands in its `provides.py`, under the
names that core asks for; what is in `ADDRESSES` there is imported when it is asked for.
"""

import importlib
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import dinfer


@cache
def homes(place: str) -> tuple[str, ...]:
    """The folders of `dinfer` that have a module or package of this name, core first."""
    found = {path.relative_to(root).parts[0] for root in map(Path, dinfer.__path__) for path in root.glob(f"*/{place}")}
    return tuple(sorted(found, key=lambda home: (home != "core", home)))


def packages(name: str) -> list[str]:
    """The packages of this name in core and in layers, such as `dinfer.core.decoders` of "decoders"."""
    return [f"dinfer.{home}.{name}" for home in homes(f"{name}/__init__.py")]


@cache
def provided(name: str) -> Any | None:
    """What a layer gives under this name; None if no layer that is there gives it."""
    for given in (vars(importlib.import_module(f"dinfer.{home}.provides")) for home in homes("provides.py")):
        if name in given or name in given.get("ADDRESSES", ()):
            return given[name] if name in given else resolve_name(given["ADDRESSES"][name])
    return None


def needed(name: str, what: str, layer: str) -> Any:
    """As `provided`. Raises ValueError, that `what` needs the layer, if that is not there."""
    if (found := provided(name)) is None:
        raise ValueError(f"{what} needs dinfer.{layer}, which this installation leaves out")
    return found
