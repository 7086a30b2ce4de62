"""What somebody puts around or into a layer counts, in every layer of every network, or is refused in a sentence."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import UNIFORM, VOCAB, tiny_model
from torch import Tensor, nn
from torch.nn.utils import parametrize

from dinfer import Pipeline, Runtime, compose, load
from dinfer.core.terms.spec import ExpertSpec

IDS = torch.randint(VOCAB - 2, (2, 9), generator=torch.Generator().manual_seed(0))
EXPERTS = ExpertSpec(experts=4, chosen=2, width=16, shared=16)


class Wrapped(nn.Module):
    """A researcher's own adapter: a layer, and a factor on its output that is trained."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.factor = inner, nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)  # hides nothing of the layer, so that only a call shows the factor

    def forward(self, *x: Any) -> Tensor:
        return self.inner(*x) * self.factor


class Scaled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 1.5


def wrap(parent: nn.Module, name: str) -> None:
    setattr(parent, name, Wrapped(getattr(parent, name)))


def parametrized(parent: nn.Module, name: str) -> None:
    parametrize.register_parametrization(getattr(parent, name), "weight", Scaled())


def hook(parent: nn.Module, name: str) -> None:
    getattr(parent, name).register_forward_hook(lambda layer, given, out: out * 1.5)


def own_forward(parent: nn.Module, name: str) -> None:
    layer = getattr(parent, name)
    made = layer.forward
    layer.forward = lambda *given: made(*given) * 1.5


def networks() -> dict[str, Any]:
    return {
        "dense": tiny_model(dtype=torch.float64),
        "tied": tiny_model("shifted", dtype=torch.float64),
        "experts": tiny_model(experts=EXPERTS, dtype=torch.float64),
        UNIFORM: tiny_model(UNIFORM, dtype=torch.float64),
    }


def scored(network: Any) -> Tensor:
    if not network.spec.encoder:
        return network.score(IDS)
    expected = torch.linspace(-2, 2, VOCAB, dtype=network.dtype).expand(2, 5, VOCAB)
    return network.score(IDS[:, :4], IDS[:, 4:], expected)


LAYERS = [  # of each network, every kind of layer that a step might pass over
    *(("dense", f"blocks.1.{name}") for name in ("qkv", "out", "attn_norm", "mlp_norm", "mlp.gate_up", "mlp.down")),
    ("dense", "blocks.1.mlp"), ("dense", "head"), ("dense", "norm"), ("tied", "norm"),
    *(("experts", f"blocks.0.mlp.{name}") for name in ("router", "shared", "shared.gate_up", "shared.down")),
    ("experts", "blocks.0.mlp"),
    *((UNIFORM, f"blocks.0.{name}") for name in ("attention.qkv", "attention.q_norm", "attn_norm", "experts.router")),
    (UNIFORM, "conditioning.mlp.down"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "path"), LAYERS)
def test_what_is_put_around_or_into_a_layer_counts(name: str, path: str) -> None:
    """A factor on a layer's output, or on its weight, is seen in the logits, however it came there."""
    made = networks()[name]
    plain, (parent, _, own) = copy.deepcopy(made), path.rpartition(".")
    weighs = hasattr(made.get_submodule(path), "weight")
    if weighs:
        with torch.no_grad():
            plain.get_submodule(path).weight *= 1.5
    for put in (wrap, hook, own_forward, parametrized) if weighs else (wrap, hook, own_forward):
        network = copy.deepcopy(made)
        put(network.get_submodule(parent), own)
        if weighs:
            torch.testing.assert_close(scored(network), scored(plain))
        else:
            assert not torch.allclose(scored(network), scored(plain))


def test_gradients_reach_an_adapter_and_generation_uses_it() -> None:
    network = tiny_model(dtype=torch.float64)
    plain = copy.deepcopy(network)
    network.requires_grad_(False)
    for block in network.blocks:
        wrap(block, "qkv"), wrap(block.mlp, "down")
    scored(network).sum().backward()
    assert all(block.qkv.factor.grad and block.mlp.down.factor.grad for block in network.blocks)
    with torch.no_grad():
        for block in plain.blocks:
            block.qkv.weight *= 1.5
            block.mlp.down.weight *= 1.5
    recipes = [compose(model, cache="dual", decoder="fixed", iteration="blockwise") for model in (network, plain)]
    texts = [
        Pipeline(recipe, None, Runtime()).generate_ids([[1, 2, 3]], max_new_tokens=32)[0].ids for recipe in recipes
    ]
    assert texts[0] == texts[1]


def test_what_cannot_count_is_refused() -> None:
    network = tiny_model(qk_norm=True)
    wrap(network.blocks[0], "qk_norm")
    with pytest.raises(ValueError, match="Wrapped is around or on qk_norm, which is never called"):
        scored(network)
    tied = tiny_model("shifted")
    hidden = nn.Sequential(tied.embedding)
    tied.embedding = hidden
    with pytest.raises(ValueError, match="Sequential is around the embedding"):
        scored(tied)


def test_weights_that_were_trained_are_those_that_shared_prompts_are_read_with() -> None:
    """Keys that requests share are of the weights as they were."""
    network = tiny_model("block_causal", dtype=torch.float64)
    parts = {"cache": "block", "decoder": "fixed", "iteration": {"name": "block_diffusion", "block": 4}}
    prompt = [[1 + i % 30 for i in range(37)]]

    def answer(pipe: Pipeline) -> list[int]:
        return pipe.generate_ids(prompt, max_new_tokens=8)[0].ids

    pipe = Pipeline(compose(network, **parts), None, Runtime(share=True))
    answer(pipe)
    with torch.no_grad():
        for block in network.blocks:
            block.qkv.weight.mul_(-1.5)
    assert answer(pipe) == answer(Pipeline(compose(network, **parts), None, Runtime(share=True)))


def test_the_tutorial_trains_saves_and_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft")
    page = (Path(__file__).parents[4] / "docs" / "fine_tune.md").read_text()
    (block,) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    fast = block.replace("range(60)", "range(2)").replace("range(10, 40, 2)", "range(10, 12, 2)")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(fast, "fine_tune.md", "exec", dont_inherit=True), names)
    assert names["again"] == names["with_adapter"]
    saved = {path.name for path in (tmp_path / "tuned").iterdir()}
    assert saved == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    with pytest.raises(ValueError, match="tuned is not an empty folder"):
        names["pipe"].save("tuned")


def test_what_a_checkpoint_cannot_hold_is_not_saved(tmp_path: Path) -> None:
    pipe = load("tiny")
    parametrized(pipe.model.blocks[0], "qkv")
    pipe.save(tmp_path / "parametrized")  # as the weight comes out
    assert torch.equal(load(str(tmp_path / "parametrized")).model.blocks[0].qkv.weight, pipe.model.blocks[0].qkv.weight)
    wrap(pipe.model.blocks[0], "out")
    with pytest.raises(ValueError, match="merge what was added into the weights first"):
        pipe.save(tmp_path / "wrapped")
    assert not (tmp_path / "wrapped").exists()
    with pytest.raises(ValueError, match="is in few bits: load without quantize"):
        load("tiny", quantize="int8").save(tmp_path / "int8")
