"""The processes that divide one model (tensor parallelism), and their collectives.

Each rank runs the same steps on the same requests. Sums and gathers leave the same bits on every rank, so all ranks
commit the same tokens and take the same decisions without asking each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

try:
    from torch.distributed import all_gather_single
except ImportError:  # its name before torch 2.12
    from torch.distributed import all_gather_into_tensor as all_gather_single

from dinfer.core.provided import provided
from dinfer.core.ranks.split import WHOLE, Rank, Section
from dinfer.core.terms.stats import VocabularySlice


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks of one model as one of them sees them. Every rank must call the collectives in the same order."""

    rank: Rank = WHOLE
    group: Any = None  # the ProcessGroup; None: this rank is alone, and collectives cost nothing
    small: Any = None  # `dinfer.kernels.symmetric`: adds up small tensors faster than the group does
    exchange: Any = None  # by which its kernels add up the rows of all ranks as they read them

    @classmethod
    def of(cls, group: dist.ProcessGroup | None = None) -> Self:
        """The ranks of a process group, None: of the default one. All of its processes call this at the same time.

        With NCCL the current CUDA device is the rank's.
        """
        group = dist.group.WORLD if group is None else group
        rank = Rank(dist.get_rank(group), dist.get_world_size(group))
        if rank.ranks == 1:
            return cls()
        cuda = dist.get_backend(group) == "nccl"
        fast = provided("symmetric_sum") if cuda else None
        if fast is None or (small := fast(group, torch.device("cuda", torch.cuda.current_device()))) is None:
            return cls(rank, group)
        return cls(rank, group, small, small.exchange)

    @property
    def index(self) -> int:
        return self.rank.rank

    @property
    def size(self) -> int:
        return self.rank.ranks

    def vocabulary(self, vocab: int) -> tuple[int, int]:
        """The tokens `[first, end)` whose rows of embedding and head this rank holds."""
        return Section("vocab", vocab).share(self.rank)

    def columns(self, vocab: int) -> VocabularySlice:
        """What this rank's own logits stand for."""
        first, end = self.vocabulary(vocab)
        gather = None if self.size == 1 else self.all_gather
        return VocabularySlice(first, end - first, -(-vocab // self.size), gather, self.index)

    def vocabularies(self, vocab: int) -> list[int]:
        """How many tokens each rank holds."""
        shares = (Section("vocab", vocab).share(Rank(index, self.size)) for index in range(self.size))
        return [end - first for first, end in shares]

    def heads(self, kv_heads: int) -> int:
        """How many of so many key heads this rank holds."""
        first, end = Section("kv_heads", kv_heads).share(self.rank)
        return end - first

    def first_expert(self, experts: int) -> int | None:
        """The first of those that this rank has of so many, where they are dealt out whole; None: a part of each."""
        return Section("experts", experts).share(self.rank)[0] if self.rank.expert_parallel else None

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks, rounded to the dtype of `x`. It may be written over `x`."""
        if self.size == 1:
            return x
        if self.small is not None and self.small.takes(x):
            return self.small(x)
        x = x.contiguous()
        dist.all_reduce(x, group=self.group)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """The tensors of all ranks, which have one shape, in order of rank. [...] -> [size, ...]"""
        if self.size == 1:
            return x[None]
        x = x.contiguous()
        out = torch.empty((self.size * len(x), *x.shape[1:]), dtype=x.dtype, device=x.device)
        all_gather_single(out, x, group=self.group)
        return out.view(self.size, *x.shape)


ALONE = Ranks()
