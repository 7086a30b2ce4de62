"""Nemotron-Labs-Diffusion's network: one set of weights with causal and bidirectional passes.

A causal pass reads what is decoded, and its rows predict the next token. A bidirectional pass has a block of masks see
itself and all before it, and its rows predict their own positions. Beside that it is a Llama with YaRN
(arXiv:2309.00071) and queries that grow with their position (Llama 4).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dinfer.core.kernels.deferred import close
from dinfer.core.kernels.types import Projections
from dinfer.core.step.model import Attend
from dinfer.core.terms.spec import ModelSpec
from dinfer.families.gated import GatedTransformer


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoModeSpec(ModelSpec):
    """A causal model that also reads a block of masks bidirectionally; then its logits are of their own positions."""

    turn_scale: float = 1.0  # what cos and sin of the rotation are multiplied with
    query_growth: float = 0.0  # beta: queries at x are multiplied with 1 + beta ln(1 + floor(x / query_length))
    query_length: float = 1.0


@dataclass(frozen=True, slots=True)
class Scaled:
    """Attention whose projections are scaled by head and position."""

    attend: Any
    scale_BWX1: Tensor  # X: query, key and value heads

    @property
    def pos_BW(self) -> Tensor:
        return self.attend.pos_BW

    @property
    def context_BW(self) -> Tensor | None:
        return self.attend.context_BW

    @property
    def needed_BX(self) -> Tensor | None:
        return self.attend.needed_BX

    def __call__(self, layer: int, qkv: Projections, needed_BX: Tensor | None = None) -> Any:
        qkv_BWXE = close(qkv.qkv_BWXE)
        scaled_BWXE = (qkv_BWXE * self.scale_BWX1).to(qkv_BWXE.dtype)
        return self.attend(layer, qkv._replace(qkv_BWXE=scaled_BWXE), needed_BX)


class TwoModeTransformer(GatedTransformer):
    """The transformer of a `TwoModeSpec`. What each pass sees is the step's to say."""

    def forward(self, x_BWD: Tensor, attend: Attend) -> Tensor:
        spec = self.spec
        assert isinstance(spec, TwoModeSpec)
        grown_BW = 1 + spec.query_growth * (1 + (attend.pos_BW.clamp_min(0) // spec.query_length).float()).log()
        # The scale of cos and sin is one of queries and of keys.
        turn, ones_BW = spec.turn_scale, torch.ones_like(grown_BW)
        counts = spec.heads // self.ranks.size, self.ranks.heads(spec.kv_heads)
        parts = ((turn * grown_BW, counts[0]), (turn * ones_BW, counts[1]), (ones_BW, counts[1]))
        scale_BWX = torch.cat([part_BW[..., None].expand(-1, -1, count) for part_BW, count in parts], -1)
        return super().forward(x_BWD, Scaled(attend, scale_BWX[..., None]))
