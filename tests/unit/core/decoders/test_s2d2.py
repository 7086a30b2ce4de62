"""Self-verification: the second pass sees what a model of block size 1 sees, and decides what is committed."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from support.matrix import completions, engine_for, requests_for
from support.models import MASK, tiny_model
from torch import Tensor

from dinfer.core.engine.request import Request
from dinfer.core.engine.runtime import Runtime
from dinfer.core.layers.transformer import WholeAttend
from dinfer.core.pipeline.pipeline import Pipeline
from dinfer.core.recipe.recipe import IncompatibleRecipe, Recipe, compose
from dinfer.core.step.contracts import BlockView, Proposal, State
from dinfer.research.decoders.s2d2 import S2D2

BLOCK, PROMPT = 4, [3, 1, 4, 1, 5, 9]
Seen = list[tuple[int, list[int], Tensor]]


@dataclass(frozen=True, kw_only=True)
class Noted(S2D2):
    """Notes the block that each verification is of, and its logits."""

    seen: Seen = field(default_factory=list)

    def verify(self, logits_RLV: Tensor, view: BlockView, state: State) -> Proposal:
        filled_RL = torch.where(view.masked_RL, state["draft"], view.tokens_RL)
        self.seen.append((int(view.pos_RL[0, 0]), filled_RL[0].tolist(), logits_RLV[0].clone()))
        return super().verify(logits_RLV, view, state)


def recipe(decoder: Any = "s2d2", cache: str = "block", model: Any = None, **options: Any) -> Recipe:
    decoder = {"name": "s2d2"} | options if decoder == "s2d2" else decoder
    model = tiny_model("block_causal") if model is None else model
    return compose(model, iteration={"name": "block_diffusion", "block": BLOCK}, decoder=decoder, cache=cache)


@pytest.mark.parametrize("cache", ["block", "none"])
def test_a_verification_sees_what_block_size_1_sees(cache: str) -> None:
    """Oracle: one dense pass over prefix, draft and masks, its attention written out pair by pair."""
    noted = Noted(steps=BLOCK)
    decoding = recipe(noted, cache)
    (done,) = completions(engine_for(decoding, page=4), [Request.behind(PROMPT, 10, decoding.resolve({}))])
    assert len(noted.seen) > 3
    for start, filled, logits_LV in noted.seen:
        size = min(BLOCK, len(done.canvas) - start)
        ids = done.canvas[:start] + filled[:size] + [MASK] * size
        pos = [*range(start + size), *range(start, start + size)]
        blocks = [p // BLOCK for p in pos]

        def sees(query: int, key: int, start: int = start, end: int = start + size, pos=pos, blocks=blocks) -> bool:
            if query >= end:
                return key == query or (key < end and pos[key] < pos[query])
            return key < end and (blocks[key] <= blocks[query] if query < start else key <= query)

        pairs = [[sees(query, key) for key in range(len(ids))] for query in range(len(ids))]
        x_BWD = decoding.model.embed(torch.tensor([ids]))
        h_BWD = decoding.model.forward(x_BWD, WholeAttend(torch.tensor([pos]), torch.tensor([pairs])))
        want_LV = decoding.model.logits(h_BWD[0, start + size :])
        able = [v for v in range(want_LV.shape[1]) if torch.isfinite(logits_LV[0, v])]
        torch.testing.assert_close(logits_LV[:size, able].float(), want_LV[:, able].float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("span", "unsure"), [(1, False), (3, True)])
def test_what_a_request_gets_depends_on_neither_cache_nor_batch(span: int, unsure: bool) -> None:
    wanted = [recipe(cache=cache, steps=2, min_span=span, unsure=unsure) for cache in ("none", "block")]
    alone, together = (
        [(c.canvas, c.counts.forwards - c.counts.prefills) for c in completions(engine_for(r, rows=n), requests_for(r))]
        for r, n in zip(wanted, (1, 3), strict=True)
    )
    assert [canvas for canvas, _ in alone] == [canvas for canvas, _ in together]
    assert [forwards for _, forwards in alone] == [forwards for _, forwards in together]
    assert all(MASK not in canvas for canvas, _ in alone)


def test_a_sure_model_takes_two_forwards_for_a_block() -> None:
    """Of a model that always says the same, the verification confirms every draft."""
    model = tiny_model("block_causal")
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.weight[7] = 1.0
        model.norm.weight.fill_(0.0)
    request = recipe(model=model, steps=BLOCK)
    (done,) = completions(engine_for(request), [Request.behind(PROMPT, 10, request.resolve({}))])
    assert done.counts.forwards - done.counts.prefills == 2 * 3  # blocks 4 to 7, 8 to 11, 12 to 15


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        ({"model": "bidirectional"}, "block size 1"),
        ({"model": "shifted"}, "block size 1"),
        ({"cache": "adaptive"}, "cache=block"),
        (
            {"iteration": {"name": "multi_block", "blocks": 2, "block": 4, "align": True}},
            "verifies the draft of one block",
        ),
    ],
)
def test_what_it_cannot_work_with_is_refused(parts: dict[str, Any], named: str) -> None:
    model = tiny_model(parts.get("model", "block_causal"))
    iteration = parts.get("iteration", {"name": "blockwise", "block": BLOCK})
    with pytest.raises(IncompatibleRecipe, match=named):
        compose(model, iteration=iteration, decoder="s2d2", cache=parts.get("cache", "none"))


def test_candidates_guidance_and_temperature_are_refused() -> None:
    decoding = recipe()
    with pytest.raises(IncompatibleRecipe, match=r"speculate.*second pass"):
        Pipeline(decoding, None, Runtime(speculate=2))
    with pytest.raises(IncompatibleRecipe, match="takes two"):
        decoding.resolve({"guidance": 1.0})
    with pytest.raises(IncompatibleRecipe, match=r"temperature"):
        decoding.resolve({"temperature": 0.5})
