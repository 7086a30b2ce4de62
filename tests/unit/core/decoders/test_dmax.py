"""DMax: what a token is fed with after it was committed, and which tokens its decoder commits."""

from typing import Any

import pytest
import torch
from support.matrix import completions, engine_for
from support.models import EOS, MASK, VOCAB, tiny_model
from support.scripted import Scripted
from torch import Tensor

from dinfer.core.engine.request import Request, Wants
from dinfer.core.recipe.recipe import IncompatibleRecipe, compose
from dinfer.core.step.model import Attend


class Spy:
    """A model that keeps what each forward was fed, and the hidden states that came of it."""

    def __init__(self, model: Any) -> None:
        self.model, self.spec, self.seen = model, model.spec, list[tuple[Tensor, Tensor]]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def forward(self, x_BWD: Tensor, attend: Attend) -> Tensor:
        h_BWD = self.model.forward(x_BWD, attend)
        self.seen.append((x_BWD[0].clone(), h_BWD[0].clone()))
        return h_BWD


@pytest.mark.parametrize("rescale", [False, True])
@pytest.mark.parametrize("mix", ["confidence", "topk"])
def test_what_a_token_is_fed_with(mix: str, rescale: bool) -> None:
    """Worked out from what the model said one step before: of what is new, and with topk of all tokens."""
    spy = Spy(tiny_model())
    iteration = {"name": "dmax", "block": 8, "blocks": 1, "mix": mix, "rescale": rescale, "top": 3, "weight": 0.2}
    recipe = compose(spy, iteration=iteration, decoder={"name": "threshold", "threshold": 0.4}, cache="none")
    updates = list(engine_for(recipe).run([Request.behind([1, 2, 3], 8, recipe.resolve({}))], Wants(snapshots=True)))
    before, table = [1, 2, 3] + [MASK] * 8, spy.embed(torch.arange(VOCAB))
    mixed, chances = 0, torch.empty(0)
    for step, (x_WD, h_WD) in enumerate(spy.seen):
        now = before if not step else updates[step - 1].tokens
        assert now is not None
        for p, token in enumerate(now):
            want = table[token]
            new = p > 2 and token != MASK and before[p] == MASK
            if mix == "confidence" and new:
                c = chances[p, token]
                want = c * table[token] + (1 - c) * table[MASK]
                if rescale:
                    want = want * (c * table[token].norm() + (1 - c) * table[MASK].norm()) / want.norm()
                mixed += 1
            elif mix == "topk" and p > 2 and token != MASK:
                best = chances[p].topk(3)
                want = want + 0.2 * (best.values[:, None] * table[best.indices]).sum(0)
                mixed += 1
            torch.testing.assert_close(x_WD[p], want, rtol=0, atol=1e-5)
        before, chances = now, spy.logits(h_WD[None])[0].softmax(-1)
    assert mixed >= 4


def test_the_decoder_fills_from_the_left_and_rewrites_what_stands() -> None:
    """Sure at positions 1 and 3 of four: the run ends before position 2. Then all tokens become others at once."""
    table = torch.zeros(3, 8, VOCAB, dtype=torch.float64)
    table[0, [4, 5, 7], 6], table[1:, :, 9] = 9.0, 9.0
    recipe = compose(
        Scripted(table), iteration={"name": "dmax", "block": 4, "align": True}, decoder="dmax", cache="dual"
    )
    updates = list(engine_for(recipe).run([Request.behind([1] * 4, 4, recipe.resolve({}))], Wants(snapshots=True)))
    assert [update.tokens[4:] for update in updates if update.tokens] == [[6, 6, MASK, MASK], [9, 9, 9, 9]]


@pytest.mark.parametrize("cache", ["none", "dual", "block"])
def test_rows_of_a_batch_do_not_notice_each_other(cache: str) -> None:
    model = tiny_model("block_causal")
    recipe = compose(model, iteration={"name": "dmax", "block": 4, "align": True}, decoder="dmax", cache=cache)
    requests = [Request.behind([1, 2, 3], 21), Request.behind([4] * 9, 14), Request.behind([5], 6)]
    alone = [completions(engine_for(recipe), [request])[0] for request in requests]
    together = completions(engine_for(recipe, rows=3, page=4), requests)
    assert [c.canvas for c in together] == [c.canvas for c in alone]
    assert all(MASK not in c.canvas for c in together) and EOS != MASK


def test_what_it_cannot_be_combined_with_is_refused() -> None:
    with pytest.raises(IncompatibleRecipe, match=r"mixes tokens with the mask token, and this model has none"):
        compose(tiny_model("uniform"), iteration="dmax", decoder="entropy_bound", cache="none")
    spec = {"delete_id": 5, "split_id": 6}
    with pytest.raises(IncompatibleRecipe, match=r"moves tokens, and iteration=dmax remembers"):
        compose(tiny_model("block_causal", **spec), iteration="dmax", decoder="insert_delete", cache="block")
