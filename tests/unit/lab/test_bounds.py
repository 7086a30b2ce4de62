"""Bounds of the log-likelihood against enumeration: over all texts, all masks and all orders of a toy vocabulary."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import combinations, permutations, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.models import tiny_model, tiny_spec
from torch import Tensor

from dinfer.core.engine.runtime import Runtime
from dinfer.core.pipeline import Pipeline
from dinfer.core.recipe.recipe import compose
from dinfer.core.step.contracts import ModelSpec
from dinfer.core.step.model import Attend
from dinfer.core.terms.spec import ExpertSpec
from dinfer.lab.bounds import Bound, estimator, greedy, log_likelihoods
from dinfer.lab.likelihood import Mask, Samples, logps, passes, spread

WORDS, LENGTH = 3, 4
MASK = WORDS


@dataclass
class Joint:
    """Knows the joint distribution of texts of four tokens, and answers every masked query exactly from it."""

    spec: ModelSpec
    table: Tensor  # [3, 3, 3, 3]
    dtype = torch.float64
    device = torch.device("cpu")

    def embed(self, tokens_BW: Tensor) -> Tensor:
        return tokens_BW[..., None].double()

    def forward(self, x_BWD: Tensor, attend: Attend) -> Tensor:
        """log p(token at a position | what the position sees unmasked)."""
        pos_BW, seen_BWS = attend.pos_BW, getattr(attend, "seen_BWS", None)
        out_BWV = torch.full((*pos_BW.shape, WORDS + 1), -math.inf, dtype=torch.float64)
        tokens_BS, place_BS = x_BWD[..., 0].long(), pos_BW
        if (lane_B := getattr(attend, "lane_B", None)) is not None:  # keys of clean texts stand before its own
            tokens_BS = torch.cat((self.clean[0][lane_B], tokens_BS), 1)
            place_BS = torch.cat((self.clean[1][lane_B], place_BS), 1)
        else:
            self.clean = tokens_BS, place_BS
        for b, w in product(*map(range, pos_BW.shape)):
            known = {}
            for k in range(place_BS.shape[1]):
                if (seen_BWS is None or seen_BWS[b, w, k]) and tokens_BS[b, k] != MASK:
                    known[int(place_BS[b, k])] = int(tokens_BS[b, k])
            if (target := int(pos_BW[b, w]) + self.spec.shift) < LENGTH and target not in known:
                out_BWV[b, w, :WORDS] = self.conditional(target, known).log()
        return out_BWV

    def logits(self, h_BLD: Tensor) -> Tensor:
        return h_BLD

    def conditional(self, target: int, known: dict[int, int]) -> Tensor:
        part = self.table[tuple(known.get(i, slice(None)) for i in range(LENGTH))]
        others = [i for i in range(LENGTH) if i not in known]
        rest = [n for n, i in enumerate(others) if i != target]
        sums = part.sum(rest) if rest else part
        return sums / sums.sum()


def joint(block: int | None = None, shift: int = 0, *, prompt_block: bool = False) -> Joint:
    random = torch.Generator().manual_seed(3)
    table = torch.rand(WORDS, WORDS, WORDS, WORDS, generator=random, dtype=torch.float64) ** 3
    spec = tiny_spec(
        vocab=WORDS + 1, mask_id=MASK, eos_id=0, stop_ids=(0,), causal_block=block, shift=shift,
        prompt_block=prompt_block,
    )  # fmt: skip
    return Joint(spec, table / table.sum())


def subsets(length: int) -> list[tuple[tuple[int, ...], float]]:
    """Every mask and its probability."""
    return [
        (chosen, 1 / length / math.comb(length, k))
        for k in range(1, length + 1)
        for chosen in combinations(range(length), k)
    ]


def enumerated(model, prompt: list[int], answer: list[int]) -> float:
    """The expectation that the estimator estimates, over all masks, for a bidirectional model."""
    found = subsets(len(answer))
    hidden = [torch.tensor([False] * len(prompt) + [i in chosen for i in range(len(answer))]) for chosen, _ in found]
    masks = [Mask(0, masked_T, x) for x, masked_T in enumerate(hidden)]
    drawn = passes("elbo", model.spec, Samples.of([(prompt, answer)]), masks=masks)
    value_X = drawn.weight_X * logps(model, drawn, grad=False)
    value_M = torch.zeros(len(found), dtype=torch.float64).index_add(0, drawn.pass_X, value_X)
    return sum(p * value for (_, p), value in zip(found, value_M.tolist(), strict=True))


@pytest.mark.parametrize("block", [None, 2, 3, 4, 1])
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("given", [1, 2])
def test_a_consistent_model_gets_its_exact_likelihood(block: int | None, shift: int, given: int) -> None:
    """For conditionals of one joint distribution the bound is tight, whatever the blocks: only sampling errs."""
    model, text = joint(block, shift), [2, 0, 1, 1]
    exact = math.log(model.table[tuple(text)] / model.table[tuple(text[:given])].sum())
    found = log_likelihoods(model, [(text[:given], text[given:])], samples=96, seed=5)[0]
    assert abs(found.value - exact) <= 4 * found.error + 1e-9
    single = block == 1 or (block, shift, given) in {(3, 0, 2), (3, 1, 2), (2, 1, 1), (2, 1, 2)}
    assert found.exact == single and found.error < 0.25


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize(("block", "given"), [(1, 1), (2, 1), (2, 2), (3, 1)])
def test_blocks_may_be_counted_from_the_prompts_end(block: int, given: int, shift: int) -> None:
    model, text = joint(block, shift, prompt_block=True), [2, 0, 1, 1]
    exact = math.log(model.table[tuple(text)] / model.table[tuple(text[:given])].sum())
    found = log_likelihoods(model, [(text[:given], text[given:])], samples=96, seed=5)[0]
    assert abs(found.value - exact) <= 4 * found.error + 1e-9
    assert found.exact == (block == 1 or (block == 2 and shift == 1)) and found.error < 0.25


def test_a_prompt_of_one_block_counts_as_it_always_does() -> None:
    ordinary, other = tiny_model("block_causal"), tiny_model("block_causal", prompt_block=True)
    pairs = [([1, 2, 3, 4], [5, 6, 7, 8, 9, 10])]
    assert log_likelihoods(other, pairs, samples=4) == log_likelihoods(ordinary, pairs, samples=4)
    assert log_likelihoods(other, [([1, 2, 3], [5, 6])]) != log_likelihoods(ordinary, [([1, 2, 3], [5, 6])])


def test_all_masks_together_are_exact() -> None:
    model = joint()
    for text in ([2, 0, 1, 1], [0, 0, 2, 1]):
        assert enumerated(model, text[:1], text[1:]) == pytest.approx(
            math.log(model.table[tuple(text)] / model.table[text[0]].sum())
        )


def test_the_bound_is_the_mean_over_all_orders() -> None:
    """Of a network whose conditionals agree on no joint distribution: any order is a chain rule of its own."""
    model, prompt, answer = tiny_model(), [1, 2], [3, 4, 5]
    orders = []
    for order in permutations(range(3)):
        total = 0.0
        for step, i in enumerate(order):
            canvas = [model.spec.mask_id if j in order[step:] else answer[j] for j in range(3)]
            total += float(model.score(torch.tensor([prompt + canvas]))[0, 2 + i].log_softmax(-1)[answer[i]])
        orders.append(total)
    expected = enumerated(model, prompt, answer)
    assert expected == pytest.approx(sum(orders) / 6)
    found = log_likelihoods(model, [(prompt, answer)], samples=3000, batch=500)[0]
    assert abs(found.value - expected) < 4 * found.error < 0.5


@pytest.mark.rest
def test_bounds_of_all_texts_sum_to_one_at_most() -> None:
    model = tiny_model()
    total = sum(math.exp(enumerated(model, [1], list(pair))) for pair in product(range(39), repeat=2))
    assert 0 < total <= 1


@pytest.mark.rest
def test_blocks_are_a_chain_rule() -> None:
    """A block-causal network: the blocks one by one, each behind its clean text, as prompt and answer."""
    model, text = tiny_model("block_causal"), [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    whole = log_likelihoods(model, [(text[:3], text[3:])], samples=4000, batch=500)[0]
    parts = [
        log_likelihoods(model, [(text[:start], text[start:end])], samples=4000, seed=7, batch=500)[0]
        for start, end in ((3, 4), (4, 8), (8, 10))
    ]
    error = math.sqrt(whole.error**2 + sum(part.error**2 for part in parts))
    assert abs(whole.value - sum(part.value for part in parts)) < 4 * error < 1
    assert parts[0].exact and not whole.exact


@pytest.mark.parametrize("variant", ["bidirectional", "shifted", "block_causal", "causal"])
def test_no_value_depends_on_its_batch(variant: str) -> None:
    model = tiny_model(variant)
    pairs = [([1, 2, 3], [4, 5]), ([1], [2, 3, 4, 5, 6, 7, 8]), ([9], [3]), ([1, 2], [])]
    together = log_likelihoods(model, pairs, samples=5, batch=4, guidance=0.5)
    alone = [log_likelihoods(model, [pair], samples=5, batch=1, guidance=0.5)[0] for pair in pairs]
    assert [bound.value for bound in together] == pytest.approx([bound.value for bound in alone])
    assert together[3] == Bound(0.0, 0.0, 1, True)
    assert together[0].value != log_likelihoods(model, pairs, samples=5, seed=1)[0].value or variant == "causal"


def test_one_token_and_one_sample() -> None:
    model = tiny_model()
    one = log_likelihoods(model, [([1, 2], [3])], samples=64)[0]
    logits = model.score(torch.tensor([[1, 2, model.spec.mask_id]]))[0, 2]
    assert (one.samples, one.exact, one.error) == (1, True, 0.0)
    assert one.value == pytest.approx(float(logits.log_softmax(-1)[3]))
    assert log_likelihoods(model, [([1], [2, 3])], samples=1)[0].error == math.inf


@given(st.integers(1, 9), st.integers(1, 40), st.integers(0, 2**40))
def test_masks_are_spread_evenly(length: int, samples: int, seed: int) -> None:
    masked = spread(length, samples, (seed, 0))
    counts = torch.bincount(masked.sum(1), minlength=length + 1)
    assert counts[0] == 0 and counts.sum() == samples
    assert counts[1:].max() - counts[1:].min() <= 2
    assert torch.equal(masked, spread(length, samples, (seed, 0)))


def test_every_position_is_masked_equally_often() -> None:
    masked = spread(6, 6000, (0, 0)).double()
    assert (masked.mean(0) - 7 / 12).abs().max() < 0.03


@pytest.mark.parametrize("variant", ["bidirectional", "shifted", "block_causal", "causal", "prompt_block"])
def test_greedy_is_what_the_slowest_decoder_writes(variant: str) -> None:
    own = variant == "prompt_block"
    model = tiny_model("block_causal", prompt_block=True) if own else tiny_model(variant)
    block = model.spec.causal_block
    sweep = {"name": "blockwise" if own else "block_diffusion", "block": block, "stop": "off"}
    recipe = compose(
        model,
        iteration=sweep if block else "full",
        decoder={"name": "fixed", "steps": 9},
        cache="none",
    )
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11]]
    results = Pipeline(recipe, None, Runtime()).generate_ids(prompts, max_new_tokens=9)
    answers = [result.canvas[-9:] for result in results]
    pairs = list(zip(prompts, answers, strict=True))
    wrong = [(prompt, [*answer[:-1], (answer[-1] + 1) % 38]) for prompt, answer in pairs]
    assert greedy(model, [*pairs, *wrong, ([1], [])], batch=2) == [True] * 3 + [False] * 3 + [True]


def test_estimators_have_names() -> None:
    assert estimator(tiny_spec()) == "masked"
    assert estimator(tiny_spec("block_causal")) == "masked per block of 4"


@pytest.mark.parametrize(
    ("variant", "pair", "options", "message"),
    [
        ("bidirectional", ([1], [2]), {"samples": 0}, "samples=0 must be at least 1"),
        ("bidirectional", ([1], [2]), {"guidance": -1.0}, "guidance=-1.0 must be at least 0"),
        ("bidirectional", ([1], [39]), {}, "token 39 is the mask"),
        ("bidirectional", ([1], [40]), {}, "token 40 is the mask or outside"),
        ("bidirectional", ([1] * 256, [2]), {}, "257 tokens, prompt and answer, exceed the model's 256"),
        ("shifted", ([], [2]), {}, "the prompt must not be empty"),
    ],
)
def test_what_has_no_bound(variant: str, pair, options, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        log_likelihoods(tiny_model(variant), [pair], **options)


def test_expert_capacity_is_refused() -> None:
    model = tiny_model()
    model.spec = replace(model.spec, experts=ExpertSpec(experts=4, chosen=2, width=8, capacity=2))
    with pytest.raises(ValueError, match="expert_capacity"):
        log_likelihoods(model, [([1], [2])])
