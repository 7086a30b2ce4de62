"""One training step of `tools/train_tiny.py`: LLaDA's loss, the update, and both captured as a CUDA graph.

Nothing in a step waits for the device, and the learning rate is device data, so that a captured step can be
replayed: a network this small would otherwise train at the speed at which Python launches kernels.

Shape suffixes: B rows, T positions, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from muon import Muon
from torch import Tensor

from dinfer.layers.transformer import Transformer, WholeAttend

SMALLEST_RATIO = 1e-3  # LLaDA's: keeps 1/t finite


class Whole:
    """What `Transformer.score` attends with, as a class that torch.compile can trace (no frozen dataclass)."""

    seen_BWS = None

    def __init__(self, pos_BW: Tensor) -> None:
        self.pos_BW = pos_BW

    __call__ = WholeAttend.__call__


def cross_entropy(model: Transformer, shown_BT: Tensor, tokens_BT: Tensor) -> Tensor:
    """Cross-entropy at every position, bf16 matrix products on a GPU. float32 [B, T]"""
    pos_BT = torch.arange(tokens_BT.shape[1], device=tokens_BT.device).expand_as(tokens_BT)
    with torch.autocast(tokens_BT.device.type, torch.bfloat16, enabled=tokens_BT.is_cuda):
        logits_BTV = model.logits(model(model.embed(shown_BT), Whole(pos_BT)))
    losses = F.cross_entropy(logits_BTV.float().flatten(0, 1), tokens_BT.flatten(), reduction="none")
    return losses.view_as(tokens_BT)


class Step:
    """The network, its optimizers and the running sum of losses: `__call__` trains on one batch."""

    def __init__(
        self,
        model: Transformer,
        *,
        weight_decay: float,
        clip: float,
        seed: int,
        compiled: bool,
        graphs: bool,
    ) -> None:
        device = model.device
        self.model, self.clip, self.graphs = model, clip, graphs
        self.rate = torch.zeros((), device=device)
        self.loss_sum = torch.zeros((), device=device)
        self.generator = torch.Generator(device).manual_seed(seed)
        inner = [parameter for parameter in model.blocks.parameters() if parameter.dim() == 2]
        rest = [parameter for parameter in model.parameters() if all(parameter is not other for other in inner)]
        self.muon = Muon(inner, model.spec.hidden, weight_decay)
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
        self.cross_entropy = torch.compile(cross_entropy, dynamic=False) if compiled else cross_entropy
        self.captured: dict[int, tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}
        self.seen: dict[int, int] = {}
        self.pool = torch.cuda.graph_pool_handle() if graphs else None

    def loss(self, tokens_BT: Tensor, prompt_B: Tensor) -> Tensor:
        """LLaDA's fine-tuning loss of one batch."""
        rows, length = tokens_BT.shape
        device = tokens_BT.device
        # one draw spread evenly over the rows: each t is uniform, and the batch covers (0, 1) with little variance
        offset = torch.rand((), device=device, generator=self.generator)
        ratio_B = (offset + torch.arange(rows, device=device) / rows).remainder(1).clamp_min(SMALLEST_RATIO)
        response_BT = torch.arange(length, device=device) >= prompt_B[:, None]
        chance_BT = torch.rand(tokens_BT.shape, device=device, generator=self.generator)
        masked_BT = response_BT & (chance_BT < ratio_B[:, None])
        shown_BT = torch.where(masked_BT, self.model.spec.mask_id, tokens_BT)
        losses_BT = self.cross_entropy(self.model, shown_BT, tokens_BT)
        return ((losses_BT * masked_BT).sum(1) / ratio_B / response_BT.sum(1)).mean()

    def _train(self, tokens_BT: Tensor, prompt_B: Tensor) -> None:
        loss = self.loss(tokens_BT.long(), prompt_B.long())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.adam.step()
        self.muon.step(self.rate)
        self.loss_sum += loss.detach()

    def __call__(self, tokens_BT: Tensor, prompt_B: Tensor, rate: float) -> None:
        """One step at learning rate `rate`; returns before the device is done."""
        self.rate.fill_(rate)
        length = tokens_BT.shape[1]
        if length in self.captured:
            graph, held_BT, held_B = self.captured[length]
            held_BT.copy_(tokens_BT)
            held_B.copy_(prompt_B)
            graph.replay()
            return
        self.adam.zero_grad(set_to_none=True)
        for matrix in self.muon.matrices:
            matrix.grad = None
        # a few ordinary steps first: kernels are compiled and optimizer state is made outside a graph
        self.seen[length] = self.seen.get(length, 0) + 1
        if not self.graphs or self.seen[length] <= 3:
            self._train(tokens_BT, prompt_B)
            return
        held_BT, held_B = tokens_BT.clone(), prompt_B.clone()
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.generator)
        with torch.cuda.graph(graph, pool=self.pool, stream=torch.cuda.current_stream()):
            self._train(held_BT, held_B)
        self.captured[length] = graph, held_BT, held_B
        graph.replay()

    def mean_loss(self, steps: int) -> float:
        """The mean since the last call, over `steps` steps; waits for the device."""
        mean = self.loss_sum.item() / steps
        self.loss_sum.zero_()
        return mean
