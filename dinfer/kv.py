"""Keys and values: one pool of pages for every request and layer, written in place.

A page holds a fixed number of positions. A page table says which pages a slot's positions live in, so memory is
bounded by tokens, requests may share pages, and nothing moves when rows come and go. Keys are stored after RoPE.

Two pages are never handed out: NULL, which is all zeros and which unused entries of the table name, so that keys
outside a row's interval are finite; and SCRATCH, where padding is written and which nobody reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from dinfer.kernels.attention import paged_attention
from dinfer.kernels.rotary import HeadNorm, Table, rotate_and_store
from dinfer.spec import ModelSpec

NULL, SCRATCH, RESERVED = 0, 1, 2
Slot = TypeVar("Slot", int, Tensor)


@dataclass(frozen=True, slots=True)
class KVPool:
    """Shape suffixes: J layers, P pages, T positions a page, G key/value heads, E head size."""

    k_JPTGE: Tensor
    v_JPTGE: Tensor
    table_NP: Tensor  # int64, the pages of each slot in order of position; behind all slots, those of their twins

    @classmethod
    def alloc(
        cls, spec: ModelSpec, slots: int, length: int, pages: int, page: int, *, dtype: torch.dtype, device
    ) -> KVPool:
        shape = (spec.layers, pages + RESERVED, page, spec.kv_heads, spec.head_dim)
        table_NP = torch.full((2 * (slots + 1), -(-length // page)), NULL, dtype=torch.int64, device=device)
        k = torch.zeros(shape, dtype=dtype, device=device)
        return cls(k, torch.zeros_like(k), table_NP)

    @property
    def page(self) -> int:
        return self.k_JPTGE.shape[2]

    def assign(self, slot: int, pages: list[int], twin: list[int] | None = None) -> None:
        """Gives a slot its pages, and its twin, the branch without the prompt, its own. Host side, between steps."""
        for index, owned in ((slot, pages), (self.twin(slot), twin or [])):
            row = torch.full((self.table_NP.shape[1],), NULL, dtype=torch.int64)
            row[: len(owned)] = torch.tensor(owned, dtype=torch.int64)
            self.table_NP[index] = row.to(self.table_NP.device)

    def twin(self, slot: Slot) -> Slot:
        """The slot of the second branch of a guided request, which has pages and nothing else."""
        return slot + self.table_NP.shape[0] // 2

    def wipe(self, pages: list[int]) -> None:
        """Zeroes pages: what their last owner left there may be NaN, which no mask hides. Host side."""
        index = torch.tensor([*pages, SCRATCH], device=self.k_JPTGE.device)
        for pool in (self.k_JPTGE, self.v_JPTGE):
            pool.index_fill_(1, index, 0)

    def attend(self, slot_B: Tensor, pos_BW: Tensor, interval_BW: tuple[Tensor, Tensor], pages: int) -> PagedAttend:
        """Attention of the queries at `pos_BW` over the first `pages` pages of their rows."""
        table_BP = self.table_NP.index_select(0, slot_B)
        where_BW = pos_BW.clamp_min(0)
        own_BW = table_BP.gather(1, torch.div(where_BW, self.page, rounding_mode="floor"))
        lost_BW = (pos_BW < 0) | (own_BW == NULL)
        write_BW = torch.where(lost_BW, SCRATCH * self.page, own_BW * self.page + where_BW % self.page)
        start_BW, end_BW = (bound_BW.contiguous() for bound_BW in interval_BW)  # once, not in every layer
        return PagedAttend(self, pos_BW, write_BW.flatten(), table_BP[:, :pages].contiguous(), (start_BW, end_BW))


@dataclass(frozen=True, slots=True)
class PagedAttend:
    """Writes the keys and values of its queries to the pool, and attends over the pool's."""

    pool: KVPool
    pos_BW: Tensor
    write_X: Tensor  # int64 [B * W], where in the pool each query's key goes
    pages_BP: Tensor  # the pages that are read
    interval_BW: tuple[Tensor, Tensor]

    def values(self, layer: int = -1) -> Tensor:
        """The values that the pool holds at the queries' positions; anything at padding. [B, W, G * E]"""
        return self.pool.v_JPTGE[layer].flatten(0, 1).index_select(0, self.write_X).view(*self.pos_BW.shape, -1)

    def __call__(self, layer: int, qkv_BWXE: Tensor, table: Table, norm: HeadNorm | None, heads: int) -> Tensor:
        k_PTGE, v_PTGE = self.pool.k_JPTGE[layer], self.pool.v_JPTGE[layer]
        pools = k_PTGE.flatten(0, 1), v_PTGE.flatten(0, 1)
        q_BWHE = rotate_and_store(qkv_BWXE, table, norm, heads, *pools, self.write_X)
        return paged_attention(q_BWHE, k_PTGE, v_PTGE, self.pages_BP, self.interval_BW)
