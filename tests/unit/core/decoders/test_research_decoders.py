"""Decoders whose references are papers: against slow ones, written here from the formulas."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.decoding import PROMPT, decode, decoded, script, view_of
from support.models import MASK, VOCAB
from torch import Tensor

from dinfer.core.kernels.canvas import Rows
from dinfer.core.kernels.random import uniform
from dinfer.core.kernels.token_stats import token_stats
from dinfer.research.decoders.dream import Dream, linear_timesteps
from dinfer.research.decoders.history import Klass

# Dream


@pytest.mark.parametrize("eps", [1e-3, 1e-5, 0.1])
def test_timesteps_are_those_of_linspace_to_the_bit(eps: float) -> None:
    for steps in (*range(1, 130), 256, 511, 512, 1000):
        index = torch.arange(steps + 1)
        found = linear_timesteps(index, torch.tensor(steps), torch.tensor(eps, dtype=torch.float64))
        assert torch.equal(found, torch.linspace(1, eps, steps + 1))


def dream_reference(score_L: Tensor, steps: int, eps: float) -> list[set[int]]:
    """The reference's loop, less the steps in which it writes nothing: positions decoded after each step."""
    times = torch.linspace(1, eps, steps + 1)
    masked, seen, found = set(range(len(score_L))), set(), []
    for i in range(steps):
        n = torch.tensor(len(masked)) / 1  # the sum of a mask over a batch of one, a float32 tensor
        count = int(n * (1 - times[i + 1] / times[i])) if i < steps - 1 else int(n)
        best = sorted(masked, key=lambda p: (-float(score_L[p]), p))[:count]
        masked -= set(best)
        if best:
            seen = seen | set(best)
            found.append(seen)
    return found


@pytest.mark.parametrize("alg", ["maskgit_plus", "topk_margin", "entropy"])
@pytest.mark.parametrize("steps,length", [(1, 9), (5, 17), (8, 24), (24, 24), (40, 20), (25, 24), (100, 7), (512, 32)])
def test_dream_commits_what_the_reference_commits(alg: str, steps: int, length: int) -> None:
    table = script(1, length, seed=steps)
    prob = table[0, PROMPT:].softmax(-1)
    two = prob.topk(2, -1).values
    scores = {
        "maskgit_plus": two[:, 0],
        "topk_margin": two[:, 0] - two[:, 1],
        "entropy": (prob * (prob + 1e-10).log()).sum(-1),
    }
    found = decoded({"name": "dream", "alg": alg, "steps": steps}, table)
    assert found == dream_reference(scores[alg], steps, 1e-3)


@pytest.mark.rest(but=1)
@pytest.mark.parametrize("eps", [1e-3, 1e-5])
def test_dream_counts_exactly_for_any_length(eps: float) -> None:
    """Where n h / t is an integer up to rounding, one bit decides; all lengths and steps up to 40 hit many of those."""
    for length in range(1, 41, 3):
        table = script(1, length, seed=length)
        best = table[0, PROMPT:].softmax(-1).amax(-1)
        steps = range(1, 41, 2)
        rows = decode({"name": "dream", "alg": "maskgit_plus", "eps": eps}, table, *({"steps": n} for n in steps))
        for n, row in zip(steps, rows, strict=True):
            assert [positions for _, positions in row] == dream_reference(best, n, eps), (length, n)


