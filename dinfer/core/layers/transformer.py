"""The transformer core every model family runs on; a `ModelSpec` says all that is particular to one.

Shape suffixes: B rows, W positions, D hidden, H query heads, G key/value heads, E head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from dinfer.core.kernels.attention import attention_interval, interval_attention, interval_mask
from dinfer.core.kernels.canvas import at
from dinfer.core.kernels.deferred import close, share
from dinfer.core.kernels.dispatch import on_own_device, untouched
from dinfer.core.kernels.moe import Gate, Shared, block_experts, expert_mixture, route
from dinfer.core.kernels.norm import add, add_rms_norm, rms_norm, swiglu
from dinfer.core.kernels.rotary import projections, queries_keys_values, rotary_table
from dinfer.core.kernels.types import Dealt, Deferred, HeadNorm, InGroups, InputFormat, Projections, Table
from dinfer.core.layers.format import PLAIN, untraced
from dinfer.core.layers.linear import Embedding, Formatted, Linear, Router, apply, fused, inputs_of
from dinfer.core.provided import provided
from dinfer.core.ranks.ranks import ALONE, Ranks
from dinfer.core.step.model import Attend
from dinfer.core.terms.spec import ModelSpec


class RMSNorm(nn.RMSNorm):
    """As the kernels round it."""

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps or 0.0)


def added(
    norm: nn.Module, x_BWD: Tensor, delta_BWD: Deferred | None, inputs: InputFormat = "plain"
) -> tuple[Tensor, Deferred]:
    """x + delta (None: 0), and its norm. [B, W, D] each"""
    if untouched(norm, RMSNorm):
        assert isinstance(norm, RMSNorm)
        return add_rms_norm(x_BWD, delta_BWD, norm.weight, norm.eps or 0.0, inputs)
    x_BWD = x_BWD if delta_BWD is None else add(x_BWD, delta_BWD)
    return x_BWD, norm(x_BWD)


def weight_alone(module: nn.Module, name: str) -> Tensor:
    """The weight of a norm that attention applies by itself. Raises ValueError if something is around it."""
    if not (parametrize.is_parametrized(module) or untouched(module, nn.RMSNorm)):
        raise ValueError(
            f"{type(module).__name__} is around or on {name}, which is never called: attention reads its weight; "
            "parametrize that (torch.nn.utils.parametrize), or leave it out"
        )
    assert isinstance(module, nn.RMSNorm)
    return module.weight


def of_table(embedding: Any, name: str) -> Any:
    """What the embedding does beside looking up. Raises ValueError where an adapter around it hides that."""
    try:
        return attrgetter(name)(embedding)
    except AttributeError:
        raise ValueError(
            f"{type(embedding).__name__} is around the embedding, whose table is also the head or mixes expected "
            "tokens; adapt other layers, or its table as a whole (modules_to_save of peft)"
        ) from None


class GatedMLP(nn.Module):
    """down(silu(gate x) * up x), or with another function of the two; gate and up are one matrix."""

    def __init__(self, hidden: int, width: int, gated: Gate = swiglu) -> None:
        super().__init__()
        self.gated = gated
        self.gate_up, self.down = Linear(hidden, 2 * width), Linear(width, hidden)

    @property
    def input_format(self) -> InputFormat:
        """How whatever makes the inputs should leave them."""
        return inputs_of(self.gate_up)

    def join(self, ranks: Ranks) -> None:
        """Each rank has a part of the width."""
        self.down.ranks = ranks

    def forward(self, x_BWD: Tensor, pos_BW: Tensor | None = None) -> Tensor:
        """[B, W, D] -> [B, W, D]"""
        return close(self.deferred(x_BWD))

    def deferred(self, x_BWD: Deferred, pos_BW: Tensor | None = None) -> Deferred:
        """As called, for a consumer that closes it."""
        return apply(self.down, self.gated(apply(self.gate_up, x_BWD), inputs_of(self.down)))


class Routed(Formatted):
    """A router, and the matrices of its experts: `gate_up`, gate rows and then up rows, and `down`."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        if (experts := spec.experts) is None:
            raise ValueError(f"{spec.family} has no experts")
        self.experts = experts
        self.router = Router(spec.hidden, experts.experts)
        self.choice_bias = nn.Parameter(torch.zeros(experts.experts)) if experts.bias else None
        self.gate_up = nn.Parameter(torch.empty(experts.experts, 2 * experts.width, spec.hidden))
        self.down = nn.Parameter(torch.empty(experts.experts, spec.hidden, experts.width))
        self.formats = {"gate_up": PLAIN, "down": PLAIN}
        self.ranks: Ranks | None = None
        self.dealt: Dealt | None = None  # the experts that this rank has; None: a part of each

    def join(self, ranks: Ranks) -> None:
        """Each rank has some experts, or a part of each, and a part of a shared one: one sum over ranks is enough."""
        self.ranks, experts = ranks, self.experts.experts
        if (first := ranks.first_expert(experts)) is not None:
            self.dealt = Dealt(first, experts)


