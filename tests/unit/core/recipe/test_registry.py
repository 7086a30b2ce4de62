"""Components by name: what the table says of them, and what is read or imported when."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import dinfer
from dinfer.cli.described import digest
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
def test_what_is_known_without_an_import_is_what_the_class_says(registry: Registry) -> None:
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


@pytest.mark.parametrize("fits", [True, False])
def test_a_module_is_imported_when_it_is_built_or_the_table_is_older(
    fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"lazy{fits}"
    head = HEAD.format(package=name)
    registry = package(
        tmp_path, monkeypatch, name, plain=f"{head}from {name}._base import Base\n{PLAIN}", _base=head + BASE
    )
    options = [
        ["kind", None, "which", False, ["|", ["Literal", "a", "b"], "None"]], ["steps", 3, "how many", False, "int"],
        ["share", 0.5, "of all", True, "float"],
    ]  # fmt: skip
    said = {"plain": ["Says what it does.", "arXiv:1", options]}
    known = {f"{name}.plain": {"sources": [], "digest": digest([]) if fits else "of before", "decoder": said}}
    monkeypatch.setattr("dinfer.cli.described.table", lambda: known)
    described = registry.describe("plain")
    assert (f"{name}.plain" in sys.modules) != fits
    assert registry.check({"name": "plain", "share": 1}) == {"name": "plain", "share": 1.0}
    with pytest.raises(ValueError, match=r"decoder.kind='c' must be 'a' or 'b' or null"):
        registry.check({"name": "plain", "kind": "c"})
    cls = registry.get("plain")
    assert described == Description("Says what it does.", "arXiv:1", tuple(options_of(cls)))
    assert f"{name}.plain" in sys.modules


def test_a_digest_is_of_all_sources() -> None:
    sources = ["core/registry.py", "core/provided.py"]
    assert digest(sources) not in ("", digest(sources[:1])) and digest(["core/nothing.py"]) == ""


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
