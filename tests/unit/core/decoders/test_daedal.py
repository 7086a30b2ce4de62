"""A canvas that grows: how long it becomes, where masks are put in, and what is left of that for others."""

import pytest
import torch
from support.matrix import completions, engine_for, observed, outcome
from support.models import EOS, MASK, VOCAB, tiny_model
from support.scripted import Scripted
from torch import Tensor

from dinfer.core.engine.request import Request, Wants
from dinfer.core.recipe.recipe import IncompatibleRecipe, compose

NEW = 24
DECODER = {
    "name": "daedal", "initial": 6, "window": 4, "expansion": 3, "eos_tokens": 4, "eos_threshold": 0.45,
    "growth_threshold": 0.5, "threshold": 0.9, "low_threshold": 0.3,
}  # fmt: skip


def sure_of(tokens: list[int]) -> Tensor:
    """Logits by position, behind a prompt of one token: each token of the list is almost certain at its place."""
    table = torch.zeros(1, NEW + 1, VOCAB, dtype=torch.float64)
    for place, token in enumerate(tokens):
        table[0, place + 1, token] = 20.0
    return table


def run(table: Tensor, **options: float) -> tuple[list[list[int]], list[int]]:
    """What the row holds behind the prompt after each step, and how many positions each step computed."""
    recipe = compose(Scripted(table), iteration="full", decoder=DECODER, cache="none")
    engine = engine_for(recipe)
    shapes = observed(engine)
    request = Request.behind([1], NEW, recipe.resolve(options))
    canvases = [(update.tokens or [])[1:] for update in engine.run([request], Wants(snapshots=True))]
    return canvases, [shape.width for shape in shapes]


def test_the_length_is_looked_for_until_the_end_is_in_sight() -> None:
    """EOS from place 10 on: 6 and 9 masks see none, 12 see two of four; then two EOS tokens stand behind."""
    canvases, widths = run(sure_of([3] * 10 + [EOS] * 14))
    assert canvases[:3] == [[MASK] * NEW, [MASK] * NEW, [MASK] * 12 + [EOS] * 12]
    assert [canvas.count(MASK) for canvas in canvases[2:]] == [12, 8, 4, 0]
    assert canvases[-1] == [3] * 10 + [EOS] * 14
    assert widths[0] < widths[2] and widths[-1] < NEW + 1


def test_masks_are_put_in_where_the_model_is_least_sure() -> None:
    table = sure_of([3] * 6 + [EOS] * 2)
    table[0, 3, 3] = 2.0  # place 2, below low_threshold
    canvases, _ = run(table, eos_threshold=0.0)
    assert canvases[1] == [3, 3, MASK, MASK, MASK, 3] + [MASK] * 2 + [EOS] * (NEW - 8)


def test_a_canvas_that_is_full_grows_no_further() -> None:
    """Nothing is ever sure: each step commits one token, and masks are put in as long as there is room."""
    canvases, widths = run(torch.zeros(1, 5, VOCAB, dtype=torch.float64), eos_threshold=0.0)
    assert len(canvases) <= 1 + NEW and MASK not in canvases[-1] and max(widths) <= 32


def test_rows_that_grow_notice_no_other_row() -> None:
    recipe = compose(tiny_model(), iteration="full", decoder=DECODER, cache="none")
    requests = [Request.behind([3 + i] * (1 + 2 * i), 11 + 6 * i, recipe.resolve({"initial": 2 + i})) for i in range(4)]
    alone = [outcome(completions(engine_for(recipe), [request])[0]) for request in requests]
    assert [outcome(done) for done in completions(engine_for(recipe, rows=3), requests)] == alone


@pytest.mark.parametrize("iteration", ["blockwise", "multi_block"])
def test_blocks_that_do_not_span_the_generation_are_refused(iteration: str) -> None:
    with pytest.raises(IncompatibleRecipe, match=r"must span the whole generation\. Use iteration=full"):
        compose(tiny_model(), iteration=iteration, decoder="daedal", cache="none")
