"""What the step needs of a network, and a network of the step. Shape suffixes as in `dinfer.core.protocols`."""

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from dinfer.core.ranks import Ranks
from dinfer.core.spec import ModelSpec


class Attend(Protocol):
    """What a model needs beside its inputs: positions, and attention over keys that it knows nothing of."""

    @property
    def pos_BW(self) -> Tensor: ...
    @property
    def context_BW(self) -> Tensor | None: ...  # bool, positions before the active region; only if `spec.encoder`

    def __call__(self, layer: int, qkv: Any) -> Tensor:
        """Norms and rotates queries and keys, keeps what is to be kept, and attends. [B, W, heads, E]

        `qkv` is what `dinfer.kernels.rotary.projections` makes of a layer's projections; only kernels look inside.
        """
        ...


class Followed(Protocol):
    """The attention of a forward that has ended."""

    @property
    def layers(self) -> int: ...

    def received(self, layer: int, weight_BW: Tensor) -> Tensor:
        """Attention that each position receives from queries of these weights, as a mean over heads. float32 [B, S]"""
        ...


class Model(Protocol):
    """A network. It keeps no state between calls; keys and values go through `attend`."""

    spec: ModelSpec

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...

    def embed(self, tokens_BW: Tensor) -> Tensor: ...  # [B, W, D]
    def forward(self, x_BWD: Tensor, attend: Attend) -> Tensor: ...  # [B, W, D]
    def logits(self, h_BLD: Tensor) -> Tensor: ...  # [B, L, V]
    def mix(self, logits_BLV: Tensor) -> Tensor: ...  # [B, L, D], the expected embedding under softmax(logits)


class SelfConditioned(Protocol):
    """What a `Model` with `spec.self_conditioning` also defines."""

    def condition(self, x_BWD: Tensor, expected_BWD: Tensor) -> Tensor:
        """Embeddings with the expected embeddings of the step before, as `Model.mix` gives them, or zeros. [B, W, D]"""


@runtime_checkable
class Divided(Protocol):
    """What a `Model` also defines if ranks may divide its weights."""

    ranks: Ranks

    def join(self, ranks: Ranks) -> None:
        """Makes a network that holds the share of one rank compute with the others. Once, before anything else."""
        ...

    def own_logits(self, h_BLD: Tensor) -> Tensor:
        """The logits of the tokens `ranks.vocabulary(spec.vocab)` alone. [B, L, D] -> [B, L, own]"""
        ...
