"""Muon (Jordan, 2024) for many small matrices: it orthogonalises the update, all matrices of a shape at once.

On a network this small, the kernel launches of a loop over matrices would take longer than the whole step.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

# The published quintic. Five rounds bring singular values near 1, which is enough.
_QUINTIC = (3.4445, -4.7750, 2.0315)
_ROUNDS = 5
MOMENTUM = 0.95


def orthogonalised(matrices_NRC: Tensor) -> Tensor:
    """Approximates the nearest (semi-)orthogonal matrices by Newton-Schulz iteration in bfloat16. [N, R, C]"""
    if matrices_NRC.shape[1] > matrices_NRC.shape[2]:  # the Gram matrix is then the smaller of two
        return orthogonalised(matrices_NRC.mT).mT
    a, b, c = _QUINTIC
    x_NRC = matrices_NRC.bfloat16()
    x_NRC = x_NRC / (x_NRC.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(_ROUNDS):
        gram_NRR = x_NRC @ x_NRC.mT
        x_NRC = a * x_NRC + (b * gram_NRR + c * gram_NRR @ gram_NRR) @ x_NRC
    return x_NRC.float()


class Muon:
    """Steps parameters that hold several matrices, one below the other: each comes with the rows of a matrix.

    The update has the size of AdamW's (Liu et al., arXiv:2502.16982), so that both optimizers share one learning rate
    and weight decay.
    """

    def __init__(self, matrices: Iterable[tuple[Tensor, int]], weight_decay: float) -> None:
        self.matrices, self.weight_decay = list(matrices), weight_decay
        self.groups: dict[tuple[int, int], list[Tensor]] = {}
        self.velocity: dict[tuple[int, int], Tensor] = {}
        for matrix, rows in self.matrices:
            for part in matrix.detach().flatten(0, -2).split(rows):
                self.groups.setdefault((part.shape[0], part.shape[1]), []).append(part)
        for shape, parts in self.groups.items():
            self.velocity[shape] = torch.zeros(len(parts), *shape, device=parts[0].device)

    def zero_grad(self) -> None:
        for matrix, _ in self.matrices:
            matrix.grad = None

    @torch.no_grad()
    def step(self, learning_rate: Tensor) -> None:
        """One update from the gradients. The learning rate is a tensor, so that a graph can replay the step."""
        gradients: dict[tuple[int, int], list[Tensor]] = {shape: [] for shape in self.groups}
        for matrix, rows in self.matrices:
            if matrix.grad is None:
                raise ValueError("Muon: a matrix has no gradient; call backward first")
            for part in matrix.grad.flatten(0, -2).split(rows):
                gradients[(part.shape[0], part.shape[1])].append(part)
        for shape, parts in self.groups.items():
            gradient_NRC, velocity_NRC = torch.stack(gradients[shape]), self.velocity[shape]
            velocity_NRC.lerp_(gradient_NRC, 1 - MOMENTUM)
            update_NRC = orthogonalised(gradient_NRC.lerp(velocity_NRC, MOMENTUM))
            scale = 0.2 * max(shape) ** 0.5
            torch._foreach_mul_(parts, 1 - learning_rate * self.weight_decay)
            torch._foreach_sub_(parts, list((update_NRC * (learning_rate * scale)).unbind()))
