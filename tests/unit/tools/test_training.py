"""The tools that trained the models in the box: what is trained is the network that is run."""

from __future__ import annotations

import pytest
import torch
from support.families import random_model
from torch import Tensor

from dinfer.core.layers.transformer import Transformer
from tools.muon import Muon, orthogonalised
from tools.noise import Noise
from tools.tiny_step import Step, block_diffusion_mask, logits
from tools.trained_experts import TrainedExperts, trainable

ROWS, LENGTH, BLOCK, MASK, DIGITS = 3, 16, 4, 39, (3, 4, 5)
PROMPT_B = torch.tensor([2, 5, 8])


@pytest.fixture
def model() -> Transformer:
    return trainable(random_model("llada2"))


@pytest.fixture
def tokens_BT() -> Tensor:
    return torch.randint(0, 38, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))


def noise(model: Transformer, wrong: float = 0.0, seed: int = 0) -> Noise:
    generator = torch.Generator().manual_seed(seed)
    return Noise(spec=model.spec, digits_X=torch.tensor(DIGITS), wrong=wrong, generator=generator)


def by_block(x_BT: Tensor) -> Tensor:
    return x_BT.unflatten(1, (-1, BLOCK))


def test_experts_are_trained_as_they_are_run(model: Transformer) -> None:
    run, trained = random_model("llada2").blocks[1].mlp, model.blocks[1].mlp
    x_BWD, pos_BW = torch.randn(2, 7, 32, dtype=torch.float64), torch.arange(7).expand(2, -1)
    torch.testing.assert_close(trained(x_BWD, pos_BW), run(x_BWD, pos_BW).view_as(x_BWD))
    assert trained.load_X.sum() == 2 * 7 * model.spec.experts.chosen


def test_a_noised_block_sees_itself_and_the_clean_ones_before_it(model: Transformer, tokens_BT: Tensor) -> None:
    """All blocks at once, as each alone behind clean text."""
    shown_BT = tokens_BT.masked_fill(torch.rand(ROWS, LENGTH) < 0.5, MASK)
    got = logits(model, shown_BT, tokens_BT, block_diffusion_mask(LENGTH, BLOCK, tokens_BT.device))
    for start in range(0, LENGTH, BLOCK):
        row = torch.cat((tokens_BT[:, :start], shown_BT[:, start : start + BLOCK]), 1)
        alone = model.score(row, "block_causal", BLOCK)[:, start:]
        torch.testing.assert_close(got[:, start : start + BLOCK], alone)


def test_gradients_reach_all_but_the_bias_of_the_choice(model: Transformer, tokens_BT: Tensor) -> None:
    seen_BSS = block_diffusion_mask(LENGTH, BLOCK, tokens_BT.device)
    logits(model, tokens_BT, tokens_BT, seen_BSS).square().mean().backward()
    idle = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert idle == [f"blocks.{layer}.mlp.choice_bias" for layer in (1, 2)]


def test_the_bias_rises_where_an_expert_got_too_little() -> None:
    mixture = TrainedExperts(random_model("llada2").spec)
    mixture.load_X += torch.tensor([0.0, 8, 4, 4, 4, 4, 4, 4])
    mixture.balance(torch.tensor(0.5))
    assert mixture.choice_bias.tolist() == [0.5, -0.5, 0, 0, 0, 0, 0, 0] and not mixture.load_X.any()


def test_masks_stand_in_responses_and_weigh_what_is_expected(model: Transformer, tokens_BT: Tensor) -> None:
    """The mean weight of a response position over many draws is one over response length and rows."""
    total_BT, count, draw = torch.zeros(ROWS, LENGTH), 4000, noise(model)
    for _ in range(count):
        shown_BT, weight_BT = draw(tokens_BT, PROMPT_B, None)
        assert torch.equal(weight_BT > 0, shown_BT == MASK)
        assert torch.equal(shown_BT[shown_BT != MASK], tokens_BT[shown_BT != MASK])
        total_BT += weight_BT / count
    response_BT = torch.arange(LENGTH) >= PROMPT_B[:, None]
    want_BT = response_BT / response_BT.sum(1, keepdim=True) / ROWS
    torch.testing.assert_close(total_BT, want_BT, atol=0.004, rtol=0)


def test_wrong_tokens_never_stand_beside_masks(model: Transformer, tokens_BT: Tensor) -> None:
    draw, spoilt, response_BT = noise(model, wrong=0.5), 0, torch.arange(LENGTH) >= PROMPT_B[:, None]
    for _ in range(200):
        shown_BT, weight_BT = draw(tokens_BT, PROMPT_B, None)
        wrong_BT = (shown_BT != tokens_BT) & (shown_BT != MASK)
        assert not (by_block(wrong_BT).any(-1) & by_block(shown_BT == MASK).any(-1)).any()
        assert torch.equal(weight_BT > 0, response_BT) and not wrong_BT[~response_BT].any()
        digit_BT = (tokens_BT[..., None] == torch.tensor(DIGITS)).any(-1)
        assert set(shown_BT[wrong_BT & digit_BT].tolist()) <= set(DIGITS)
        spoilt += int(wrong_BT.sum())
    assert spoilt > 100


def test_drafts_leave_no_mask(model: Transformer, tokens_BT: Tensor) -> None:
    shown_BT, weight_BT = noise(model, wrong=0.1)(tokens_BT, PROMPT_B, lambda shown: torch.full_like(shown, 7))
    assert not (shown_BT == MASK).any() and (shown_BT == 7).any()
    assert torch.equal(weight_BT > 0, torch.arange(LENGTH) >= PROMPT_B[:, None])


@pytest.mark.rest(but=1)
@pytest.mark.parametrize("name", ["llada", "llada2"])
def test_steps_lower_the_loss(name: str) -> None:
    model = trainable(random_model(name, torch.float32))
    step = Step(model, noise(model, wrong=0.2), weight_decay=0.0, clip=1.0, compiled=False, graphs=False)
    tokens_BT = torch.arange(LENGTH).repeat(32, 1)
    before = step.loss(tokens_BT, torch.full((32,), 2), drafts=False).item()
    for i in range(40):
        step(tokens_BT, torch.full((32,), 2), 0.02, drafts=i % 4 == 3)
    assert step.mean_loss(40) > 0
    assert step.loss(tokens_BT, torch.full((32,), 2), drafts=False).item() < 0.2 * before


def test_muon_steps_each_of_the_matrices_that_a_parameter_holds() -> None:
    matrix = torch.zeros(6, 4)
    matrix.grad = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    Muon([(matrix, 2)], weight_decay=0.0).step(torch.tensor(1.0))
    for rows in matrix.split(2):
        torch.testing.assert_close(torch.linalg.svdvals(rows), torch.full((2,), 0.4), atol=0.15, rtol=0)
    tall = torch.randn(1, 9, 3, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(torch.linalg.svdvals(orthogonalised(tall)), torch.ones(1, 3), atol=0.35, rtol=0)