def test_dream_origin_commits_each_position_at_the_published_rate() -> None:
    """The chance of a mask to be committed at step i is 1 - t_{i+1} / t_i, whatever happened before."""
    steps, eps, rows = 6, 1e-3, 4000
    times = torch.linspace(1, eps, steps + 1)
    decoder = Dream(alg="origin", steps=steps)
    masked_RL = torch.ones(rows, 4, dtype=torch.bool)
    stats = token_stats(script(1, 3).expand(rows, -1, -1), MASK, torch.float32)
    state = {"level": torch.zeros(rows, dtype=torch.int64)}
    step_RL = torch.full((rows, 4), -1)
    for _ in range(steps):
        view = view_of(masked_RL, seeds=torch.arange(rows), steps=steps, eps=eps, alg_temp=0.0)
        commit_RL = decoder.select(stats, view, state).commit_RL
        # A row that is done has committed all; one that is not commits something at every step.
        assert bool((commit_RL.any(-1) | ~masked_RL.any(-1)).all())
        step_RL = torch.where(commit_RL, (state["level"] - 1)[:, None], step_RL)
        masked_RL = masked_RL & ~commit_RL
    assert not masked_RL.any()
    for i in range(steps):
        left = int((step_RL >= i).sum())
        rate = float((step_RL == i).sum()) / left
        want = 1.0 if i == steps - 1 else float(1 - times[i + 1] / times[i])
        assert abs(rate - want) < 4 * (0.25 / left) ** 0.5, i


def test_dream_with_alg_temp_draws_positions_from_the_softmax_of_the_scores() -> None:
    rows, length, temperature = 20_000, 5, 0.3
    stats = token_stats(script(1, length - 1, seed=4).expand(rows, -1, -1), MASK, torch.float32)
    masked_RL = torch.ones(rows, length, dtype=torch.bool)
    decoder = Dream(alg="maskgit_plus", steps=length)
    view = view_of(masked_RL, seeds=torch.arange(rows), steps=length, eps=1e-3, alg_temp=temperature)
    state = {"level": torch.zeros(rows, dtype=torch.int64)}
    commit_RL = decoder.select(stats, view, state).commit_RL
    assert bool((commit_RL.sum(-1) == 1).all())
    want = (stats.top_RL[0] / temperature).softmax(-1)
    assert torch.allclose(commit_RL.double().mean(0), want, atol=4 * (0.25 / rows) ** 0.5)


def test_dream_is_the_same_for_the_same_seed_only() -> None:
    seeds = torch.tensor([5, 5, 6])
    stats = token_stats(script(1, 31).expand(3, -1, -1), MASK, torch.float32, needs=("entropy",))
    for alg, temperature in (("origin", 0.0), ("entropy", 1.0)):
        state = {"level": torch.zeros(3, dtype=torch.int64)}
        view = view_of(torch.ones(3, 32, dtype=torch.bool), seeds=seeds, steps=4, eps=1e-3, alg_temp=temperature)
        commit_RL = Dream(alg=alg, steps=4).select(stats, view, state).commit_RL  # type: ignore[arg-type]
        assert torch.equal(commit_RL[0], commit_RL[1])
        assert not torch.equal(commit_RL[0], commit_RL[2])


# KLASS


