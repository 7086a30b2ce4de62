"""Attention blocks that are decoded in parts, their first token alone: Fast-dLLM v2, against its rule written down."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.matrix import completions, engine_for, observed
from support.models import EOS, MASK, tiny_model

from dinfer.core.engine.request import Request
from dinfer.core.recipe.recipe import IncompatibleRecipe, compose
from dinfer.core.step.cursors import Phase
from tests.parity.references import SglangThreshold

BLOCK, PART = 8, 4


def shifted_model(**fields: Any) -> Any:
    model = tiny_model("block_causal", **({"causal_block": BLOCK, "shift": 1} | fields))
    with torch.no_grad():
        model.head.weight[MASK] = 0  # where the mask wins, the published sampler writes it, and we do not
    return model


def published(model: Any, prompt: list[int], new: int, bar: float) -> tuple[list[int], int]:
    """The published loop, without keys: the canvas, and the forwards that it takes with them."""
    length = -(-(len(prompt) + new) // BLOCK) * BLOCK
    tokens = torch.tensor(prompt + [MASK] * (length - len(prompt)))

    def shifted(end: int) -> torch.Tensor:
        logits = model.score(tokens[None, :end], "block_causal", BLOCK)[0].float()
        return torch.cat([logits[:1], logits[:-1]])

    forwards = int(
        len(prompt) >= BLOCK
    )  # the prefill; its last row gives the first token where the prompt ends a block
    if len(prompt) % BLOCK == 0:
        tokens[len(prompt)] = model.score(tokens[None, : len(prompt)], "block_causal", BLOCK)[0, -1].argmax()
    for start in range(len(prompt) // BLOCK * BLOCK, length, BLOCK):
        for part in range(start, start + BLOCK, PART):
            own = slice(part, part + PART)
            while (masked := tokens[own] == MASK).any():
                best, token = shifted(start + BLOCK)[own].softmax(-1).max(-1)
                best = best.masked_fill(~masked, -1)
                sure = best > bar
                sure[best.argmax()] = True
                tokens[own] = torch.where(sure, token, tokens[own])
                forwards += 1
            if any(int(token) in model.spec.stop_ids for token in tokens[len(prompt) : own.stop]):
                return tokens.tolist(), forwards
        forwards += 1  # the pass that keeps the keys of the block and gives the first token of the next
        if start + BLOCK < length:
            tokens[start + BLOCK] = model.score(tokens[None, : start + BLOCK], "block_causal", BLOCK)[0, -1].argmax()
    return tokens.tolist(), forwards


@pytest.mark.rest(but=12)
@pytest.mark.parametrize("prompt,new", [(3, 21), (8, 16), (16, 24), (21, 11), (13, 35)])
@pytest.mark.parametrize("bar", [0.2, 0.5, 1.0])
@pytest.mark.parametrize("cache", ["none", "block"])
def test_the_tokens_are_those_of_the_published_loop(cache: str, bar: float, prompt: int, new: int) -> None:
    model, ids = shifted_model(), [(7 * i) % 36 for i in range(prompt)]
    want, forwards = published(model, ids, new, bar)
    recipe = compose(
        model,
        iteration={"name": "block_diffusion", "block": PART, "lead": BLOCK},
        decoder=SglangThreshold(threshold=bar),
        cache=cache,
    )
    got = completions(engine_for(recipe), [Request.behind(ids, new, recipe.resolve({}))])[0]
    end = min(next((i for i, token in enumerate(want) if token == MASK), len(want)), len(got.canvas))
    assert got.canvas[:end] == want[:end]
    assert set(got.canvas[end:]) <= {EOS}
    assert got.counts.forwards <= forwards


def test_a_finished_block_is_computed_once_and_with_it_the_next_ones_first_token() -> None:
    """No step is wider than an attention block."""
    recipe = compose(
        shifted_model(),
        iteration={"name": "block_diffusion", "block": PART, "lead": BLOCK, "stop": "off"},
        decoder={"name": "fixed", "steps": PART},
        cache="block",
    )
    engine = engine_for(recipe)
    shapes = observed(engine)
    update = [*engine.run([Request.behind(list(range(1, 17)), 2 * BLOCK, recipe.resolve({}))])]
    assert [(s.phase, s.width) for s in shapes[:2]] == [(Phase.PREFILL, BLOCK), (Phase.WINDOW, BLOCK)]
    assert {s.width for s in shapes} == {BLOCK}
    alone = [u for u in update if u.phase == Phase.WINDOW and u.region[1] - u.region[0] == 1]
    assert [u.region[0] for u in alone] == [16, 24]
    assert update[-1].completion.counts.forwards == len(shapes) == 1 + 2 * BLOCK


@pytest.mark.parametrize(
    ("options", "fields", "message"),
    [
        ({"lead": BLOCK}, {"shift": 0}, r"lead=8 .* not shifted.* Use iteration.lead=0"),
        ({"lead": PART}, {}, r"lead=4 must be a multiple of .* Use iteration.lead=8"),
        ({"block": 3}, {}, r"block=3 must be a multiple of the model's attention block, 8, or divide it"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, int], fields: dict[str, int], message: str) -> None:
    iteration = {"name": "block_diffusion", "block": PART} | options
    with pytest.raises(IncompatibleRecipe, match=message):
        compose(shifted_model(**fields), iteration=iteration, decoder="threshold", cache="block")


@pytest.mark.parametrize(("lead", "least"), [(-4, "more"), (6, "a multiple of iteration.block=4")])
def test_a_lead_that_cuts_blocks_is_refused(lead: int, least: str) -> None:
    with pytest.raises(ValueError, match=rf"iteration.lead={lead} must be 0 or {least}"):
        compose(
            shifted_model(), iteration={"name": "block_diffusion", "block": PART, "lead": lead},
            decoder="threshold", cache="none",
        )  # fmt: skip
