"""DiffusionGemma's network: a causal encoder and a bidirectional decoder of the same weights.

Facts: transformers 5.23, `diffusion_gemma`. What Gemma 4 has and other families have not: a norm before and behind
every part of a block, experts beside the MLP, layers with a sliding window, layers whose values are their keys, and a
scalar that a layer's output is multiplied with, which is all that encoder and decoder do not share.

Shape suffixes: B rows, W positions, T prompt, C canvas, D hidden, X heads or experts, E head size, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dinfer.core.kernels.attention import interval_mask
from dinfer.core.kernels.canvas import at
from dinfer.core.kernels.deferred import close, share
from dinfer.core.kernels.dispatch import on_own_device, untouched
from dinfer.core.kernels.moe import expert_mixture, route
from dinfer.core.kernels.norm import geglu
from dinfer.core.kernels.rotary import rotary_table
from dinfer.core.kernels.types import Projections, Table
from dinfer.core.layers.linear import Linear
from dinfer.core.layers.transformer import (
    GatedMLP,
    Routed,
    WholeAttend,
    checked_ids,
    divide,
    embed,
    mix,
    of_table,
    whole,
)
from dinfer.core.ranks.ranks import ALONE, Ranks
from dinfer.core.step.model import Attend
from dinfer.core.terms.spec import LocalAttention, ModelSpec
from dinfer.families.abilities.encoder import encoder_intervals, local_interval
from dinfer.families.images import Seeing


class Norm(nn.RMSNorm):
    """RMSNorm that is rounded once, at the end."""

    def __init__(self, width: int, spec: ModelSpec) -> None:
        super().__init__(width)
        self.least = spec.norm_eps

    def forward(self, x: Tensor) -> Tensor:
        return wide_rms_norm(x, self.weight, self.least)


class TiedEmbedding(nn.Embedding):
    """The embedding, whose table is also the head."""

    @property
    def table(self) -> Tensor:
        return self.weight


class Attention(nn.Module):
    """Projections, norms of queries, keys and values; the values of layers that are not local are the raw keys."""

    def __init__(self, spec: ModelSpec, layer: int, local: LocalAttention | None) -> None:
        super().__init__()
        self.layer, self.heads, self.eps = layer, spec.heads, spec.norm_eps
        kv_heads, self.head_dim = spec.kv_heads, spec.head_dim
        if local is not None:
            kv_heads, self.head_dim = local.kv_heads, local.head_dim
        self.parts = [spec.heads, kv_heads] if local is None else [spec.heads, kv_heads, kv_heads]
        self.qkv = Linear(spec.hidden, sum(self.parts) * self.head_dim)
        self.q_norm, self.k_norm = Norm(self.head_dim, spec), Norm(self.head_dim, spec)
        self.out = Linear(spec.heads * self.head_dim, spec.hidden)

    def join(self, ranks: Ranks) -> None:
        self.heads, *kv_heads = self.parts
        self.heads //= ranks.size
        self.parts = [self.heads, *(ranks.heads(count) for count in kv_heads)]
        self.out.ranks = ranks

    def forward(self, x_BWD: Tensor, table: Table, attend: Attend, needed_BX: Tensor | None) -> Tensor:
        """[B, W, D] -> [B, W, D], or of the places `needed_BX` alone, [B, X, D]"""
        q, k, *rest = self.qkv(x_BWD).unflatten(-1, (-1, self.head_dim)).split(self.parts, 2)
        v = wide_rms_norm(rest[0] if rest else k, None, self.eps)
        # `attend` divides by sqrt(E), and this model does not.
        if untouched(self.q_norm, Norm):
            weight_E = self.q_norm.weight.to(torch.promote_types(q.dtype, torch.float32)) * self.head_dim**0.5
            q = wide_rms_norm(q, weight_E, self.eps)
        else:
            q = self.q_norm(q) * self.head_dim**0.5
        qkv_BWXE = torch.cat((q, self.k_norm(k), v), 2)
        seen_BXHE = attend(self.layer, Projections(qkv_BWXE, self.heads, table), needed_BX)
        return self.out(seen_BXHE.flatten(2)) if seen_BXHE.shape[1] else x_BWD[:, :0]


class Experts(Routed):
    """The best experts by softmax, their weights divided by their sum; the router norms and scales its own input."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self.router_norm = Norm(spec.hidden, spec)
        self.expert_scale = nn.Parameter(torch.ones(self.experts.experts))

    def forward(self, x_BWD: Tensor, routed_BWD: Tensor) -> Tensor:
        """What the experts make of `x_BWD`, each token's chosen by `routed_BWD`. [B, W, D]"""
        wide_ND = routed_BWD.flatten(0, 1).to(torch.promote_types(x_BWD.dtype, torch.float32))
        wide_ND = self.router_norm(wide_ND) * wide_ND.shape[-1] ** -0.5
        logits_NX = self.router(wide_ND)
        chosen_NC, weights_NC = route(logits_NX, self.experts)
        weights_NC = weights_NC * self.expert_scale[chosen_NC]
        weights = self.expert("gate_up"), self.expert("down")
        mixed = expert_mixture(x_BWD, chosen_NC, weights_NC, *weights, geglu, dealt=self.dealt)
        return close(share(mixed, self.ranks)).view_as(x_BWD)


