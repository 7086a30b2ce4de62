"""Components by name: what their source says of them, and what is read or imported when."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import dinfer
from dinfer.core.provided import packages
from dinfer.core.registry import REGISTRIES, Description, Registry, options_of

HEAD = """
from dataclasses import dataclass
from typing import Literal
from dinfer.core.step.contracts import Decoder
from dinfer.core.registry import option
from {package}.registry import DECODERS
"""
PLAIN = '''
@DECODERS.register("plain")
@dataclass(frozen=True, kw_only=True)
class Plain(Base):
    """Says what it does.

    And more."""
    paper = "arXiv:1"
    share: float = option(0.5, "of " "all", per_request=True)
    kind: Literal["a", "b"] | None = option(None, "which")
'''
BASE = """
@dataclass(frozen=True, kw_only=True)
class Base(Decoder):
    kind: str = option("c", "overridden, in its place")
    steps: int = option(3, "how many")
"""


@pytest.mark.parametrize("registry", REGISTRIES, ids=[registry.kind for registry in REGISTRIES])
def test_what_is_read_from_the_source_is_what_the_class_says(registry: Registry) -> None:
    """A registry of its own, which has imported nothing yet."""
    folder = f"{registry.kind}s".replace("samplings", "sampling")
    fresh: Registry = Registry(registry.kind, *packages(folder))
    assert fresh.names() == registry.names() != []
    for name in registry.names():
        cls = registry.get(name)
        summary = (cls.__doc__ or "").strip().split("\n")[0]
        assert fresh.describe(name) == Description(summary, cls.paper, tuple(options_of(cls)))


def package(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, **files: str) -> Registry:
    home = folder / name
    home.mkdir()
    files |= {
        "__init__": "",
        "registry": f"from dinfer.core.registry import Registry\nDECODERS = Registry('decoder', '{name}')",
    }
    for file, text in files.items():
        (home / f"{file}.py").write_text(text)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, name, raising=False)
    return __import__(f"{name}.registry", fromlist=["DECODERS"]).DECODERS


def test_a_module_is_imported_when_a_component_of_it_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = HEAD.format(package="lazy")
    registry = package(
        tmp_path, monkeypatch, "lazy", plain=f"{head}from lazy._base import Base\n{PLAIN}", _base=head + BASE
    )
    described = registry.describe("plain")
    assert (described.summary, described.paper) == ("Says what it does.", "arXiv:1")
    assert [(o.name, o.default, o.help, o.per_request) for o in described.options] == [
        ("kind", None, "which", False), ("steps", 3, "how many", False), ("share", 0.5, "of all", True),
    ]  # fmt: skip
    assert registry.check({"name": "plain", "share": 1}) == ("plain", {"share": 1.0})
    with pytest.raises(ValueError, match=r"decoder.kind='c' must be 'a' or 'b' or null"):
        registry.check({"name": "plain", "kind": "c"})
    assert "lazy.plain" not in sys.modules
    assert registry.describe("plain") == Description(
        "Says what it does.", "arXiv:1", tuple(options_of(registry.get("plain")))
    )
    assert "lazy.plain" in sys.modules


READ = [
    PLAIN,
    PLAIN.replace("@DEC", "class Base(Base):\n    pass\n\n@DEC", 1),
    PLAIN + "class Net(nn.Module):\n    size: int = SIZE\n",
]
RUN = [
    PLAIN.replace("0.5", "1 / 2"),
    PLAIN.replace('"of " "all"', '"of " + "all"'),
    PLAIN.replace("0.5", "SHARE").replace("@DEC", "SHARE = 0.5\n@DEC"),
    PLAIN.replace('"plain"', '"pla" + "in"'),
    PLAIN.replace("None = option", "NoneType = option").replace("@DEC", "from types import NoneType\n@DEC"),
    PLAIN.replace('@DECODERS.register("plain")\n', "") + 'DECODERS.register("plain")(Plain)\n',
    PLAIN.replace("(Base)", "(Base, Mixed)").replace("@DEC", "from abc import ABC as Mixed\n@DEC", 1),
]


@pytest.mark.parametrize(("text", "imported"), [*((text, False) for text in READ), *((text, True) for text in RUN)])
def test_source_that_cannot_be_read_is_run(
    text: str, imported: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"odd{abs(hash(text))}"
    monkeypatch.setitem(vars(torch.nn), "SIZE", 3)
    head = HEAD.format(package=name) + "from torch import nn\nfrom torch.nn import SIZE\n"
    registry = package(tmp_path, monkeypatch, name, plain=head + BASE + text)
    described = registry.describe("plain")
    assert (f"{name}.plain" in sys.modules) == imported
    assert described == Description("Says what it does.", "arXiv:1", tuple(options_of(registry.get("plain"))))
    assert {option.default for option in described.options} == {0.5, 3, None}


def test_a_name_belongs_to_one_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = package(tmp_path, monkeypatch, "taken", plain=HEAD.format(package="taken") + BASE + PLAIN)
    registry.register("plain")(object)
    with pytest.raises(ValueError, match=r"decoder 'plain' is already builtins\.object.*call DECODERS\.unregister"):
        registry.get("plain")
    registry.unregister("plain")
    assert registry.get("plain").__module__ == "taken.plain"


def test_every_public_name_is_there_and_no_other() -> None:
    assert {name: vars(dinfer).get(name, getattr(dinfer, name)) for name in dinfer.__all__}.keys() == set(
        dinfer.__all__
    )
    assert set(dinfer.__all__) < set(dir(dinfer))
    with pytest.raises(AttributeError, match="module 'dinfer' has no attribute 'lode'"):
        dinfer.lode  # type: ignore[attr-defined]  # noqa: B018
