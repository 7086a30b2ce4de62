"""Block diffusion with exact keys: the tokens of a model without a cache, in fewer forwards than the references."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from support.host import Host
from support.matrix import NEW, PROMPTS, SMALL, completions, engine_for, general, observed, requests_for
from support.models import EOS, MASK, fitted, tiny_model

from dinfer.core.engine.engine import Engine
from dinfer.core.engine.errors import NonFiniteLogits
from dinfer.core.engine.request import Completion, Request
from dinfer.core.recipe.recipe import IncompatibleRecipe, Recipe, compose
from dinfer.core.registry import DECODERS, options_of
from dinfer.core.step.cursors import ACTIVE, CURSORS, Phase
from dinfer.core.step.window import first_phase
from tests.parity.golden import Fields
from tests.parity.plans import ALGORITHMS
from tests.parity.references import build

BLOCK = 8
# Attention blocks as long as those of the sweep, shorter, longer, autoregressive; logits that predict the next token.
MODELS: dict[str, dict[str, Any]] = {
    "block": {"causal_block": BLOCK},
    "half": {"causal_block": BLOCK // 2},
    "causal": {"causal_block": 1},
    "shifted": {"causal_block": BLOCK // 2, "shift": 1},
    "shifted_parts": {"causal_block": 2 * BLOCK, "shift": 1},
}
SWEEPS: dict[str, dict[str, Any]] = {
    "block_diffusion": {"name": "block_diffusion", "block": BLOCK},
    "to_the_end": {"name": "block_diffusion", "block": BLOCK, "stop": "off"},
    "unaligned": {"name": "blockwise", "block": BLOCK},
    "smooth": {"name": "smooth", "block": BLOCK},
    "full": {"name": "full"},
}


def decoder(name: str) -> dict[str, Any]:
    own = {info.name for info in options_of(DECODERS.get(name))}
    return {"name": name} | {key: value for key, value in SMALL.items() if key in own}


def recipe_of(cache: str, *, model: str = "block", sweep: str = "block_diffusion", name: str = "threshold") -> Recipe:
    network = fitted(tiny_model("block_causal", **MODELS[model]), name)
    return compose(network, iteration=SWEEPS[sweep], decoder=decoder(name), cache=cache)


def run(recipe: Recipe, **runtime: Any) -> list[Completion]:
    return completions(engine_for(recipe, **runtime), requests_for(recipe))


def prefills(recipe: Recipe) -> list[int]:
    """How many of each request's forwards are a prefill."""
    spec, iteration = recipe.model.spec, recipe.iteration
    first = [
        iteration.first_region(len(prompt), len(prompt) + new)[0] for prompt, new in zip(PROMPTS, NEW, strict=True)
    ]
    return [int(first_phase(recipe.cache, spec, start) == Phase.PREFILL) for start in first]


@pytest.mark.rest(but=6)
@pytest.mark.parametrize(
    ("name", "model"),
    [
        (name, model)
        for name in general(DECODERS)
        for model in MODELS
        if name not in ("renoise", "daedal", "dawn")
        and (name, model) not in (("s2d2", "shifted"), ("s2d2", "shifted_parts"))
    ],
)
@torch.inference_mode()
def test_the_tokens_are_those_without_a_cache(name: str, model: str) -> None:
    """Every decoder, editing ones too; step for step: nothing but the prefill is added."""
    exact = recipe_of("none", model=model, name=name)
    recipe = recipe_of("block", model=model, name=name)
    for got, want, prefill in zip(run(recipe), run(exact), prefills(recipe), strict=True):
        assert got.canvas == want.canvas
        assert got.counts.forwards == want.counts.forwards + prefill
        assert got.counts.committed == want.counts.committed


