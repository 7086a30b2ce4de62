"""Tokens that go together because they do not attend to each other (DAWN)."""

import torch
from support.matrix import completions, engine_for
from support.models import tiny_model

from dinfer.core.engine.request import Request
from dinfer.core.recipe.recipe import compose
from dinfer.research.decoders.dawn import apart


def test_of_joined_positions_the_best_goes_and_those_that_it_frees() -> None:
    """A chain of four: the second is best, so the first and third go with nobody, and the fourth is free again."""
    joined_RLL = torch.zeros(1, 4, 4, dtype=torch.bool)
    for place in range(3):
        joined_RLL[0, place, place + 1] = joined_RLL[0, place + 1, place] = True
    score_RL = torch.tensor([[0.5, 0.9, 0.8, 0.6]])
    assert apart(score_RL, torch.tensor([[True] * 4]), joined_RLL).tolist() == [[False, True, False, True]]
    assert apart(score_RL, torch.tensor([[True, False, True, True]]), joined_RLL).tolist() == [
        [True, False, True, False]
    ]


def test_what_nobody_looks_at_is_a_lower_threshold_and_looking_holds_tokens_back() -> None:
    def run(decoder: dict[str, object]) -> tuple[list[list[int]], int]:
        made = compose(
            tiny_model("shifted"), iteration={"name": "blockwise", "block": 8}, decoder=decoder, cache="none"
        )
        requests = [Request.behind([5, 7, 9][:count], 12 + count, made.resolve({})) for count in (1, 2, 3)]
        found = completions(engine_for(made, rows=3, page=4), requests)
        alone = [completions(engine_for(made, rows=1), [request])[0] for request in requests]
        assert [done.canvas for done in found] == [done.canvas for done in alone]
        return [done.canvas for done in found], sum(done.counts.forwards for done in found)

    bars = {"threshold": 0.6, "induced": 0.6, "low_threshold": 0.2}
    blind, forwards = run({"name": "dawn", "edge": 1.0} | bars)
    assert (blind, forwards) == run({"name": "threshold", "threshold": 0.2})
    assert run({"name": "dawn", "edge": 0.01, "sink": 1.0} | bars)[1] > forwards
