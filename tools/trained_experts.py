"""A mixture of experts as one wide MLP, for training with few experts and large batches.

Every expert computes every token, and unchosen experts have weight 0. That multiplies too much, but in two dense matrix
products without sorting. Function and parameters are those of `dinfer.core.layers.transformer.Experts`.

Shape suffixes: B rows, W positions, N tokens, D hidden, X experts, M width of an expert.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dinfer.core.kernels.norm import swiglu
from dinfer.core.layers.transformer import Experts, Transformer
from dinfer.core.terms.spec import ModelSpec


class TrainedExperts(Experts):
    """Counts the tokens of each expert, to balance them."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self.register_buffer("load_X", torch.zeros(self.experts.experts), persistent=False)

    def forward(self, x_BWD: Tensor, pos_BW: Tensor) -> Tensor:
        x_ND, count = x_BWD.flatten(0, 1), self.experts.experts
        with torch.autocast(x_BWD.device.type, enabled=False):  # routed as in inference
            logits_NX = self.router(x_ND)
        chosen_NC, weights_NC = self.route(logits_NX, pos_BW)
        weights_NX = torch.zeros_like(logits_NX).scatter(1, chosen_NC, weights_NC)
        self.load_X += (weights_NX.detach() > 0).sum(0)
        hidden_NXM = swiglu(F.linear(x_ND, self.gate_up.flatten(0, 1)).unflatten(1, (count, -1)))
        hidden_NXM = hidden_NXM * weights_NX[..., None].to(hidden_NXM.dtype)
        down = self.down.transpose(0, 1).flatten(1)
        out_BWD = F.linear(hidden_NXM.flatten(1), down).view_as(x_BWD)
        return out_BWD if self.shared is None else out_BWD + self.shared(x_BWD, pos_BW)

    @torch.no_grad()
    def balance(self, rate: Tensor) -> None:
        """Moves the bias of each expert by `rate`, up if it got fewer tokens than its share (DeepSeek-V3)."""
        if self.choice_bias is not None:
            self.choice_bias += rate * (self.load_X.mean() - self.load_X).sign()
        self.load_X.zero_()


def trainable(network: Transformer) -> Transformer:
    """Replaces the network's mixtures of experts, in place, and returns it. Raises ValueError."""
    if network.spec.experts is not None and network.spec.experts.capacity is not None:
        raise ValueError("experts with a capacity: a noised block would share it with the clean block beside it")
    network.requires_grad_(True).train()
    for block in network.blocks:
        if isinstance(block.mlp, Experts):
            wide = TrainedExperts(network.spec).to(network.device, network.dtype)
            wide.load_state_dict(block.mlp.state_dict())
            if wide.choice_bias is not None:
                wide.choice_bias.requires_grad_(False)  # `balance` moves it
            block.mlp = wide
    return network