class GemmaBlock(nn.Module):
    """Attention, then an MLP and experts side by side; a norm before and behind each, and a scalar at the end."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        local = spec.local if spec.local is not None and layer in spec.local.layers else None
        self.local, hidden = local is not None, spec.hidden
        self.attn_norm, self.attn_out_norm = Norm(hidden, spec), Norm(hidden, spec)
        self.attention = Attention(spec, layer, local)
        self.mlp_norm, self.mlp_out_norm = Norm(hidden, spec), Norm(hidden, spec)
        self.mlp = GatedMLP(hidden, spec.mlp, geglu)
        self.experts_norm, self.experts_out_norm = Norm(hidden, spec), Norm(hidden, spec)
        self.experts = Experts(spec)
        self.out_norm = Norm(hidden, spec)
        self.scale = nn.Parameter(torch.ones(2))  # of the encoder, of the decoder

    def forward(
        self, x_BWD: Tensor, table: Table, attend: Attend, context_BW1: Tensor, needed_BX: Tensor | None
    ) -> Tensor:
        """[B, W, D] -> [B, W, D], or of the places `needed_BX` alone, [B, X, D]"""
        seen_BWD = self.attention(self.attn_norm(x_BWD), table, attend, needed_BX)
        if needed_BX is not None:
            x_BWD, context_BW1 = at(x_BWD, needed_BX), at(context_BW1, needed_BX)
        if x_BWD.shape[1] == 0:
            return x_BWD
        x_BWD = x_BWD + self.attn_out_norm(seen_BWD)
        dense_BWD = self.mlp_out_norm(close(self.mlp(self.mlp_norm(x_BWD))))
        expert_BWD = self.experts_out_norm(self.experts(self.experts_norm(x_BWD), x_BWD))
        x_BWD = x_BWD + self.out_norm(dense_BWD + expert_BWD)
        return x_BWD * torch.where(context_BW1, self.scale[0], self.scale[1])


class SelfConditioning(nn.Module):
    """The MLP that what was expected goes through before it is added to the embedding."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.norm = Norm(spec.hidden, spec)
        self.mlp = GatedMLP(spec.hidden, spec.mlp, geglu)


