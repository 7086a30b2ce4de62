"""Stand-ins for a trained network: random prompts, the usual recipe, tokens that choose experts independently, none."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dinfer.core.layers.transformer import Experts
from dinfer.core.recipe.recipe import Recipe, compose
from dinfer.core.step.contracts import ModelSpec
from dinfer.core.step.model import Attend, Model
from dinfer.scale.parallel.divided_model import everywhere

STRIDE = 7919  # prime, so that neighbours get tokens that are far apart
PLACES = 2**18  # positions that a step may have


def plain_tokens(spec: ModelSpec) -> range:
    """The longest range of token ids without a special token."""
    special = sorted({-1, *spec.stop_ids, spec.vocab} | ({spec.mask_id} - {None}))
    return max((range(a + 1, b) for a, b in zip(special, special[1:], strict=False)), key=len)


def random_prompts(spec: ModelSpec, count: int, length: int) -> list[list[int]]:
    """Prompts of plain tokens, the same at every call."""
    plain, generator = plain_tokens(spec), torch.Generator().manual_seed(1)
    return torch.randint(plain.start, plain.stop, (count, length), generator=generator).tolist()


def usual(model: Any, decoder: Any = "threshold", block: int = 32) -> Recipe:
    """The recipe that full-size shapes are timed with: block diffusion for block-causal models, else the dual cache."""
    causal = model.spec.causal_block is not None
    iteration = {"name": "block_diffusion" if causal else "blockwise", "block": block, "stop": "off"}
    return compose(model, iteration=iteration, decoder=decoder, cache="block" if causal else "dual")


def apart(recipe: Recipe) -> Recipe:
    """The recipe with tokens that choose experts independently. Changes the network in place, on all ranks.

    With random weights all masks are alike, attention adds almost the same to all tokens, and a random bias prefers
    some experts, so a step reads few experts. Here each mask of a step is fed as a token of its own, embeddings are so
    long that they decide the choice, and the bias is 0. A step does the same work, and two small kernels.

    Raises ValueError.
    """
    if recipe.model.spec.mask_id is None:
        raise ValueError("--spread is for models with a mask token; this one has noise instead: leave it out")
    everywhere(recipe, choose_apart)
    return recipe


def choose_apart(model: Any) -> None:
    """Changes a network so that only embeddings decide which experts tokens choose, and each mask has its own."""
    plain, mask_id, embed = plain_tokens(model.spec), model.spec.mask_id, model.embed
    other_Z = torch.arange(PLACES, device=model.device) * STRIDE % len(plain) + plain.start

    def embed_apart(tokens_BW: Tensor) -> Tensor:
        other_BW = other_Z[: tokens_BW.numel()].view(tokens_BW.shape)
        return embed(torch.where(tokens_BW == mask_id, other_BW, tokens_BW))

    model.embed = embed_apart
    model.embedding.weight.mul_(4 * model.spec.hidden**0.5)
    for module in model.modules():
        if isinstance(module, Experts) and module.choice_bias is not None:
            module.choice_bias.zero_()


class Hollow:
    """A model without a network: it returns its inputs, and always the same random logits.

    A step with it takes the time of decoding, commits and cursors.
    """

    def __init__(self, model: Model) -> None:
        self.spec, self.dtype, self.device = model.spec, model.dtype, model.device
        self._zero = torch.zeros((), dtype=self.dtype, device=self.device)
        self._logits: dict[Any, Tensor] = {}

    def embed(self, tokens_BW: Tensor) -> Tensor:
        return self._zero.expand(*tokens_BW.shape, self.spec.hidden)

    def forward(self, x_BWD: Tensor, attend: Attend) -> Tensor:
        return x_BWD

    def logits(self, h_BLD: Tensor) -> Tensor:
        shape = h_BLD.shape[:-1]
        if shape not in self._logits:  # the engine runs a shape once before it captures it
            self._logits[shape] = torch.randn(*shape, self.spec.vocab, dtype=self.dtype, device=self.device)
        return self._logits[shape]

    def mix(self, logits_BLV: Tensor) -> Tensor:
        return self._zero.expand(*logits_BLV.shape[:-1], self.spec.hidden)
