"""What follows the attention in a block: a gated MLP, or a mixture of them."""

import torch
from torch import Tensor, nn

from dinfer.kernels.deferred import close, share
from dinfer.kernels.moe import Gate, Shared, block_experts, expert_mixture, route, wide_linear
from dinfer.kernels.norm import swiglu
from dinfer.kernels.types import Dealt, Deferred, InGroups, InputFormat, Summing
from dinfer.layers.compiling import untraced
from dinfer.layers.formats.plain import PLAIN
from dinfer.layers.linear import Formatted, Linear
from dinfer.parallel.ranks import Ranks
from dinfer.step.spec import ModelSpec


class GatedMLP(nn.Module):
    """down(silu(gate x) * up x), or with another function of the two; gate and up are one matrix."""

    def __init__(self, hidden: int, width: int, gated: Gate = swiglu) -> None:
        super().__init__()
        self.gated = gated
        self.gate_up = Linear(hidden, 2 * width)
        self.down = Linear(width, hidden)

    @property
    def input_format(self) -> InputFormat:
        """How whatever makes the inputs should leave them."""
        return self.gate_up.input_format

    def join(self, ranks: Ranks) -> None:
        """Each rank has a part of the width."""
        self.down.ranks = ranks

    def forward(self, x_BWD: Deferred, pos_BW: Tensor | None = None) -> Deferred:
        """[B, W, D] -> [B, W, D]"""
        return self.down.deferred(self.gated(self.gate_up.deferred(x_BWD), self.down.input_format))


def dealt_to(ranks: Ranks, experts: int) -> Dealt | None:
    """Which of so many experts a rank has; None: a part of each."""
    first = ranks.first_expert(experts)
    return None if first is None else Dealt(first, experts)


class Experts(Formatted):
    """A mixture of gated MLPs, and one for all tokens if there is a shared one. The router computes in float32.

    The matrices of an expert are `gate_up`, gate rows and then up rows, and `down`.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        if (experts := spec.experts) is None:
            raise ValueError(f"{spec.family} has no experts")
        self.experts, self.causal_block = experts, spec.causal_block
        self.router = nn.Linear(spec.hidden, experts.experts, bias=False)
        self.choice_bias = nn.Parameter(torch.zeros(experts.experts)) if experts.bias else None
        self.gate_up = nn.Parameter(torch.empty(experts.experts, 2 * experts.width, spec.hidden))
        self.down = nn.Parameter(torch.empty(experts.experts, spec.hidden, experts.width))
        self.shared = GatedMLP(spec.hidden, experts.shared) if experts.shared else None
        self.formats = {"gate_up": PLAIN, "down": PLAIN}
        self.ranks: Summing | None = None
        self.dealt: Dealt | None = None

    def join(self, ranks: Ranks) -> None:
        """Each rank has some experts, or a part of each, and a part of the shared one: one sum over ranks is enough."""
        self.ranks, self.dealt = ranks, dealt_to(ranks, self.experts.experts)

    @property
    def input_format(self) -> InputFormat:
        """How whatever makes the inputs should leave them; the router takes them as they are."""
        inputs = self.formats["gate_up"].input_format(self.weight_of("gate_up"))
        if isinstance(inputs, InGroups):
            return inputs._replace(both=True)
        return "both" if inputs == "rounded" else "plain"

    @untraced
    def forward(self, x_BWD: Deferred, pos_BW: Tensor) -> Deferred:
        """[B, W, D] -> [N, D], for a consumer that closes it; `pos_BW` says which attention block each token is of."""
        chosen_NC, weights_NC = self.route(wide_linear(x_BWD, self.router.weight), pos_BW)
        shared, mlp = None, self.shared
        if mlp is not None:
            as_made = mlp.input_format == "rounded"  # then rows that come rounded are not rounded again
            own = mlp.gate_up.expert("weight"), mlp.down.expert("weight")
            shared = Shared(lambda x_ND: close(mlp(x_ND if as_made else close(x_ND))), *own)
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
        return route(
            logits_NX, experts.chosen, sigmoid=experts.scores == "sigmoid", normalize=experts.normalize,
            scale=experts.scale, bias_X=self.choice_bias, groups=experts.groups, groups_chosen=experts.groups_chosen,
            allowed_NX=allowed_NX,
        )  # fmt: skip


def blocks_of(pos_BW: Tensor, length: int) -> Tensor:
    """Which attention block of which row each position is in, numbered from 0; padding is one of each row. [B * W]"""
    block_BW = torch.div(pos_BW, length, rounding_mode="floor")  # -1 for padding
    lane_B1 = torch.arange(pos_BW.shape[0], device=pos_BW.device)[:, None]
    key_N = (lane_B1 * (block_BW.max() + 2) + block_BW + 1).flatten()
    sorted_N, order_N = key_N.sort()
    new_N = torch.cat([torch.zeros_like(sorted_N[:1]), (sorted_N[1:] != sorted_N[:-1]).to(torch.int64)])
    return torch.empty_like(key_N).scatter(0, order_N, new_N.cumsum(0))
