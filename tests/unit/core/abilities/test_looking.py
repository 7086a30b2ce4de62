"""A look ahead: which states a forward evaluates, and which of them goes on."""

from dataclasses import replace
from typing import Any

import pytest
from support.matrix import completions, engine_for
from support.models import MASK, tiny_model

from dinfer.core.engine.request import Request, Wants
from dinfer.core.recipe.recipe import Recipe, compose

SNAPS = Wants(snapshots=True)


def recipe(model: Any = None, decoder: Any = "when_sure", **iteration: Any) -> Recipe:
    sweep = {"name": "look_ahead", "block": 4} | iteration
    return compose(model or tiny_model("bidirectional"), iteration=sweep, decoder=decoder, cache="none")


def test_a_row_computes_candidates_only_where_it_has_some() -> None:
    """One row is always sure and one never; each computes beside the other what it computes alone."""
    made = recipe(branches=3)
    requests = [Request.behind([5, 7, 9], 8, made.resolve({"threshold": bar})) for bar in (0.0, 1.0)]
    alone = [completions(engine_for(made, rows=1), [request])[0] for request in requests]
    together = completions(engine_for(made, rows=2), requests)
    assert [done.canvas for done in together] == [done.canvas for done in alone]
    counts = [(done.counts.forwards, done.counts.positions) for done in together]
    assert counts == [(done.counts.forwards, done.counts.positions) for done in alone]
    (sure, sure_positions), (unsure, unsure_positions) = counts
    assert sure_positions == 11 * sure
    assert unsure_positions > 11 * unsure > 11 * sure


def test_a_step_of_several_tries_sets_of_its_share() -> None:
    """Blocks of 5 in 3 steps: 2, 2 (1.5, half to even) and 1 token, a forward each, in any batch."""
    made = recipe(branches=3, block=5, decoder={"name": "when_sure", "steps": 3, "threshold": 1.0})
    requests = [Request.behind(prompt, 10, made.resolve({})) for prompt in ([5, 7, 9], [11, 3])]
    for request, done in zip(requests, together := completions(engine_for(made, rows=2), requests), strict=True):
        updates = [*engine_for(made, rows=1).run([request])]
        assert [update.committed for update in updates] == [0, 2, 5, 5, 7, 10]  # tried tokens are written a step later
        assert updates[-1].completion is not None
        assert (done.canvas, done.counts.forwards) == (updates[-1].completion.canvas, 6)
    assert MASK not in together[0].canvas


@pytest.mark.parametrize("variant", ["bidirectional", "shifted"])
def test_behind_a_stop_token_masks_are_filled_at_once(variant: str) -> None:
    """The row is done as soon as all before the token is, and the others see EOS behind it, not masks."""
    model, prompt, found = tiny_model(variant), [5, 7, 9], dict[str, Any]()
    plain = recipe(model, stop="off", branches=3, block=8)
    second = [*engine_for(plain).run([Request.behind(prompt, 16, plain.resolve({}))], SNAPS)][1].tokens
    stop_id = next(token for token in (second or [])[3:11] if token != MASK)
    model.spec = replace(model.spec, eos_id=stop_id, stop_ids=(stop_id,))
    for stop in ("block", "fill"):
        made = recipe(model, stop=stop, branches=3, block=8)
        request = Request.behind(prompt, 16, made.resolve({}))
        found[stop] = done = completions(engine_for(made), [request])[0]
        assert done.stopped
        at = done.canvas.index(stop_id, 3)
        assert stop == "block" or done.canvas[at:] == [stop_id] * (19 - at)
    assert found["fill"].counts.forwards < found["block"].counts.forwards