class Experts(Routed):
    """A mixture of gated MLPs, and one for all tokens if there is a shared one. The router computes in float32."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self.causal_block = spec.causal_block
        self.shared = GatedMLP(spec.hidden, self.experts.shared) if self.experts.shared else None

    @property
    def input_format(self) -> InputFormat:
        """How whatever makes the inputs should leave them; the router takes them as they are."""
        inputs = self.formats["gate_up"].input_format(self.weight_of("gate_up"))
        rounded: InputFormat = "both" if inputs == "rounded" else "plain"
        return inputs._replace(both=True) if isinstance(inputs, InGroups) else rounded

    def forward(self, x_BWD: Tensor, pos_BW: Tensor) -> Tensor:
        """[B, W, D] -> [B, W, D]; `pos_BW` says which attention block each token is of."""
        return close(self.deferred(x_BWD, pos_BW)).view_as(x_BWD)

    @untraced
    def deferred(self, x_BWD: Deferred, pos_BW: Tensor) -> Deferred:
        """As called, for a consumer that closes it. [B, W, D] -> [N, D]"""
        scores_NX = apply(self.router, x_BWD)
        scores_NX = scores_NX.flatten(0, -2) if isinstance(scores_NX, Tensor) else scores_NX
        chosen_NC, weights_NC = self.route(scores_NX, pos_BW)
        shared, mlp = None, self.shared
        if mlp is not None:
            as_made = inputs_of(mlp) == "rounded"  # then rows that come rounded are not rounded again
            own = None
            if fused(mlp) and fused(mlp.gate_up) and fused(mlp.down):
                own = mlp.gate_up.expert("weight"), mlp.down.expert("weight")
            shared = Shared(lambda x_ND: close(apply(mlp, x_ND if as_made else close(x_ND))), own)
        weights = self.expert("gate_up"), self.expert("down")
        mixed = expert_mixture(x_BWD, chosen_NC, weights_NC, *weights, shared=shared, dealt=self.dealt)
        return share(mixed, self.ranks)

    def route(self, logits_NX: Deferred, pos_BW: Tensor) -> tuple[Tensor, Tensor]:
        """Experts and mixing weights of each token. [N, C] each"""
        experts, allowed_NX = self.experts, None
        if experts.capacity is not None:
            logits_NX = close(logits_NX)
            scores_NX = logits_NX.sigmoid() if experts.scores == "sigmoid" else logits_NX.softmax(-1)
            biased_NX = scores_NX if self.choice_bias is None else scores_NX + self.choice_bias
            allowed_NX = block_experts(biased_NX, blocks_of(pos_BW, self.causal_block or 1), experts.capacity)
        return route(logits_NX, experts, bias_X=self.choice_bias, allowed_NX=allowed_NX, pos_BW=pos_BW)


def divide(network: nn.Module, ranks: Ranks) -> None:
    """Marks the layers of which a rank has a share."""
    for module in network.modules() if ranks.size > 1 else ():
        if isinstance(module, Formatted):
            module.divided = True


def blocks_of(pos_BW: Tensor, length: int) -> Tensor:
    """Which attention block of which row each position is in, numbered from 0; padding is one of each row. [B * W]"""
    block_BW = torch.div(pos_BW, length, rounding_mode="floor")  # -1 for padding
    lane_B1 = torch.arange(pos_BW.shape[0], device=pos_BW.device)[:, None]
    key_N = (lane_B1 * (block_BW.max() + 2) + block_BW + 1).flatten()
    sorted_N, order_N = key_N.sort()
    new_N = torch.cat([torch.zeros_like(sorted_N[:1]), (sorted_N[1:] != sorted_N[:-1]).to(torch.int64)])
    return torch.empty_like(key_N).scatter(0, order_N, new_N.cumsum(0))


def embed(tokens_BW: Tensor, rows: Callable[[Tensor], Tensor], ranks: Ranks, vocab: int) -> Tensor:
    """What `rows` looks up in a table. Each token has its row on one rank, others add zeros. [B, W] -> [B, W, D]"""
    if ranks.size == 1:
        return rows(tokens_BW)
    first, end = ranks.vocabulary(vocab)
    row_BW = tokens_BW - first
    own_BW = row_BW.clamp(0, end - first - 1)
    return ranks.all_reduce(rows(own_BW).masked_fill((own_BW != row_BW)[..., None], 0))  # times 0, NaN stays NaN


def whole(own_BLO: Tensor, ranks: Ranks, vocab: int) -> Tensor:
    """The logits of all tokens, from those of each rank's own. [B, L, O] -> [B, L, V]"""
    if ranks.size == 1:
        return own_BLO
    most = -(-vocab // ranks.size)
    parts_NBLO = ranks.all_gather(F.pad(own_BLO, (0, most - own_BLO.shape[-1])))
    if vocab % ranks.size == 0:
        return parts_NBLO.movedim(0, -2).flatten(-2)
    return torch.cat([part[..., :size] for part, size in zip(parts_NBLO, ranks.vocabularies(vocab), strict=True)], -1)


def mix(prob_BLV: Tensor, weight_OD: Tensor, ranks: Ranks) -> Tensor:
    """The expected row of the table. [B, L, V] -> [B, L, D]"""
    first, end = ranks.vocabulary(prob_BLV.shape[-1])
    return ranks.all_reduce(prob_BLV[..., first:end] @ weight_OD)


ATTENTION = ("bidirectional", "block_causal", "causal")

Pieces = tuple[Callable[..., tuple[Tensor, Deferred]], Callable[..., tuple[Tensor, Deferred]]]


class Block(nn.Module):
    """Pre-norm attention and MLP. Projections that read the same input are one matrix."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        self.spec, self.layer, self.heads = spec, layer, spec.heads
        heads = spec.heads + 2 * spec.kv_heads
        self.attn_norm = RMSNorm(spec.hidden, eps=spec.norm_eps)
        self.qkv = Linear(spec.hidden, heads * spec.head_dim, bias=spec.qkv_bias)
        self.qk_norm = nn.RMSNorm(2 * spec.head_dim) if spec.qk_norm else None  # the weights of q, then those of k
        self.out = Linear(spec.heads * spec.head_dim, spec.hidden)
        self.mlp_norm = RMSNorm(spec.hidden, eps=spec.norm_eps)
        dense = spec.experts is None or layer in spec.experts.dense
        self.mlp = GatedMLP(spec.hidden, spec.mlp) if dense else Experts(spec)

    def join(self, ranks: Ranks) -> None:
        self.heads, self.out.ranks = self.heads // ranks.size, ranks
        self.mlp.join(ranks)

    def forward(
        self, x_BWD: Tensor, delta_BWD: Deferred | None, table: Table, attend: Attend, pieces: Pieces,
        needed_BX: Tensor | None,
    ) -> tuple[Tensor, Deferred | None]:  # fmt: skip
        """Takes and returns the residual stream as a sum of two, so that the add is part of the next norm.

        `pieces` are `before` and `after`, compiled or not. `needed_BX`: the places that it returns; None: all.
        """
        before, after = pieces
        norm = None if self.qk_norm is None else HeadNorm(weight_alone(self.qk_norm, "qk_norm"), self.spec.norm_eps)
        x_BWD, qkv_BWX = before(self, x_BWD, delta_BWD)
        takes = inputs_of(self.out) if after is Block.after else "plain"  # what is compiled takes tensors
        qkv = projections(qkv_BWX, self.spec.head_dim, self.heads, table, norm, takes)
        seen_BXHE = attend(self.layer, qkv, needed_BX)
        if needed_BX is None:
            return after(self, x_BWD, seen_BXHE, attend.pos_BW)
        if needed_BX.shape[1] == 0:
            return x_BWD[:, :0], None
        return after(self, at(x_BWD, needed_BX), seen_BXHE, at(attend.pos_BW, needed_BX))

    def before(self, x_BWD: Tensor, delta_BWD: Deferred | None) -> tuple[Tensor, Deferred]:
        """The residual stream, and queries, keys and values. [B, W, D], [B, W, X]"""
        x_BWD, h_BWD = added(self.attn_norm, x_BWD, delta_BWD, inputs_of(self.qkv))
        return x_BWD, apply(self.qkv, h_BWD)

    def after(self, x_BWD: Tensor, seen_BWHE: Deferred, pos_BW: Tensor) -> tuple[Tensor, Deferred]:
        """Output projection of the attention, and MLP: the residual stream as a sum of two."""
        seen_BWX = seen_BWHE.flatten(2) if isinstance(seen_BWHE, Tensor) else seen_BWHE
        x_BWD, h_BWD = added(self.mlp_norm, x_BWD, apply(self.out, seen_BWX), inputs_of(self.mlp))
        return x_BWD, apply(self.mlp, h_BWD, pos_BW)


class Transformer(nn.Module):
    """Embedding, blocks, final norm and head: the four methods that the step and `score` need.

    The mask token is an ordinary row of the embedding. The network holds no state between calls.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec, self.ranks = spec, ALONE
        self.embedding = Embedding(spec.vocab, spec.hidden)
        self.blocks = nn.ModuleList(Block(spec, layer) for layer in range(spec.layers))
        self.norm = RMSNorm(spec.hidden, eps=spec.norm_eps)
        self.head = None if spec.tied_head else Linear(spec.hidden, spec.vocab)
        self.pieces: Pieces = (Block.before, Block.after)

    def join(self, ranks: Ranks) -> None:
        """See `dinfer.core.step.model.Divided`."""
        self.ranks = ranks
        divide(self, ranks)
        for block in self.blocks if ranks.size > 1 else ():
            assert isinstance(block, Block)
            block.join(ranks)

    @property
    def dtype(self) -> torch.dtype:
        return next(self.norm.parameters()).dtype

    @property
    def device(self) -> torch.device:
        return next(self.embedding.parameters()).device

    def embed(self, tokens_BW: Tensor) -> Tensor:
        """[B, W] -> [B, W, D]"""
        return embed(tokens_BW, self.embedding, self.ranks, self.spec.vocab).to(self.dtype)

    def forward(self, x_BWD: Tensor, attend: Attend) -> Tensor:
        """See `dinfer.core.step.model.Model`. [B, W, D] -> [B, W, D] or [B, X, D]"""
        rope_dim = self.spec.rope_dim or self.spec.head_dim
        table = rotary_table(attend.pos_BW, rope_dim, self.spec.rope_theta, x_BWD.dtype, stretch=self.spec.rope_stretch)
        if (layers := provided("layers")) is not None and (found := layers(self, x_BWD, table, attend)) is not None:
            return found
        delta_BWD: Deferred | None = None
        for block in self.blocks:
            needed_BX = attend.needed_BX if block is self.blocks[-1] else None
            x_BWD, delta_BWD = block(x_BWD, delta_BWD, table, attend, self.pieces, needed_BX)
        return x_BWD if delta_BWD is None else add(x_BWD, delta_BWD)

    def logits(self, h_BLD: Tensor) -> Tensor:
        """[B, L, D] -> [B, L, V]"""
        return whole(self.own_logits(h_BLD), self.ranks, self.spec.vocab)

    def own_logits(self, h_BLD: Tensor) -> Tensor:
        """See `dinfer.core.step.model.Divided`."""
        if self.head is None:
            return of_table(self.embedding, "logits")(added(self.norm, h_BLD, None)[1])
        normed_BLD = added(self.norm, h_BLD, None, inputs_of(self.head))[1]
        return self.head(normed_BLD) if fused(self.head) else close(apply(self.head, normed_BLD))

    def mix(self, logits_BLV: Tensor) -> Tensor:
        """The expected embedding under softmax(logits). [B, L, V] -> [B, L, D]"""
        return mix(logits_BLV.softmax(-1), of_table(self.embedding, "table").to(self.dtype), self.ranks)

    @on_own_device
    def score(self, ids_BT: Tensor, attention: str = "bidirectional", block_length: int | None = None) -> Tensor:
        """Logits at every position of complete sequences, without a cache. [B, T] -> [B, T, V]

        `attention`: "bidirectional", "causal", or "block_causal" over blocks of `block_length` counted from
        position 0. Differentiable. Raw logits: `spec.shift` is not applied.
        """
        if attention not in ATTENTION:
            raise ValueError(f"attention={attention!r} is not known; use one of {', '.join(ATTENTION)}")
        if (attention == "block_causal") != (block_length is not None):
            need = "needs a block_length" if block_length is None else f"takes no block_length, got {block_length}"
            raise ValueError(f"attention={attention!r} {need}")
        if block_length is not None and block_length < 1:
            raise ValueError(f"block_length={block_length} must be at least 1")
        ids_BT = checked_ids(ids_BT, self.spec, self.device)
        pos_BT = torch.arange(ids_BT.shape[1], device=self.device).expand_as(ids_BT)
        seen_BTT = None
        if attention != "bidirectional":
            start_B = torch.zeros_like(ids_BT[:, 0])
            interval = attention_interval(pos_BT, start_B, start_B + ids_BT.shape[1], block_length or 1)
            seen_BTT = interval_mask(*interval, ids_BT.shape[1])
        return self.logits(self(self.embed(ids_BT), WholeAttend(pos_BT, seen_BTT)))


def checked_ids(ids_BT: Tensor, spec: ModelSpec, device: torch.device, name: str = "ids") -> Tensor:
    """Token ids of complete sequences as a tensor on the device; ValueError for anything else."""
    ids_BT = torch.as_tensor(ids_BT, device=device)
    if ids_BT.dim() != 2 or ids_BT.dtype not in (torch.int64, torch.int32) or ids_BT.numel() == 0:
        raise ValueError(f"{name} must be integers of shape [B, T], T >= 1, not {ids_BT.dtype} {tuple(ids_BT.shape)}")
    if ids_BT.min() < 0 or ids_BT.max() >= spec.vocab:  # on CUDA the lookup would take the process down
        raise ValueError(f"{name} must be tokens of the vocabulary, 0 to {spec.vocab - 1}")
    return ids_BT


@dataclass(frozen=True, slots=True)
class WholeAttend:
    """Attention of complete sequences over themselves: keys are those of this call, none are kept."""

    pos_BW: Tensor
    seen_BWS: Tensor | None
    context_BW: Tensor | None = None
    local: tuple[int, ...] = ()  # layers that see `near_BWS` instead
    near_BWS: Tensor | None = None
    needed_BX: None = None  # all hidden states are

    def __call__(self, layer: int, qkv: Projections, needed_BX: Tensor | None = None) -> Tensor:
        return interval_attention(*queries_keys_values(qkv), self.near_BWS if layer in self.local else self.seen_BWS)
