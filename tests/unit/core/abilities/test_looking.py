"""A look ahead: which states a forward evaluates, and which of them goes on."""

from typing import Any

from support.matrix import completions, engine_for
from support.models import tiny_model

from dinfer.core.engine.request import Request
from dinfer.core.recipe.recipe import Recipe, compose


def recipe(**iteration: Any) -> Recipe:
    sweep = {"name": "look_ahead", "block": 4} | iteration
    return compose(tiny_model("bidirectional"), iteration=sweep, decoder="when_sure", cache="none")


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