def klass_reference(table: Tensor, tau: float, epsilon: float, history: int, least: int) -> list[set[int]]:
    masked, seen, found, divergences, before = set(range(table.shape[1] - PROMPT)), set(), [], [], None
    for page in table[:, PROMPT:].softmax(-1):
        eps = 1e-12
        previous = torch.zeros_like(page) if before is None else before
        divergences.append((page * ((page + eps).log() - (previous + eps).log())).sum(-1))
        before, top = page, page.amax(-1)
        recent = divergences[-history:]
        ready = {
            p for p in masked
            if len(recent) == history and all(kl[p] < epsilon for kl in recent) and top[p] > tau
        }  # fmt: skip
        chosen = ready or set(sorted(masked, key=lambda p: (-float(top[p]), p))[:least])
        masked, seen = masked - chosen, seen | chosen
        found.append(seen)
        if not masked:
            break
    return found


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("history,least", [(1, 1), (2, 1), (3, 2)])
def test_klass_commits_the_stable_and_the_sure(seed: int, history: int, least: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    table = script(24, 16, seed=seed).cumsum(0) / torch.arange(1, 25)[:, None, None] ** 0.5  # settles, position by
    table = torch.where(torch.rand(table.shape[:2], generator=generator)[..., None] < 0.8, table, table.roll(1, 0))
    table[..., MASK] = -20.0
    options = {"threshold": 0.2, "kl_threshold": 0.2, "history": history, "least": least}
    want = klass_reference(table, 0.2, 0.2, history, least)
    assert decoded({"name": "klass", **options}, table) == want
    assert len(want) < 16 or least == 1


def test_klass_never_trusts_a_first_step() -> None:
    table = script(1, 8, scale=30.0)
    sizes = [len(positions) for positions in decoded({"name": "klass", "threshold": 0.5}, table)]
    assert sizes == [1, 2, 8]  # the third step is the second that did not move


def test_klass_leaves_its_distributions_where_they_are() -> None:
    """Of the rows of a step, only live ones are written, and what an earlier block left counts for nothing."""
    decoder, table_NLV = Klass(), torch.full((3, 2, VOCAB), 0.5)
    logits_RLV, index_R = script(1, 2)[:, PROMPT:].float().expand(2, -1, -1), torch.tensor([2, 0])
    state = {
        "before": Rows(table_NLV, index_R, torch.tensor([True, False])),
        "stable": torch.tensor([[1, 1], [1, 1]]),
    }
    view = view_of(torch.ones(2, 2, dtype=torch.bool), seeds=torch.zeros(2), kl_threshold=1e9)
    decoder.adjust(logits_RLV, view, state)
    assert torch.equal(table_NLV[2], logits_RLV[0].softmax(-1)) and bool((table_NLV[:2] == 0.5).all())
    assert not state["stable"].any(), "a block's first step is never stable"
    decoder.adjust(logits_RLV, replace(view, step_R=torch.ones(2, dtype=torch.int64)), state)
    assert bool((state["stable"] == 1).all())


# WINO


def wino_reference(table: Tensor, tau: float, keep: float) -> list[tuple[set[int], dict[int, int]]]:
    length = table.shape[1] - PROMPT
    masked, tokens, found = set(range(length)), {}, []
    for page in table[:, PROMPT:].softmax(-1):
        top = page.amax(-1)
        limit = min(max(int(len(masked) * 0.7), 5), 20)
        order = sorted(masked, key=lambda p: (-float(top[p]), p))
        enter = [p for p in order if top[p] > tau][:limit] or order[:1]
        doubtful = sorted(
            (p for p in tokens if page[p, tokens[p]] < keep), key=lambda p: (float(page[p, tokens[p]]), p)
        )
        leave = doubtful[: len(enter) - 1]
        masked = (masked - set(enter)) | set(leave)
        tokens = {p: t for p, t in tokens.items() if p not in leave} | {p: int(page[p].argmax()) for p in enter}
        found.append((set(range(length)) - masked, dict(tokens)))
        if not masked:
            break
    return found


@pytest.mark.parametrize("seed", range(6))
def test_wino_lets_many_in_and_takes_the_doubtful_back(seed: int) -> None:
    table = script(40, 24, seed=seed, scale=2.5)
    steps = decode({"name": "wino", "threshold": 0.25, "keep_threshold": 0.3}, table, {})[0]
    want = wino_reference(table, 0.25, 0.3)
    assert [positions for _, positions in steps] == [positions for positions, _ in want]
    for (update, _), (_, tokens) in zip(steps, want, strict=True):
        assert {p: (update.tokens or [])[PROMPT + p] for p in tokens} == tokens
    assert any(before - after for (before, _), (after, _) in zip(want, want[1:], strict=False)), (
        "nothing was taken back"
    )


def test_wino_lets_in_no_more_than_its_bounds() -> None:
    sizes = [len(positions) for positions in decoded({"name": "wino", "threshold": 0.0}, script(1, 32, scale=50.0))]
    assert sizes[0] == 20 and sizes[1] == 28 and sizes[-1] == 32  # 0.7 * 32 = 22, then 0.7 * 12 = 8, then 5


# Entropy bound


@pytest.mark.parametrize("score", ["entropy", "low_confidence", "margin"])
@pytest.mark.parametrize("bound", [0.0, 0.05, 1.0, 5.0])
def test_entropy_bound_takes_the_largest_prefix_that_fits(score: str, bound: float) -> None:
    table = script(7, 15, seed=3, scale=2.0)
    masked, seen, want = set(range(15)), set(), []
    for page in table.repeat(5, 1, 1)[:, PROMPT:].softmax(-1):
        two, entropy = page.topk(2, -1).values, -(page * page.log()).sum(-1)
        best = {"entropy": -entropy, "low_confidence": two[:, 0], "margin": two[:, 0] - two[:, 1]}[score]
        order = sorted(masked, key=lambda p: (-float(best[p]), p))
        fits = [
            n for n in range(1, len(order) + 1) if float(sum(entropy[order[:n]]) - max(entropy[order[:n]])) <= bound
        ]
        chosen = set(order[: max([1, *fits])])
        masked, seen = masked - chosen, seen | chosen
        want.append(seen)
        if not masked:
            break
    assert decoded({"name": "entropy_bound", "score": score, "bound": bound}, table) == want


@pytest.mark.parametrize("bound", [0.0, 0.7, 1.5])
def test_a_bound_on_each_entropy_takes_all_below_it_and_the_best(bound: float) -> None:
    prob = script(1, 24, seed=5, scale=2.0)[0, PROMPT:].softmax(-1)
    entropy = -(prob * prob.log()).sum(-1)
    want = {int(entropy.argmin()), *(i for i in range(24) if entropy[i] < bound)}
    assert (
        decoded({"name": "entropy_bound", "limits": "each", "bound": bound}, script(1, 24, seed=5, scale=2.0))[0]
        == want
    )


def test_a_suppressed_mask_token_keeps_no_position_from_its_commit() -> None:
    """Where the mask token always wins, it is left out of the distribution; otherwise a step commits one token."""
    table = script(1, 12, seed=6, scale=2.0)
    plain = decoded({"name": "entropy_bound", "bound": 2.0}, table)
    table[..., MASK] = 30.0
    assert decoded({"name": "entropy_bound", "bound": 2.0}, table, suppress_mask=True) == plain
    assert len(plain) < len(decoded({"name": "entropy_bound", "bound": 2.0}, table)) == 12


def test_the_stream_of_a_position_is_uniform() -> None:
    draws = uniform(torch.arange(200)[:, None], torch.arange(100))
    assert abs(float(draws.mean()) - 0.5) < 0.01 and abs(float(draws.var()) - 1 / 12) < 0.003


def test_no_step_is_spent_on_edits_beyond_the_budget() -> None:
    """All masks go at once; then one step of editing that finds nothing, if there may be any."""
    table = script(1, 8)
    table[..., 5] = 60.0
    for post_edits, forwards in ((0, 1), (1, 2), (16, 2)):
        decoder = {"name": "joint_threshold", "threshold": 0.1, "post_edits": post_edits}
        assert len(decode(decoder, table, {})[0]) == forwards


@pytest.mark.parametrize("post_edits", [0, 1, 3])
def test_edits_that_never_settle_end_with_the_budget(post_edits: int) -> None:
    table = script(64, 8)
    table[::2, :, 5] = table[1::2, :, 6] = 60.0  # another token at every step
    decoder = {"name": "joint_threshold", "threshold": 0.1, "post_edits": post_edits}
    assert len(decode(decoder, table, {})[0]) == 1 + post_edits


def test_the_softmax_is_as_precise_as_the_decoder_was_published_unless_the_sampling_says_otherwise() -> None:
    """In float32 both are certain, and the leftmost of two equals goes first."""
    table = torch.zeros(2, PROMPT + 2, VOCAB)
    table[:, 1, 5], table[:, 2, 5] = 30, 34
    first = [decoded({"name": "fixed", "steps": 2}, table, **more)[0] for more in ({}, {"precision": "float32"})]
    assert first == [{1}, {0}]
    assert decoded({"name": "threshold", "threshold": 1.0}, table)[0] == {0, 1}
    assert decoded({"name": "threshold", "threshold": 1.0}, table, precision="float64")[0] == {1}
