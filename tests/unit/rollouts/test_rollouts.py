"""Rollouts: the same tokens as without a record, and a record that a replay confirms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.models import EOS, MASK, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

import dinfer
from dinfer.core.layers.transformer import WholeAttend
from dinfer.core.pipeline.pipeline import Pipeline
from dinfer.core.recipe.recipe import compose
from dinfer.lab.likelihood import combine, logps, passes
from dinfer.rollouts.rollouts import Rollouts
from dinfer.rollouts.run import Asked, planned, seed_of

PROMPTS = [[1, 2, 3, 4, 5], [7] * 8]
RECIPES: dict[str, tuple[str, Any, Any, Any]] = {
    "blockwise": ("bidirectional", {"name": "blockwise", "block": 6}, {"name": "threshold", "threshold": 0.6}, "none"),
    "stops early": ("shifted", {"name": "blockwise", "block": 5, "stop": "cut"}, {"name": "fixed", "steps": 3}, "none"),
    "several blocks": ("bidirectional", {"name": "multi_block", "block": 4, "blocks": 3}, "entropy_bound", "none"),
    "block-causal": ("block_causal", "block_diffusion", {"name": "threshold", "threshold": 0.6}, "block"),
    "shifted, leading": ("block_causal", {"name": "block_diffusion", "lead": 4}, "threshold", "block"),
    "prompt as a block": ("block_causal", {"name": "blockwise", "block": 4}, "threshold", "block"),
    "part of a block": ("block_causal", {"name": "block_diffusion", "block": 2}, "threshold", "block"),
}

FIELDS: dict[str, dict[str, Any]] = {"shifted, leading": {"shift": 1}, "prompt as a block": {"prompt_block": True}}


def pipeline(name: str = "blockwise", **runtime: Any) -> Pipeline:
    variant, iteration, decoder, cache = RECIPES[name]
    recipe = compose(tiny_model(variant, **FIELDS.get(name, {})), iteration=iteration, decoder=decoder, cache=cache)
    return Pipeline(recipe, None, dinfer.Runtime(**{"rows": 4, **runtime}))


@pytest.mark.parametrize("name", RECIPES)
def test_a_replay_gives_what_was_recorded(name: str) -> None:
    """And nothing that is recorded changes a token."""
    pipe = pipeline(name)
    made = pipe.rollout(PROMPTS, n=2, max_new_tokens=13, seed=3, temperature=0.7, record="events")
    bare = pipe.rollout(PROMPTS, n=2, max_new_tokens=13, seed=3, temperature=0.7, record="none")
    assert made.answer_ids.equal(bare.answer_ids) and made.lengths.equal(bare.lengths)
    assert bare.steps is None and bare.logps is None and bare.events is None
    assert made.exact and made.logps is not None and made.steps is not None and made.events is not None
    drawn = passes("trajectory", pipe.model.spec, made.samples())
    replayed = combine(drawn, logps(pipe.model, drawn)).per_token[0].float()
    torch.testing.assert_close(replayed, made.logps[:, : replayed.shape[1]], atol=1e-5, rtol=1e-5)
    for n in range(len(made)):
        written = {pos: new for _, pos, _, new in made.events[n].tolist()}
        assert written == {pos: int(made.answer_ids[n, pos]) for pos in (made.steps[n] >= 0).nonzero()[:, 0].tolist()}
        own = made.steps[n][made.steps[n] >= 0]
        assert own.unique().tolist() == [*range(int(own.max()) + 1)]


@pytest.mark.parametrize("runtime", [{"rows": 1}, {"speculate": 3}, {"share": True}])
def test_the_record_is_the_same_however_it_runs(runtime: dict[str, Any]) -> None:
    one, other = (
        pipeline("block-causal", **how).rollout(PROMPTS, n=2, max_new_tokens=16, temperature=0.7, record="events")
        for how in ({}, runtime)
    )
    assert one.steps is not None and other.steps is not None and one.events is not None and other.events is not None
    assert one.answer_ids.equal(other.answer_ids) and one.steps.equal(other.steps)
    assert all(a.equal(b) for a, b in zip(one.events, other.events, strict=True))
    torch.testing.assert_close(one.logps, other.logps)
    torch.testing.assert_close(one.sampled_logps, other.sampled_logps, equal_nan=True)


@pytest.mark.parametrize("name", [*RECIPES, "dual"])
def test_samples_of_a_prompt_share_their_first_pass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row of each prompt is fed; keys, tokens and log-probabilities are those of samples that run alone."""
    monkeypatch.setitem(RECIPES, "dual", (*RECIPES["blockwise"][:3], "dual"))
    pipe, rows = pipeline(name, rows=8), list[int]()
    plain = pipe.model.forward
    monkeypatch.setattr(pipe.model, "forward", lambda x, attend: (rows.append(len(x)), plain(x, attend))[1])
    how: dict[str, Any] = {"n": 4, "max_new_tokens": 13, "seed": 3, "temperature": 0.7}
    made, alone = pipe.rollout(PROMPTS, **how), pipeline(name, rows=1).rollout(PROMPTS, **how)
    assert rows[0] <= len(PROMPTS) < max(rows)
    assert made.answer_ids.equal(alone.answer_ids) and made.forwards.equal(alone.forwards)
    torch.testing.assert_close(made.logps, alone.logps, atol=1e-5, rtol=1e-5)
    rows.clear()
    apart = pipeline(name, rows=8, deterministic=True)
    monkeypatch.setattr(apart.model, "forward", lambda x, attend: (rows.append(len(x)), plain(x, attend))[1])
    apart.rollout(PROMPTS, **how)
    assert rows[0] == max(rows)  # a row computes the same beside any others


