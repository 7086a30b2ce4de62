"""The training loop of benchmarks/grpo.py on two layers: all weights or an adapter, near to the first policy or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.models import CONFIG

from benchmarks import grpo
from dinfer import Pipeline, Runtime, compose
from dinfer.core.models.llada import Llada
from dinfer.formats.saving import save_network
from dinfer.lab.likelihood import combine, logps, passes
from dinfer.lab.random_network import random_network

PROMPTS = [[1, 5, 9, 2], [4, 8]]


@pytest.fixture
def pipe(tmp_path: Path) -> Pipeline:
    torch.manual_seed(1)
    family = Llada()
    network = random_network(family, family.spec(CONFIG), dtype=torch.float32, device=torch.device("cpu"))
    save_network(network, family, tmp_path, CONFIG)
    iteration = {"name": "blockwise", "block": 4}
    recipe = compose(network, iteration=iteration, decoder={"name": "threshold", "threshold": 0.1}, cache="none")
    return Pipeline(recipe, None, Runtime(page=4), (family, tmp_path))


def drawn_of(pipe: Pipeline, given: Any) -> Any:
    made = pipe.rollout(PROMPTS, n=given.group, max_new_tokens=8, seed=3, record="steps", temperature=2.0)
    return made, passes("diffu_grpo", pipe.model.spec, made.samples(), seed=0)


@pytest.mark.parametrize("peft", [0, 2])
def test_an_update_raises_what_is_rewarded_and_reaches_the_engine(peft: int, pipe: Pipeline, tmp_path: Path) -> None:
    if peft:
        pytest.importorskip("peft")
    given = grpo.settings(["train", "--group", "4", "--lr", "0.02", "--peft", str(peft), "--kl", "0.1"])
    policy, stored = grpo.policy_of(pipe, given), load_file(tmp_path / "model.safetensors")
    made, drawn = drawn_of(pipe, given)
    reference = grpo.reference_of(policy, given)
    first_X, rewards = reference(drawn), torch.tensor([[1.0, 0, 0, 0], [0, 0, 0, 1.0]])
    before = combine(drawn, first_X).sequence
    optimizer = torch.optim.AdamW(grpo.trained(policy).values(), lr=given.lr, weight_decay=0.0)
    for seed in range(3):
        grpo.updated(policy, made, rewards, optimizer, given, seed, reference)
    grpo.send(pipe, policy)
    assert torch.equal(reference(drawn), first_X)  # what is trained does not move it
    after = combine(drawn, logps(pipe.model, drawn, grad=False)).sequence
    assert (after > before)[[0, 7]].all() and torch.allclose(
        after, combine(drawn, logps(policy, drawn, grad=False)).sequence, atol=1e-4
    )
    apart = {n for n, one in pipe.weights.tensors().items() if not torch.equal(one, stored[n])}
    assert apart == ({n for n in stored if "blocks" in n and "norm" not in n} if peft else {*stored})


def test_the_distance_to_the_first_policy_is_none_at_first_and_draws_back(pipe: Pipeline) -> None:
    given = grpo.settings(["train", "--group", "4", "--kl", "1"])
    policy = grpo.policy_of(pipe, given)
    made, drawn = drawn_of(pipe, given)
    reference, none_N = grpo.reference_of(policy, given), torch.zeros(len(made))

    def distance() -> torch.Tensor:
        return grpo.loss_of(policy, drawn, made.stops, none_N, reference, given)

    assert distance().item() == pytest.approx(0, abs=1e-9)
    weight = policy.blocks[0].out.weight
    with torch.no_grad():
        weight.add_(0.1 * torch.sin(torch.arange(weight.numel())).view_as(weight))
    far = distance()
    far.backward()
    with torch.no_grad():
        weight.sub_(0.01 * weight.grad / weight.grad.norm())
    assert 0 < distance().item() < float(far)