class Gemma(Seeing, nn.Module):
    """Embedding, blocks, final norm and a tied head with soft-capped logits; no state between calls.

    One forward may hold positions of the encoder and of the decoder (`Attend.context_BW`), since each layer writes its
    keys before it attends. So a finished canvas is encoded in the same forward in which the next one begins.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec, self.ranks = spec, ALONE
        self.embedding = TiedEmbedding(spec.vocab, spec.hidden)
        self.conditioning = SelfConditioning(spec)
        self.blocks = nn.ModuleList(GemmaBlock(spec, layer) for layer in range(spec.layers))
        self.norm = Norm(spec.hidden, spec)

    def join(self, ranks: Ranks) -> None:
        """See `dinfer.core.step.model.Divided`."""
        self.ranks = ranks
        divide(self, ranks)
        if ranks.size > 1:
            self.conditioning.mlp.join(ranks)
            for block in self.blocks:
                assert isinstance(block, GemmaBlock)
                block.attention.join(ranks)
                block.mlp.join(ranks)
                block.experts.join(ranks)

    @property
    def dtype(self) -> torch.dtype:
        return next(self.embedding.parameters()).dtype

    @property
    def device(self) -> torch.device:
        return next(self.embedding.parameters()).device

    @property
    def _scale(self) -> Tensor:
        """sqrt(D), rounded to the model's dtype as the published code does."""
        return torch.full((), self.spec.hidden**0.5, dtype=self.dtype, device=self.device)

    def embed(self, tokens_BW: Tensor) -> Tensor:
        """[B, W] -> [B, W, D]"""
        return embed(tokens_BW, self.embedding, self.ranks, self.spec.vocab) * self._scale

    def condition(self, x_BWD: Tensor, expected_BWD: Tensor) -> Tensor:
        """Adds what was expected one step before, `mix` of its logits; of zeros nothing comes. [B, W, D]"""
        return x_BWD + close(self.conditioning.mlp(self.conditioning.norm(expected_BWD)))

    def forward(self, x_BWD: Tensor, attend: Attend) -> Tensor:
        """See `dinfer.core.step.model.Model`. [B, W, D] -> [B, W, D] or [B, X, D]"""
        spec, pos_BW, context_BW = self.spec, attend.pos_BW, attend.context_BW
        if context_BW is None:
            raise ValueError(f"{spec.family}: attend.context_BW must say which positions are the encoder's")
        context_BW1 = context_BW[..., None]
        x_BWD = torch.where(context_BW1, x_BWD, wide_rms_norm(x_BWD, None, spec.norm_eps))
        far = near = rotary_table(pos_BW, spec.head_dim, spec.rope_theta, x_BWD.dtype, spec.rope_pairs)
        if spec.local is not None:
            near = rotary_table(pos_BW, spec.local.head_dim, spec.local.rope_theta, x_BWD.dtype)
        for block in self.blocks:
            needed_BX = attend.needed_BX if block is self.blocks[-1] else None
            x_BWD = block(x_BWD, near if block.local else far, attend, context_BW1, needed_BX)
        return x_BWD

    def logits(self, h_BLD: Tensor) -> Tensor:
        """[B, L, D] -> [B, L, V], float32 at least where they are capped"""
        return whole(self.own_logits(h_BLD), self.ranks, self.spec.vocab)

    def own_logits(self, h_BLD: Tensor) -> Tensor:
        """See `dinfer.core.step.model.Divided`."""
        logits_BLV = F.linear(self.norm(h_BLD), of_table(self.embedding, "table"))
        if (cap := self.spec.softcap) is None:
            return logits_BLV
        return torch.tanh(logits_BLV.to(torch.promote_types(logits_BLV.dtype, torch.float32)) / cap) * cap

    def mix(self, logits_BLV: Tensor) -> Tensor:
        """The expected embedding under softmax(logits). [B, L, V] -> [B, L, D]"""
        wide = torch.promote_types(self.dtype, torch.float32)
        # The published code rounds the logits first.
        prob_BLV = logits_BLV.to(self.dtype).softmax(-1, dtype=wide).to(self.dtype)
        return mix(prob_BLV, of_table(self.embedding, "table"), self.ranks) * self._scale

    def hidden(self, ids_BT: Tensor, canvas_BC: Tensor, expected_BCD: Tensor | None = None) -> Tensor:
        """Hidden states, before the final norm, of a prompt and a canvas behind it, without a cache. [B, T + C, D]"""
        ids_BT = checked_ids(ids_BT, self.spec, self.device)
        canvas_BC = checked_ids(canvas_BC, self.spec, self.device, "canvas")
        if ids_BT.shape[0] != canvas_BC.shape[0]:
            raise ValueError(f"ids have {ids_BT.shape[0]} rows and the canvas {canvas_BC.shape[0]}")
        prompt, length = ids_BT.shape[1], ids_BT.shape[1] + canvas_BC.shape[1]
        x_BCD = self.embed(canvas_BC)
        if expected_BCD is not None:
            x_BCD = self.condition(x_BCD, expected_BCD)
        pos_BW = torch.arange(length, device=self.device).expand(ids_BT.shape[0], -1)
        start_B, end_B = torch.full_like(pos_BW[:, 0], prompt), torch.full_like(pos_BW[:, 0], length)
        context_BW, interval_BW = encoder_intervals(pos_BW, start_B, end_B)
        local, near_BWS = self.spec.local, None
        if local is not None:
            near_BWS = interval_mask(*local_interval(interval_BW, pos_BW, start_B, local.window), length)
        attend = WholeAttend(
            pos_BW, interval_mask(*interval_BW, length), context_BW, () if local is None else local.layers, near_BWS
        )
        return self(torch.cat((self.embed(ids_BT), x_BCD), 1), attend)

    @on_own_device
    def score(self, ids_BT: Tensor, canvas_BC: Tensor, expected_BCV: Tensor | None = None) -> Tensor:
        """Logits of a canvas behind a prompt, without a cache. [B, T], [B, C] -> [B, C, V]

        `expected_BCV`: the logits of the step before, for self-conditioning; None: there was none. Differentiable.
        """
        expected_BCD = None if expected_BCV is None else self.mix(expected_BCV)
        return self.logits(self.hidden(ids_BT, canvas_BC, expected_BCD)[:, -canvas_BC.shape[1] :])


def wide_rms_norm(x: Tensor, weight_D: Tensor | None, eps: float) -> Tensor:
    """x / rms(x) times the weight (None: 1), in float32 or wider, rounded once at the end (Gemma)."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed if weight_D is None else normed * weight_D.to(wide.dtype)).to(x.dtype)
