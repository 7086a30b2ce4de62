"""Recipes that are refused: what a message says to use instead is asked of the registries."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from support.matrix import ILLEGAL, refusal
from support.models import tiny_model

from dinfer.core.caches.window import DualCache
from dinfer.core.decoders.threshold import Threshold
from dinfer.core.recipe.recipe import IncompatibleRecipe, compose
from dinfer.core.refusals import Refusal, Trait
from dinfer.core.registry import CACHES

PARTS: dict[str, Any] = {
    "iteration": {"name": "blockwise", "block": 8},
    "decoder": "joint_threshold",
    "cache": "delayed",
}


def offered(message: str, kind: str) -> list[str]:
    found = re.search(rf"{kind}=([\w, ]+?)(?:, or|\.|$)", message.rpartition(" Use ")[2])
    return re.split(", | or ", found[1]) if found else []


@pytest.fixture
def doubled() -> Iterator[None]:
    @CACHES.register("doubled")
    @dataclass(frozen=True, kw_only=True)
    class Doubled(DualCache):
        pass

    yield
    CACHES.unregister("doubled")


def message(**parts: Any) -> str:
    with pytest.raises(IncompatibleRecipe) as caught:
        compose(tiny_model(), **(PARTS | parts))
    return str(caught.value)


def test_every_component_that_a_message_names_goes_with_the_rest() -> None:
    said = message()
    assert "decoder=joint_threshold judges decoded tokens" in said and "which cache=delayed does not" in said
    assert {"dual", "prefix"} <= {*offered(said, "cache")}
    for kind in ("cache", "decoder"):
        for name in offered(said, kind):
            compose(tiny_model(), **(PARTS | {kind: name}))


@pytest.mark.usefixtures("doubled")
def test_a_new_component_is_suggested_by_itself() -> None:
    assert "doubled" in offered(message(), "cache")


def test_a_component_says_what_it_cannot_go_with() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Alone(Threshold):
        refusals = (
            Refusal("{decoder} needs the whole canvas, and {cache} keeps some.", decoder=Threshold, cache=DualCache),
        )

    said = message(decoder=Alone(), cache="dual")
    assert said.startswith("decoder=Alone needs the whole canvas, and cache=dual keeps some. Use decoder=")
    assert "none" in offered(said, "cache") and "dual" not in offered(said, "cache")


def test_a_setting_is_left_out_by_its_name() -> None:
    said = message(iteration={"name": "blockwise", "block": 8, "stop": "cut"}, cache="dual")
    assert "Use iteration.stop=block, or decoder=" in said


def test_a_trait_asks_only_the_parts_that_are_known() -> None:
    known = Refusal("no runtime", runtime=Trait(lambda runtime: runtime.speculate > 0))
    assert not known.meets({"decoder": Threshold()})


def changes(said: str) -> Iterator[dict[str, str]]:
    """Each remedy of a message: the components that it changes, by kind."""
    for remedy in re.split(", or (?=[a-z]+=)", said.rpartition(" Use ")[2].rstrip(".")):
        if re.fullmatch(r"\w+=\w+( with \w+=\w+)+", remedy):
            yield dict(re.findall(r"(\w+)=(\w+)", remedy))
        elif found := re.match(r"(iteration|decoder|cache)=([\w, ]+)", remedy):
            yield from ({found[1]: name} for name in re.split(", (?!with)| or ", found[2]) if name.isidentifier())


def test_no_remedy_is_refused_itself() -> None:
    offers = 0
    for combination in ILLEGAL[::150]:
        for change in changes(str(refusal(combination))):
            other = {
                kind: tuple({"name": name, **({"block": 8} if kind == "iteration" and name != "full" else {})}.items())
                for kind, name in change.items()
            }
            assert refusal(replace(combination, **other)) is None, (str(combination), change)
            offers += 1
    assert offers > 100