@pytest.mark.rest(but=7)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("sweep", [*SWEEPS][1:])
@pytest.mark.parametrize("name", ["threshold", "joint_threshold"])
def test_other_sweeps_keep_exact_keys_too(sweep: str, model: str, name: str) -> None:
    """Blocks that begin anywhere: attention blocks that they cut are computed until they are complete."""
    exact = run(recipe_of("none", model=model, sweep=sweep, name=name))
    got = run(recipe_of("block", model=model, sweep=sweep, name=name), rows=3, page=4)
    assert [c.canvas for c in got] == [c.canvas for c in exact]


@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_refreshed_caches_are_exact_under_block_causal_attention(cache: str) -> None:
    """Keys before an aligned block are those of final tokens, and nobody sees those behind it."""
    want, got = run(recipe_of("none")), run(recipe_of(cache))
    assert [c.canvas for c in got] == [c.canvas for c in want]
    assert [c.counts.forwards for c in got] == [c.counts.forwards for c in want]


@pytest.mark.parametrize("name", ["threshold", "fixed", "credit", "joint_threshold"])
def test_rows_of_a_ragged_batch_are_as_alone(name: str) -> None:
    recipe = recipe_of("block", name=name)
    alone = [completions(engine_for(recipe), [request])[0] for request in requests_for(recipe)]
    for runtime in ({}, {"rows": 2, "page": 3}):
        together = run(recipe, **runtime)
        assert [c.canvas for c in together] == [c.canvas for c in alone]
        assert [c.counts.forwards for c in together] == [c.counts.forwards for c in alone]


class Watched:
    """An engine that writes down the shape of every step."""

    def __init__(self, recipe: Recipe) -> None:
        self.engine = engine_for(recipe)
        self.shapes = observed(self.engine)

    def steps(self, request: Request) -> tuple[list[tuple[Phase, int]], list[int], Completion]:
        """Phase and width of every forward of one request, and the block that each worked on."""
        self.shapes.clear()
        updates = list(self.engine.run([request]))
        assert updates[-1].completion is not None
        return [(s.phase, s.width) for s in self.shapes], [u.region[0] for u in updates], updates[-1].completion


