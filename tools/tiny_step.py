"""A training step of `tools/train_tiny.py`: the loss, the update, and both captured as a CUDA graph.

Nothing in a step waits for the device, and the learning rate is on the device, so that a captured step can be replayed.
Otherwise a network this small would train at the speed at which Python launches kernels.

Shape suffixes: B rows, T positions, S positions that go through the network, V vocabulary, D hidden.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from dinfer.core.kernels.attention import interval_attention
from dinfer.core.kernels.rotary import queries_keys_values
from dinfer.core.kernels.types import Projections
from dinfer.core.layers.transformer import Transformer
from tools.muon import Muon
from tools.noise import Noise
from tools.trained_experts import TrainedExperts


class Whole:
    """`WholeAttend` without a frozen dataclass, which torch.compile cannot trace.

    It repeats key heads, since the fast kernels with a mask need as many as query heads.
    """

    needed_BX = None

    def __init__(self, pos_BW: Tensor, seen_BWS: Tensor | None) -> None:
        self.pos_BW, self.seen_BWS = pos_BW, seen_BWS

    def __call__(self, layer: int, qkv: Projections, needed_BX: Tensor | None = None) -> Tensor:
        q_BWHE, *kv = queries_keys_values(qkv)
        k_BWHE, v_BWHE = (part.repeat_interleave(qkv.heads // part.shape[2], 2) for part in kv)
        return interval_attention(q_BWHE, k_BWHE, v_BWHE, self.seen_BWS)


def block_diffusion_mask(length: int, block: int, device: torch.device) -> Tensor:
    """Which positions see which in a noised row followed by the clean row (arXiv:2503.09573, section 3).

    A noised block sees itself and the clean blocks before it. A clean block sees the same. bool [1, 2T, 2T]
    """
    block_S = torch.arange(length, device=device).repeat(2) // block
    clean_S = torch.arange(2 * length, device=device) >= length
    before_SS, own_SS = block_S[:, None] > block_S, block_S[:, None] == block_S
    return ((before_SS & clean_S) | (own_SS & (clean_S[:, None] == clean_S)))[None]


def logits(model: Transformer, shown_BT: Tensor, tokens_BT: Tensor, seen_BSS: Tensor | None) -> Tensor:
    """The network's logits for noised rows, with bfloat16 matrix products on a GPU. [B, T, V]

    `seen_BSS` is the `block_diffusion_mask` of a block-causal network, which also sees the clean rows. So all blocks of
    a row are trained at once.
    """
    length = shown_BT.shape[1]
    pos_BT = torch.arange(length, device=shown_BT.device).expand_as(shown_BT)
    with torch.autocast(shown_BT.device.type, torch.bfloat16, enabled=shown_BT.is_cuda):
        if seen_BSS is None:
            return model.logits(model(model.embed(shown_BT), Whole(pos_BT, None)))
        attend = Whole(torch.cat((pos_BT, pos_BT), 1), seen_BSS)
        h_BSD = model(model.embed(torch.cat((shown_BT, tokens_BT), 1)), attend)
        return model.logits(h_BSD[:, :length])


def cross_entropy(model: Transformer, shown_BT: Tensor, tokens_BT: Tensor, seen_BSS: Tensor | None) -> Tensor:
    """Cross-entropy at every position. float32 [B, T]"""
    logits_BTV = logits(model, shown_BT, tokens_BT, seen_BSS)
    return F.cross_entropy(logits_BTV.float().flatten(0, 1), tokens_BT.flatten(), reduction="none").view_as(tokens_BT)


@torch.no_grad()
def guess(model: Transformer, shown_BT: Tensor, tokens_BT: Tensor, seen_BSS: Tensor | None) -> Tensor:
    """The best token at every position, the mask token excluded. int64 [B, T]"""
    logits_BTV = logits(model, shown_BT, tokens_BT, seen_BSS)
    mask_V = torch.arange(logits_BTV.shape[-1], device=shown_BT.device) == model.spec.mask_id
    return logits_BTV.masked_fill(mask_V, -torch.inf).argmax(-1)


def matrices(model: Transformer) -> Iterator[tuple[Tensor, int]]:
    """The parameters that Muon steps, and the rows of each matrix in them. It leaves out routers."""
    for block in model.blocks:
        for name, parameter in block.named_parameters():
            if parameter.dim() > 1 and "router" not in name:
                yield parameter, block.mlp.experts.width if name == "mlp.gate_up" else model.spec.hidden


class Step:
    """The network, its optimizers and the running sum of losses. `__call__` trains on a batch."""

    def __init__(
        self,
        model: Transformer,
        noise: Noise,
        *,
        weight_decay: float,
        clip: float,
        compiled: bool,
        graphs: bool,
    ) -> None:
        device = model.device
        self.model, self.noise, self.clip, self.graphs = model, noise, clip, graphs
        self.rate = torch.zeros((), device=device)
        self.loss_sum = torch.zeros((), device=device)
        self.mixtures = [block.mlp for block in model.blocks if isinstance(block.mlp, TrainedExperts)]
        self.muon = Muon(matrices(model), weight_decay)
        inner = {id(parameter) for parameter, _ in self.muon.matrices}
        rest = [parameter for parameter in model.parameters() if id(parameter) not in inner and parameter.requires_grad]
        self.adam = torch.optim.AdamW(
            [
                {"params": [parameter for parameter in rest if parameter.dim() == 2], "weight_decay": weight_decay},
                {"params": [parameter for parameter in rest if parameter.dim() != 2], "weight_decay": 0.0},
            ],
            lr=self.rate,
            betas=(0.9, 0.98),
            fused=device.type == "cuda",
            capturable=device.type == "cuda",
        )
        compile_it = (lambda f: torch.compile(f, dynamic=False)) if compiled else (lambda f: f)
        self.cross_entropy, self.guess = compile_it(cross_entropy), compile_it(guess)
        self.captured: dict[tuple[int, bool], tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}
        self.seen: dict[tuple[int, bool], int] = {}
        self.pool = torch.cuda.graph_pool_handle() if graphs else None

    def loss(self, tokens_BT: Tensor, prompt_B: Tensor, drafts: bool) -> Tensor:
        """The loss of a batch. `drafts`: on the network's own drafts."""
        block = self.model.spec.causal_block
        seen_BSS = None if block is None else block_diffusion_mask(tokens_BT.shape[1], block, tokens_BT.device)
        guesses = (lambda shown_BT: self.guess(self.model, shown_BT, tokens_BT, seen_BSS)) if drafts else None
        shown_BT, weight_BT = self.noise(tokens_BT, prompt_B, guesses)
        return (self.cross_entropy(self.model, shown_BT, tokens_BT, seen_BSS) * weight_BT).sum()

    def _train(self, tokens_BT: Tensor, prompt_B: Tensor, drafts: bool) -> None:
        loss = self.loss(tokens_BT.long(), prompt_B.long(), drafts)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.adam.step()
        self.muon.step(self.rate)
        for mixture in self.mixtures:
            mixture.balance(self.rate)
        self.loss_sum += loss.detach()

    def __call__(self, tokens_BT: Tensor, prompt_B: Tensor, rate: float, drafts: bool = False) -> None:
        """One step at learning rate `rate`. Returns before the device is done."""
        self.rate.fill_(rate)
        kind = tokens_BT.shape[1], drafts
        if kind in self.captured:
            graph, held_BT, held_B = self.captured[kind]
            held_BT.copy_(tokens_BT)
            held_B.copy_(prompt_B)
            graph.replay()
            return
        self.adam.zero_grad(set_to_none=True)
        self.muon.zero_grad()
        # The first steps run without a graph, to compile kernels and to allocate the optimizers' state.
        self.seen[kind] = self.seen.get(kind, 0) + 1
        if not self.graphs or self.seen[kind] <= 3:
            self._train(tokens_BT, prompt_B, drafts)
            return
        held_BT, held_B = tokens_BT.clone(), prompt_B.clone()
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.noise.generator)
        with torch.cuda.graph(graph, pool=self.pool, stream=torch.cuda.current_stream()):
            self._train(held_BT, held_B, drafts)
        self.captured[kind] = graph, held_BT, held_B
        graph.replay()

    def mean_loss(self, steps: int) -> float:
        """The mean loss over `steps` steps since the last call. Waits for the device."""
        mean = self.loss_sum.item() / steps
        self.loss_sum.zero_()
        return mean
