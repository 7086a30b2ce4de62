"""Every write to the canvas is a record, of branches too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from support.matrix import engine_for
from support.models import tiny_model

from dinfer.core.abilities.registry import ABILITIES
from dinfer.core.engine.request import Request, Wants
from dinfer.core.recipe.recipe import compose
from dinfer.core.step.ability import Ability
from dinfer.core.step.record import Written


class Recorder(Ability):
    """Keeps all records on the host, in order."""

    records = True
    kept: ClassVar[list[Any]] = []

    @classmethod
    def of(cls, recipe: Any, shape: Any) -> Recorder:
        return cls()

    def recorded(self, step: Any, record: Written) -> None:
        said = record.said_BX
        columns = (
            record.pos_BX, record.old_BX, record.new_BX, record.masked_BX, record.open_BX, said.logprob, said.drawn,
        )  # fmt: skip
        for slot, at, row in zip(
            record.slot_B.tolist(), record.step_B.tolist(), zip(*columns, strict=True), strict=True
        ):
            if slot != step.state.canvas.scratch:
                self.kept += [(at, *event) for event in zip(*(x.tolist() for x in row), strict=True) if event[0] >= 0]


@pytest.fixture
def kept() -> Iterator[list[Any]]:
    ABILITIES.register("recorder", after=("constraints",))(Recorder)
    Recorder.kept = []
    yield Recorder.kept
    ABILITIES.unregister("recorder")


RECIPES: dict[str, dict[str, Any]] = {
    "threshold": {"cache": "dual"},
    "branches": {"iteration": {"name": "lopa", "block": 8}},
    "blocks": {"iteration": {"name": "multi_block", "block": 4, "blocks": 3}},
    "edits": {"decoder": {"name": "joint_threshold", "edit_threshold": 0.05}},
    "masks again": {"decoder": "wino"},
    "verifies": {"decoder": "s2d2", "model": "block_causal", "cache": "block"},
}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", RECIPES)
def test_records_make_the_canvas(name: str, temperature: float, kept: list[Any]) -> None:
    """Each begins with the token that the one before has left, and the last leaves the answer."""
    parts = {"iteration": {"name": "blockwise", "block": 8}, "decoder": "threshold", "cache": "none"} | RECIPES[name]
    recipe = compose(tiny_model(parts.pop("model", "bidirectional")), **parts)
    if temperature and "temperature" in recipe.decoder.refuses:
        pytest.skip("draws nothing")
    options = recipe.resolve({"temperature": temperature, "seed": 3})
    request = Request.behind([4, 9, 2, 7], 20, options, stops=False)
    *_, last = engine_for(recipe).run([request], Wants(deltas="block", logprobs=True))
    assert last.completion is not None
    mask = recipe.model.spec.mask_id
    canvas, open_ = [*request.prompt, *[mask] * 20], [False] * 4 + [True] * 20
    before, logprobs = 0, dict[int, float]()
    for step, at, old, new, was_open, is_open, logprob, drawn in kept:
        assert (canvas[at], open_[at]) == (old, was_open) and old != new and step >= before
        canvas[at], open_[at], before, logprobs[at] = new, is_open, step, logprob
        assert logprob < 1e-5 and (drawn != drawn) == (temperature == 0)
    assert canvas == last.completion.canvas and not any(open_)
    told = [entry for entry in last.logprobs or []]  # of the last block
    own = [logprobs[at] for at in range(24 - len(told), 24)]
    assert own == pytest.approx([entry.logprob for entry in told], abs=1e-5)


def test_nothing_is_recorded_where_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: Any) -> None:
        raise AssertionError("a record was made")

    monkeypatch.setattr("dinfer.core.step.record.decided", refused)
    recipe = compose(tiny_model(), iteration={"name": "blockwise", "block": 8}, decoder="threshold", cache="dual")
    *_, last = engine_for(recipe).run([Request.behind([4, 9], 8)])
    assert last.completion is not None


def test_the_drawn_distribution_is_that_of_the_temperature(kept: list[Any]) -> None:
    recipe = compose(tiny_model(), iteration="full", decoder={"name": "fixed", "steps": 6}, cache="none")
    request = Request.behind([4, 9], 6, recipe.resolve({"temperature": 1.0, "top_k": 0, "seed": 1}), stops=False)
    *_, _last = engine_for(recipe).run([request])
    raw, drawn = (torch.tensor([event[column] for event in kept]) for column in (6, 7))
    assert len(kept) == 6 and (drawn >= raw - 1e-5).all()  # the mask token is not drawn, or as at temperature 1