@pytest.mark.parametrize("prompt,new", [(5, 40), (8, 24), (21, 13), (37, 3), (16, 1)])
def test_a_finished_block_is_committed_by_the_first_step_of_the_next(prompt: int, new: int) -> None:
    """The prompt once; two blocks wide on entering a block, one block otherwise; nothing behind the last step."""
    recipe = recipe_of("block", sweep="to_the_end")
    watched = Watched(recipe)
    steps, regions, completion = watched.steps(Request.behind(list(range(1, prompt + 1)), new, recipe.resolve({})))
    first, length = prompt // BLOCK * BLOCK, prompt + new
    want: list[tuple[Phase, int]] = [(Phase.PREFILL, first)] * bool(first)
    for before, start in zip([first, *regions[len(want) :]], regions[len(want) :], strict=False):
        want.append((Phase.WINDOW, min(start + BLOCK, length) - before))
    assert steps == want
    assert completion.counts.forwards == len(steps)
    # The references: the same steps, a prefill at all times in one of them, and a commit of each block.
    blocks = len(set(regions[bool(first) :]))
    assert blocks == -(-length // BLOCK) - first // BLOCK
    assert len(steps) <= bool(first) + (len(regions) - bool(first)) + blocks - 1 < len(steps) + blocks


def test_nothing_is_committed_after_an_early_stop() -> None:
    model = tiny_model("block_causal", **MODELS["block"])
    with torch.no_grad():
        model.head.weight[EOS] *= 3  # a model with a liking for the end
    caches = ("none", "block")
    recipes = [
        compose(model, iteration=SWEEPS["block_diffusion"], decoder=decoder("threshold"), cache=c) for c in caches
    ]
    exact, kept = (run(recipe) for recipe in recipes)
    assert any(c.stopped and c.counts.committed < new for c, new in zip(kept, NEW, strict=True))
    for got, want, prefill in zip(kept, exact, prefills(recipes[1]), strict=True):
        assert (got.canvas, got.stopped) == (want.canvas, want.stopped)
        assert got.counts.forwards == want.counts.forwards + prefill


@pytest.mark.rest(but=4)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", ["threshold", "joint_threshold"])
@torch.inference_mode()
def test_kept_keys_are_those_of_the_final_tokens(name: str, model: str) -> None:
    """After a run by any schedule, in scattered pages; the last blocks were never committed, and are not claimed."""
    recipe = recipe_of("block", model=model, sweep="to_the_end", name=name)
    host = Host(recipe, requests_for(recipe), page=4, seed=1)
    host.run_at_random()
    for row, (slot, tokens) in enumerate(zip(host.slots, host.canvases(), strict=True)):
        kept = int(host.state.canvas.cursors_NC[slot, CURSORS.index("kept_B")])
        start, attention = (len(tokens) - 1) // BLOCK * BLOCK, recipe.model.spec.causal_block
        assert kept == start // attention * attention
        for got, want in zip(host.keys(row), whole(recipe, tokens), strict=True):
            assert torch.allclose(got[:, :kept], want[:, :kept], atol=1e-10)


def whole(recipe: Recipe, tokens: list[int]) -> tuple[torch.Tensor, ...]:
    """The keys and values of one block-causal pass over final tokens."""
    exact = dataclasses.replace(recipe, cache=recipe_of("none").cache)
    host = Host(exact, [Request.behind(tokens[:-1], 1, exact.resolve({}))], page=4)
    host.state.canvas.tokens_NS[host.slots[0], : len(tokens)] = torch.tensor(tokens)
    host.step(Phase.FULL, host.slots)
    return host.keys(0)


@pytest.mark.parametrize("sweep", ["block_diffusion", "unaligned"])
def test_no_step_but_a_prefill_leaves_out_the_head(sweep: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of("block", sweep=sweep)
    calls: list[int] = []
    logits = type(recipe.model).logits
    monkeypatch.setattr(type(recipe.model), "logits", lambda self, h: calls.append(h.shape[1]) or logits(self, h))
    found = run(recipe, rows=1)
    assert len(calls) == sum(c.counts.forwards for c in found) - sum(prefills(recipe)) and sum(prefills(recipe))
    assert set(calls) == {BLOCK}


def test_a_recipe_that_would_not_be_exact_is_refused_with_the_remedy() -> None:
    model = tiny_model()
    with pytest.raises(IncompatibleRecipe, match=r"bidirectional.*cache=.*dual"):
        compose(model, iteration="blockwise", decoder="threshold", cache="block")
    with pytest.raises(IncompatibleRecipe, match=r"bidirectional.*iteration=blockwise, with align=true"):
        compose(model, iteration="block_diffusion", decoder="threshold", cache="none")
    with pytest.raises(IncompatibleRecipe, match=r"iteration.block=6 must be a multiple of .*, 8, or divide"):
        compose(
            tiny_model("block_causal", **MODELS["block"]),
            iteration={"name": "block_diffusion", "block": 6},
            decoder="threshold",
            cache="block",
        )


def test_a_fault_in_the_prompt_is_found_by_the_first_step() -> None:
    recipe = recipe_of("block")
    with torch.no_grad():
        recipe.model.embedding.weight[37] = float("nan")
    engine: Engine = engine_for(recipe)
    with pytest.raises(NonFiniteLogits, match=r"request 0: .* denoise step 2"):
        completions(engine, [Request.behind([37] * 9, 8, recipe.resolve({}))])


def test_every_phase_has_its_steps() -> None:
    assert set(Phase) - set(ACTIVE) == {Phase.IDLE, Phase.FAULT}


def reference(model: Any, prompt: list[int], new: int, block: int, steps: int, bar: float) -> tuple[list[int], int]:
    """SDAR's loop, written down from its rule, without keys: the canvas, and the forwards it takes with them."""
    length = -(-(len(prompt) + new) // block) * block
    tokens = torch.tensor(prompt + [MASK] * (length - len(prompt)))
    forwards = int(len(prompt) >= block)  # the prefill
    for start in range(len(prompt) // block * block, length, block):
        own, step = slice(start, start + block), 0
        while (masked := tokens[own] == MASK).any():
            logits = model.score(tokens[None, : own.stop], attention="block_causal", block_length=block)[0, own]
            best, token = logits.float().softmax(-1).max(-1)
            best = best.masked_fill(~masked, -1)
            sure, quota = best > bar, block // steps + (step < block % steps)
            if sure.sum() < quota:
                sure = torch.zeros_like(sure).scatter(0, best.topk(min(quota, int(masked.sum()))).indices, True)
            tokens[own] = torch.where(sure, token, tokens[own])
            forwards, step = forwards + 1, step + 1
        forwards += 1  # the commit
        if any(int(token) in model.spec.stop_ids for token in tokens[max(start, len(prompt)) : own.stop]):
            break
    return tokens.tolist(), forwards


@pytest.mark.parametrize("prompt,new", [(3, 20), (8, 16), (21, 30), (16, 33)])
@pytest.mark.parametrize("bar,steps", [(0.4, 8), (0.6, 4), (1.0, 2), (0.5, 3), (1.0, 5)])
def test_the_goldens_translations_give_the_tokens_of_a_plain_loop(
    prompt: int, new: int, bar: float, steps: int
) -> None:
    """A quota that differs from step to step is in none of the goldens: against the rule written down above."""
    model, ids = tiny_model("block_causal", **MODELS["block"]), [(7 * i) % 36 for i in range(prompt)]
    with torch.no_grad():
        model.head.weight[MASK] = 0  # where the mask wins, the reference writes it, and we do not
    want, forwards = reference(model, ids, new, BLOCK, steps, bar)
    params = {
        "remasking_strategy": "low_confidence_dynamic", "confidence": "argmax token, full softmax probability",
        "confidence_threshold": bar, "block_length": BLOCK, "denoising_steps": steps, "gen_length": new,
        "stop_on_eos": True,
    }  # fmt: skip
    plan = ALGORITHMS["sdar_block_diffusion"]([ids], Fields("case", params))
    decoder = build(DECODERS, plan.decoder)
    recipe = compose(model, iteration=plan.iteration, decoder=decoder, cache=plan.cache)
    got = completions(engine_for(recipe), [Request.behind(ids, plan.new_tokens, recipe.resolve({}))])[0]
    end = next((i for i, token in enumerate(want) if token == MASK), len(want))
    assert got.canvas[:end] == want[:end] and len(got.canvas) == len(want)
    blocks = -(-end // BLOCK) - prompt // BLOCK
    assert got.counts.forwards == forwards - blocks


@pytest.mark.rest(but=4)
@pytest.mark.parametrize("cache", ["none", "prefix", "dual", "vicinity", "block"])
@pytest.mark.parametrize("sweep", ["block_diffusion", "unaligned"])
@torch.inference_mode()
def test_steps_that_are_too_narrow_for_a_row_leave_it_alone(cache: str, sweep: str) -> None:
    """So the host may launch steps before it knows that a row has entered a block and needs a wider one."""
    recipe = recipe_of(cache, model="half", sweep=sweep)
    host = Host(recipe, requests_for(recipe), seed=2)
    for _ in range(400):
        for phase in recipe.phases:
            host.step(phase, host.slots, width=host.random.choice((3, BLOCK, BLOCK + 3)))
        if not (live := host.live()):
            break
        host.step(host.random.choice(live), host.slots)
    want = run(recipe)
    assert host.canvases() == [c.canvas for c in want]
    assert host.steps() == [c.counts.forwards - c.counts.prefills for c in want]  # a prefill takes what it is given
