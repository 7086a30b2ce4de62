"""Stand-ins for a trained network: random prompts, tokens that choose experts independently, and no network at all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dinfer.abilities.feeding import Feeds
from dinfer.iterations.block_diffusion import BlockDiffusion
from dinfer.iterations.blockwise import Blockwise
from dinfer.layers.mlp import Experts
from dinfer.parallel.divided_model import everywhere
from dinfer.recipe.recipe import Recipe
from dinfer.recipe.registry import values_of
from dinfer.step.contracts import Iteration, ModelSpec, RowCursors, State
from dinfer.step.model import Attend, Model

STRIDE = 7919  # prime, and longer than most canvases, so that rows and forwards get other tokens
ROWS = 64  # rows whose forwards get other tokens


def plain_tokens(spec: ModelSpec) -> range:
    """The longest range of token ids without a special token."""
    special = sorted({-1, *spec.stop_ids, spec.vocab} | ({spec.mask_id} - {None}))
    return max((range(a + 1, b) for a, b in zip(special, special[1:], strict=False)), key=len)


def random_prompts(spec: ModelSpec, count: int, length: int) -> list[list[int]]:
    """Prompts of plain tokens, the same at every call."""
    plain, generator = plain_tokens(spec), torch.Generator().manual_seed(1)
    return torch.randint(plain.start, plain.stop, (count, length), generator=generator).tolist()


class Spread(Iteration, Feeds):
    """Feeds every masked position its own token, another one at every forward of every row."""

    def incompatibility(self, spec: ModelSpec) -> str | None:
        if spec.mask_id is None:
            return "--spread is for models with a mask token; open positions of this one hold noise. Leave it out."
        return super().incompatibility(spec)

    def embed(self, model: Model, tokens_BW: Tensor, pos_BW: Tensor, lanes: RowCursors, state: State) -> Tensor:
        plain, mask_id = plain_tokens(model.spec), model.spec.mask
        if tokens_BW.is_cuda:
            from benchmarks.spread import spread

            fed_BW = spread(tokens_BW, pos_BW, lanes.slot_B, lanes.forwards_B, mask_id, plain, STRIDE, ROWS)
        else:
            row_B = torch.add(lanes.slot_B, lanes.forwards_B, alpha=ROWS)
            other_BW = torch.add(pos_BW.clamp_min(0), row_B[:, None], alpha=STRIDE) % len(plain) + plain.start
            fed_BW = torch.where(tokens_BW == mask_id, other_BW, tokens_BW)
        return model.embed(fed_BW)


class SpreadBlockwise(Spread, Blockwise):
    """The iteration of `apart` for models that see the whole canvas."""


class SpreadBlockDiffusion(Spread, BlockDiffusion):
    """The iteration of `apart` for models of block diffusion."""


APART: dict[type[Iteration], type[Iteration]] = {Blockwise: SpreadBlockwise, BlockDiffusion: SpreadBlockDiffusion}


def choose_apart(model: Any) -> None:
    """Changes a network so that only embeddings decide which experts tokens choose."""
    model.embedding.weight.mul_(4 * model.spec.hidden**0.5)
    for module in model.modules():
        if isinstance(module, Experts) and module.choice_bias is not None:
            module.choice_bias.zero_()


def apart(recipe: Recipe) -> Recipe:
    """The recipe with tokens that choose experts independently. Changes the network in place, on all ranks.

    With random weights all masks are alike, attention adds almost the same to all tokens, and a random bias prefers
    some experts, so a step reads few experts. Here each mask gets its own token (`Spread`), embeddings are so long that
    they decide the choice, and the bias is 0. A step does the same work, except for one small kernel.
    """
    everywhere(recipe, choose_apart)
    return replace(recipe, iteration=APART[type(recipe.iteration)](**values_of(recipe.iteration)))


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