def test_samples_that_end_together_are_read_together() -> None:
    """More of them are no more calls of torch."""

    class Operators(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.calls += 1
            return function(*args, **(kwargs or {}))

    sweep = {"name": "blockwise", "block": 6, "stop": "off"}
    recipe = compose(tiny_model(), iteration=sweep, decoder={"name": "fixed", "steps": 3}, cache="none")
    pipe, calls = Pipeline(recipe, None, dinfer.Runtime(rows=12)), list[int]()
    for n in (2, 6):
        made = planned(pipe, PROMPTS, Asked(n, 6, 1, "events"), temperature=0.7)
        done = {one.index: one.completion for one in pipe.engine.run(made.requests) if one.completion is not None}
        with Operators() as seen:
            assert len(made.read(done)) == 2 * n
        calls.append(seen.calls)
    assert calls[0] == calls[1]


def test_what_was_drawn_from_is_what_the_options_leave() -> None:
    """The two best tokens at temperature 0.5; a form leaves what it allows."""
    pipe, greedy = pipeline(), pipeline().rollout(PROMPTS, max_new_tokens=6)
    made = pipe.rollout(PROMPTS[:1], max_new_tokens=6, temperature=0.5, top_k=2)
    assert made.logps is not None and made.sampled_logps is not None and greedy.sampled_logps is not None
    assert made.steps is not None and greedy.sampled_logps.isnan().all()
    tokens_1T = torch.tensor([PROMPTS[0] + [MASK] * 6])
    logits_TV = pipe.model.logits(pipe.model(pipe.model.embed(tokens_1T), WholeAttend(torch.arange(11)[None], None)))[0]
    best = logits_TV[5:].topk(2)
    chances = torch.full_like(logits_TV[5:], -torch.inf).scatter(1, best.indices, (best.values / 0.5).log_softmax(-1))
    first_A = made.steps[0] == 0
    want_A = chances.gather(1, made.answer_ids.T)[:, 0].float()
    torch.testing.assert_close(made.sampled_logps[0, first_A], want_A[first_A], atol=1e-5, rtol=1e-5)
    pipe = dinfer.load("tiny", device="cpu", cache="none")
    form = pipe.rollout(["What?"], max_new_tokens=8, temperature=1.0, regex="Answer: 7")
    assert form.logps is not None and form.sampled_logps is not None
    assert pipe.decode(form.answer_ids[0].tolist()) == "Answer: 7"
    assert (form.sampled_logps > form.logps - 1e-4).all() and form.sampled_logps.sum() > form.logps.sum() + 1


def test_seeds_of_a_group_differ_and_repeat() -> None:
    pipe, heard = pipeline(), list[int]()
    how: dict[str, Any] = {"max_new_tokens": 12, "temperature": 1.0}
    made = pipe.rollout(PROMPTS, n=3, seed=5, on_finish=lambda index, one: heard.append(index), **how)
    again = pipe.rollout(PROMPTS[1:], n=3, seed=[seed_of(5, 1, j) for j in range(3)], **how)
    assert len({*made.seeds.tolist()}) == 6 and sorted(heard) == [*range(6)]
    assert len({*map(tuple, made.answer_ids.tolist())}) > 4
    assert made[3:].answer_ids.equal(again.answer_ids) and made[3:].seeds.equal(again.seeds)


def test_rollouts_are_put_together_and_told_in_each_dialect() -> None:
    pipe = pipeline("block-causal")
    parts = [
        pipe.rollout([prompt], max_new_tokens=new, temperature=0.7)
        for prompt, new in ((PROMPTS[0], 7), (PROMPTS[1], 12))
    ]
    made = Rollouts.cat(parts)
    assert made.steps is not None and made.first_steps is not None
    assert made.answer_ids.shape == (2, 12) and made[[1]].steps.equal(parts[1].steps)  # type: ignore[union-attr]
    assert int(made.answer_ids[0, -1]) == EOS and int(made.steps[0, -1]) == -1
    for n, (answer, told) in enumerate(zip(made.to_trl()["completion_ids"], made.to_sglang(), strict=True)):
        stop, length, meta = int(made.stops[n]), int(made.lengths[n]), told["meta_info"]
        steps = made.first_steps[n, :length].tolist()
        assert answer == told["output_ids"] == made.answer_ids[n, :stop].tolist()
        assert made.step_map("dllm-rl")[n] == steps
        assert made.step_map("jetengine")[n] == [step + 1 for step in steps][:stop] == made.step_map("lmdeploy")[n]
        blocks = made.block_of(n).tolist()
        first = {block: min(s for s, b in zip(steps, blocks, strict=True) if b == block) for block in blocks}
        local = [step - first[block] + 1 for step, block in zip(steps, blocks, strict=True)]
        assert meta["dllm_replay_step_maps"] == local and meta["step_maps"] == local[:stop]
        assert (
            meta["dllm_replay_token_ids"] == made.answer_ids[n, :length].tolist() and meta["dllm_stop_length"] == stop
        )
        assert (int(made.prompt_lengths[n]) + length) % 4 == 0
    with pytest.raises(ValueError, match="some of the rollouts have no logps"):
        Rollouts.cat([parts[0], pipe.rollout([[1]], max_new_tokens=3, record="steps")])


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"n": 0}, "n=0 must be at least 1"),
        ({"n": 2, "seed": [1, 2, 3, 3]}, "prompt 1: two of its samples have the seed 3"),
        ({"n": 2, "seed": [1, 2]}, "seed has 2 values for 2 prompts x 2 samples: give 4, or one"),
        ({"options": {"seed": 1}}, "prompt 0: options hold a seed"),
        ({"seed": "one"}, "seed='one' must be an integer"),
        ({"record": "all"}, "record.*'all'"),
        ({"whole_blocks": False, "max_new_tokens": 7}, "ends within a block of 6: use 12, or whole_blocks=True"),
        ({"max_new_tokens": 250}, "to the end of a block, exceed the model's 256 positions"),
        ({"max_new_tokens": [4]}, "max_new_tokens has 1 values for 2 prompts"),
        ({"options": [{}, {"temperature": -1.0}]}, "prompt 1: .*temperature=-1.0"),
        ({"temperature": 0.5, "options": {"temperature": 0.5}}, "temperature is given by keyword and in options"),
    ],
)  # fmt: skip
def test_bad_input_is_named_before_any_work(how: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pipeline().rollout(PROMPTS, **{"max_new_tokens": 6, **how})
    with pytest.raises(ValueError, match="prompts are empty: give at least one"):
        pipeline().rollout([], max_new_tokens=6)
    with pytest.raises(TypeError, match="rollout takes no temprature: did you mean temperature"):
        pipeline().rollout(PROMPTS, temprature=1.0)


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"cache": "dual"}, "DualCache keeps keys"),
        ({"iteration": "smooth"}, "Smooth feeds more than tokens"),
        ({"decoder": "joint_threshold"}, "JointThreshold changes tokens"),
        ({"iteration": "lopa"}, "Lopa takes tokens that the forward before proposed"),
    ],
)  # fmt: skip
def test_an_inexact_record_says_why(parts: dict[str, Any], reason: str) -> None:
    given = {"iteration": "blockwise", "decoder": "threshold", "cache": "none", **parts}
    made = Pipeline(compose(tiny_model(), **given), None, dinfer.Runtime()).rollout([[1, 2]], max_new_tokens=6)
    assert not made.exact and reason in made.inexact and made.logps is not None and (made.logps < 0).all()
