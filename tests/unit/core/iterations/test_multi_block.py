"""Several blocks at once: against the rules written down, against blockwise, and on both models in the box."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.matrix import completions, engine_for, outcome, requests_for
from support.models import EOS, MASK, VOCAB, tiny_model
from support.scripted import Scripted

import dinfer
from dinfer.core.engine.request import Request, Wants
from dinfer.core.recipe.recipe import IncompatibleRecipe, Recipe, compose
from dinfer.core.step.contracts import BlockView, Decoder, Large, Proposal, State, TokenStats
from dinfer.demo.problems import generate, is_correct

SURE = 0.5


def multi(model: Any, decoder: Any = "threshold", cache: str = "none", **iteration: Any) -> Recipe:
    return compose(model, iteration={"name": "multi_block"} | iteration, decoder=decoder, cache=cache)


@pytest.mark.parametrize("cache", ["none", "dual"])
@pytest.mark.parametrize("decoder", ["threshold", "joint_threshold", "credit"])
def test_one_block_at_once_is_blockwise(decoder: str, cache: str) -> None:
    model = tiny_model()
    one = multi(model, decoder, cache, blocks=1, block=8)
    other = compose(model, iteration={"name": "blockwise", "block": 8}, decoder=decoder, cache=cache)
    got, want = ([outcome(c) for c in completions(engine_for(r), requests_for(r))] for r in (one, other))
    assert got == want


@pytest.mark.rest(but=5)
@pytest.mark.parametrize("blocks", [2, 3])
@pytest.mark.parametrize("decoder", ["threshold", "credit", "joint_threshold"])
@pytest.mark.parametrize("cache", ["dual", "block"])
def test_exact_caches_stay_exact_while_blocks_slide(cache: str, decoder: str, blocks: int) -> None:
    """Keys of a block that waits for the ones before it depend on these, and are computed again with final tokens."""
    rule = {"name": decoder, "threshold": SURE}
    exact, cached = (
        multi(tiny_model("block_causal"), rule, name, blocks=blocks, block=4, align=True) for name in ("none", cache)
    )
    want = completions(engine_for(exact), requests_for(exact))
    got = completions(engine_for(cached, rows=3, page=4), requests_for(cached))
    assert [c.canvas for c in got] == [c.canvas for c in want]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("blocks", "add_at", "force_at"), [(2, 0.25, 1.0), (3, 0.0, 0.5), (4, 0.5, 0.75), (3, 1.0, 1.0)]
)
def test_the_blocks_are_those_of_the_rules(blocks: int, add_at: float, force_at: float, seed: int) -> None:
    """A slow loop over lists: which blocks are open before each step, and what is committed in it."""
    length, prompt, new = 4, [1] * 6, 22
    table = 3 * torch.randn(5, 7, VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    table[..., [EOS, MASK]] = -50.0
    iteration = {"blocks": blocks, "block": length, "add_at": add_at, "force_at": force_at, "align": True}
    recipe = multi(Scripted(table), {"name": "threshold", "threshold": SURE}, **iteration)
    updates = list(engine_for(recipe).run([Request.behind(prompt, new, recipe.resolve({}))], Wants(snapshots=True)))

    open_ = set(range(len(prompt), len(prompt) + new))
    end_of_all, tops = len(prompt) + new, table.softmax(-1)

    def share(block: int) -> float:
        size = min(length, end_of_all - block * length)
        return (size - sum(p // length == block for p in open_)) / size

    active = [1]
    if blocks > 1 and share(1) >= add_at:  # the prompt overlaps block 1
        active.append(2)
    for step, update in enumerate(updates):
        assert update.region == (active[0] * length, min((active[-1] + 1) * length, end_of_all))
        chosen: set[int] = set()
        for place, block in enumerate(active):
            mine = {p: float(tops[step % 5, p % 7].max()) for p in sorted(open_) if p // length == block}
            sure = {p for p, c in mine.items() if c >= SURE}
            forced = place == 0 or share(active[place - 1]) >= force_at
            chosen |= sure or ({max(mine, key=lambda p: mine[p])} if mine and forced else set())
        open_ -= chosen
        assert {p for p, masked in enumerate(update.masked or []) if masked} == open_
        last = active[-1]
        opens = share(last) >= add_at and (last + 1) * length < end_of_all
        assert len(active) <= blocks
        room = len(active) < blocks
        while active and share(active[0]) == 1:
            active.pop(0)
        if not active and opens:
            active = [last + 1]
        elif active and opens and room:
            active.append(last + 1)
    assert not open_ and not active


@dataclass(frozen=True, kw_only=True)
class Remembering(Decoder):
    """Holds the place of its block and the number of its steps in state."""

    seen: list[tuple[int, int, int, int]]

    def fresh_state(self, spec: Any, block: int) -> State:
        return {"place": torch.full((), -1), "steps": torch.full((), 0)}

    def select(self, stats: TokenStats, view: BlockView, state: State) -> Proposal:
        here_R = view.pos_RL[:, 0]
        state["place"].copy_(torch.where(state["steps"] == 0, here_R, state["place"]))
        there_R = here_R >= 0
        rows = zip(*(t[there_R].tolist() for t in (here_R, state["place"], view.step_R, state["steps"])), strict=True)
        self.seen.extend(rows)
        state["steps"] += there_R
        return Proposal(view.masked_RL & (stats.top_RL > 0.99))


def test_all_blocks_open_at_once_where_a_new_one_is_decoded_enough() -> None:
    """d3LLM without a cache: activation goes on to the next block in the same step, and a new block's share is 0."""
    table = torch.randn(5, 7, VOCAB, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    table[..., [EOS, MASK]] = -50.0
    for force, regions in (("each", [(6, 10), (6, 14)]), ("first", [(6, 18), (6, 18)])):
        recipe = multi(
            Scripted(table), {"name": "fixed", "steps": 4}, blocks=3, block=4, add_at=0.0, force=force, force_at=0.0
        )
        updates = [*engine_for(recipe).run([Request.behind([1] * 6, 22, recipe.resolve({}))], Wants(snapshots=True))]
        assert [update.region for update in updates[:2]] == regions
        starts, ends = zip(*(update.region for update in updates), strict=True)
        if force == "first":
            assert all(end == min(start + 12, 28) for start, end in zip(starts, ends, strict=True))
        assert updates[-1].completion is not None and MASK not in updates[-1].completion.canvas


def test_state_and_step_counts_stay_with_their_block() -> None:
    decoder = Remembering(seen=[])
    recipe = multi(tiny_model(), decoder, blocks=3, block=4, add_at=0.0)
    completions(
        engine_for(recipe, rows=2), [Request.behind([1, 2, 3], 21), Request.behind([4] * 9, 14), Request.behind([5], 6)]
    )
    assert len({place for place, *_ in decoder.seen}) > 6 and max(steps for *_, steps in decoder.seen) > 1
    assert all(here == place and step == steps for here, place, step, steps in decoder.seen)


@dataclass(frozen=True, kw_only=True)
class Counting(Decoder):
    """Counts its steps in state that is not copied into the step, and has no other."""

    seen: list[tuple[int, int]]

    def fresh_state(self, spec: Any, block: int) -> State:
        return {"steps": Large(torch.full((), 0))}

    def select(self, stats: TokenStats, view: BlockView, state: State) -> Proposal:
        steps_R = torch.where(view.step_R == 0, 0, state["steps"].read())  # a new block finds what the last one left
        state["steps"].write(steps_R + 1)
        there_R = view.pos_RL[:, 0] >= 0
        self.seen.extend(zip(view.step_R[there_R].tolist(), steps_R[there_R].tolist(), strict=True))
        return Proposal(view.masked_RL & (stats.top_RL > 0.99))


def test_state_that_is_not_copied_stays_with_its_block_too() -> None:
    decoder = Counting(seen=[])
    recipe = multi(tiny_model(), decoder, blocks=3, block=4, add_at=0.0)
    completions(engine_for(recipe, rows=1), [Request.behind([1, 2, 3], 21)])
    assert max(step for step, _ in decoder.seen) > 1 and all(step == steps for step, steps in decoder.seen)


@pytest.mark.parametrize("stop", ["block", "cut", "off"])
def test_a_stop_token_ends_the_row_when_all_before_it_is_there(stop: str) -> None:
    model = tiny_model()
    with torch.no_grad():
        model.head.weight[EOS] *= 3  # a model with a liking for the end
    recipe = multi(model, {"name": "threshold", "threshold": SURE}, blocks=3, block=4, stop=stop)
    for request in requests_for(recipe):
        done = completions(engine_for(recipe), [request])[0]
        answer = done.canvas[len(request.prompt) :]
        assert MASK not in answer
        assert (done.counts.committed == request.new_tokens) or (stop != "off" and EOS in answer)


def test_a_block_opens_only_once_the_last_one_is_stable() -> None:
    """Its tokens are rewritten at every step while two tables take turns, and then no more."""
    table = torch.zeros(8, 1, VOCAB, dtype=torch.float64)
    table[[0, 2, 4], :, 3], table[[1, 3, 5, 6, 7], :, 4] = 6.0, 6.0
    rule = {"name": "joint_threshold", "threshold": 0.999, "edit_threshold": SURE, "post_edits": 20}
    opened = []
    for stable_at in (0.0, 1.0):
        recipe = multi(Scripted(table), rule, block=4, add_at=0.5, stable_at=stable_at, stop="off")
        updates = engine_for(recipe).run([Request.behind([1], 12, recipe.resolve({}))])
        opened.append(next(step for step, update in enumerate(updates) if update.region[1] > 5))
    assert opened == [2, 7]


def test_stability_needs_a_decoder_that_edits() -> None:
    with pytest.raises(
        IncompatibleRecipe, match=r"decoder=threshold never looks at decoded tokens. Use iteration.stable_at=0"
    ):
        multi(tiny_model(), stable_at=0.5)


def test_a_model_with_an_encoder_is_refused() -> None:
    with pytest.raises(IncompatibleRecipe, match=r"encoder must read.* Use iteration=.*blockwise"):
        multi(tiny_model("uniform"), "entropy_bound")


@pytest.mark.rest(but=1)
@pytest.mark.parametrize(("model", "cache"), [("tiny", "dual"), ("tiny-llada2", "block")])
def test_two_blocks_at_once_on_the_models_in_the_box(model: str, cache: str) -> None:
    """Fewer forwards than with one, and still mostly right."""
    problems = generate("heldout", 2, seed=1)
    forwards, right = {}, {}
    for blocks in (1, 2):
        iteration = {"name": "multi_block", "blocks": blocks, "block": 8 if model == "tiny" else 32, "align": True}
        pipe = dinfer.load(model, device="cpu", iteration=iteration, decoder="threshold", cache=cache)
        results = pipe.generate([p.question for p in problems], max_new_tokens=64)
        forwards[blocks] = sum(result.counts.forwards for result in results)
        right[blocks] = sum(is_correct(p, r.text) for p, r in zip(problems, results, strict=True))
    assert forwards[2] <= forwards[1] and right[2] >= len(problems) // 2, (forwards, right)
