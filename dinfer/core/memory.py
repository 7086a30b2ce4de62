"""Keys and values: one pool of pages for every request and layer, written in place.

A page holds a fixed number of positions. A page table says which pages a slot's positions live in, so memory is
bounded by tokens, requests may share pages, and nothing moves when rows come and go. Keys are stored after RoPE.

Two pages are never handed out: NULL, which is all zeros and which unused entries of the table name, so that keys
outside a row's interval are finite; and SCRATCH, where padding is written and which no row reads.

Pools in float8 hold what the model computes rounded to the nearest number of e4m3, without scales; what exceeds its
largest, 448, becomes 448.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from dinfer.core.kernels.attention import paged_attention
from dinfer.core.kernels.canvas import at, host_rows, key_places, uploaded
from dinfer.core.kernels.linear import FLOAT8, check_float8
from dinfer.core.kernels.rotary import rotate_and_store
from dinfer.core.ranks.ranks import ALONE, Ranks
from dinfer.core.terms.spec import ModelSpec

NULL, SCRATCH, RESERVED = 0, 1, 2
NOWHERE = 2**40  # behind every canvas
Slot = TypeVar("Slot", int, Tensor)


def kv_dtype(kv: str, model: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of keys and values that `runtime.kv` asks for. ValueError for float8 on a GPU without it."""
    if kv == "model":
        return model
    check_float8(device, "runtime.kv=fp8", "runtime.kv=model")
    return FLOAT8


Interval = tuple[Tensor, Tensor]  # each query sees the keys `[start, end)`. int64 [B, W] each


class Seen(NamedTuple):
    """Which keys each query of a window sees."""

    interval_BW: Interval
    local_BW: Interval | None = None  # in layers with local attention; None: the same
    context_BW: Tensor | None = None  # bool, queries before the active region; only if `ModelSpec.encoder`


class PoolSize(NamedTuple):
    """Room for requests."""

    slots: int
    length: int  # positions of the longest request
    pages: int  # in all
    page: int  # positions of a page


@dataclass(frozen=True, slots=True)
class KVPool:
    """Shape suffixes: J layers, P pages, T positions a page, G key/value heads, E head size."""

    k_JPTGE: Tensor
    v_JPTGE: Tensor
    table_NP: Tensor  # int64, the pages of each slot in order of position; behind all slots, those of their twins
    local: KVPool | None  # the same pages for the layers with local attention, whose heads differ; J counts those alone
    layers: tuple[tuple[bool, int], ...]  # of each layer of the model: whether it is local, and which of its kind
    candidates: int = 0  # page sets of each slot beside its request's, for candidates and `self_keys`; at the end
    fork: int = 0  # pages of such a set
    ranks: Ranks = ALONE  # each holds the key heads of its query heads

    @classmethod
    def alloc(
        cls, spec: ModelSpec, size: PoolSize, *, dtype: torch.dtype, device, candidates: int = 0, window: int = 0,
        ranks: Ranks = ALONE,
    ) -> Self:  # fmt: skip
        """Pages for requests, and as many more as the `candidates` of each slot need for a window of `window`."""
        slots, length, pages, page = size
        fork = min(-(-(window - 1) // page) + 1, -(-length // page)) if candidates else 0
        pages += (slots + 1) * candidates * fork
        table_NP = torch.full((2 * (slots + 1), -(-length // page)), NULL, dtype=torch.int64, device=device)

        def pool(layers: int, heads: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
            k = torch.zeros(layers, pages + RESERVED, page, ranks.heads(heads), size, dtype=dtype, device=device)
            return k, torch.zeros_like(k), table_NP

        near = () if spec.local is None else spec.local.layers
        far = [layer for layer in range(spec.layers) if layer not in near]
        places = tuple((i in near, (near if i in near else far).index(i)) for i in range(spec.layers))
        local = None
        if spec.local is not None:
            local = cls(*pool(len(near), spec.local.kv_heads, spec.local.head_dim), None, ())
        return cls(*pool(len(far), spec.kv_heads, spec.head_dim), local, places, candidates, fork, ranks)

    @property
    def page(self) -> int:
        return self.k_JPTGE.shape[2]

    def assign(self, pages: Mapping[int, Sequence[int]]) -> None:
        """Gives each of these slots and twins its pages. Host side, between steps."""
        device = self.table_NP.device
        table_AP = host_rows([*pages.values()], self.table_NP.shape[1], NULL)
        self.table_NP.index_copy_(0, uploaded(torch.tensor([*pages]), device), uploaded(table_AP, device))

    def twin(self, slot: Slot) -> Slot:
        """The slot of a guided request's second branch. It has pages and nothing else."""
        return slot + self.table_NP.shape[0] // 2

    def layer(self, layer: int) -> tuple[Tensor, Tensor, bool]:
        """Keys and values of a layer, [P, T, G, E] each, and whether its attention is local."""
        near, index = self.layers[layer]
        pool = self.local if near and self.local is not None else self
        return pool.k_JPTGE[index], pool.v_JPTGE[index], near

    def wipe(self, pages: list[int]) -> None:
        """Zeroes pages: what their last owner left there may be NaN, which no mask hides. Host side."""
        index = uploaded(torch.tensor([*pages, SCRATCH]), self.k_JPTGE.device)
        for pool in (self.k_JPTGE, self.v_JPTGE):
            pool.view(torch.uint8 if pool.dtype == FLOAT8 else pool.dtype).index_fill_(1, index, 0)
        if self.local is not None:
            self.local.wipe(pages)

    def attend(
        self, slot_B: Tensor, pos_BW: Tensor, seen: Seen, pages: int, *, place_BW: Tensor | None = None,
        table_NP: Tensor | None = None, self_keys: int = 0,
    ) -> PagedAttend:  # fmt: skip
        """Attention of the queries at `pos_BW` over the first `pages` pages of their rows.

        `place_BW`: where their keys are kept, if not at these positions; intervals of `seen` are of places, too.
        `table_NP`: the pages of each slot, if not those of requests. The keys of the last `self_keys` queries are kept
        beside the canvas: each is seen by its own query and by no other.
        """
        interval_BW, local_BW, context_BW = seen
        kept_BW = pos_BW if place_BW is None else place_BW
        pages_BP, write_X = key_places(
            self.table_NP if table_NP is None else table_NP, slot_B, kept_BW,
            page=self.page, pages=pages, null=NULL, scratch=SCRATCH,
        )  # fmt: skip
        # Contiguous once, not in every layer, where a copy would also come between RoPE and attention.
        near_BW = None if local_BW is None else (local_BW[0].contiguous(), local_BW[1].contiguous())
        self_key_BW = None
        if self_keys:
            none_BX, place_X = torch.full_like(pos_BW[:, self_keys:], -1), torch.arange(self_keys, device=slot_B.device)
            # In pages that belong to the slots and to no position of their requests.
            first_B1 = (self.first_beside + slot_B * self.candidates * self.fork)[:, None] * self.page
            self_key_BW = torch.cat((none_BX, first_B1 + place_X), 1)
            write_X = torch.where(self_key_BW < 0, write_X.view_as(self_key_BW), self_key_BW).flatten()
        interval_BW = interval_BW[0].contiguous(), interval_BW[1].contiguous()
        return PagedAttend(self, pos_BW, write_X, pages_BP, interval_BW, near_BW, context_BW, self_key_BW=self_key_BW)

    @property
    def first_beside(self) -> int:
        """The first page that belongs to no request."""
        return self.k_JPTGE.shape[1] - self.table_NP.shape[0] // 2 * self.candidates * self.fork


@dataclass(frozen=True, slots=True)
class PagedAttend:
    """Writes the keys and values of its queries to the pool, and attends over the pool's."""

    pool: KVPool
    pos_BW: Tensor
    write_X: Tensor  # int64 [B * W], where in the pool each query's key goes
    pages_BP: Tensor  # the pages that are read
    interval_BW: tuple[Tensor, Tensor]
    local_BW: tuple[Tensor, Tensor] | None = None  # the interval in layers with local attention
    context_BW: Tensor | None = None
    self_key_BW: Tensor | None = None  # int64, place in the pool of a key that a query also sees; -1: none
    queries: list[Tensor] | None = None  # those of each layer, for a cache that reads them; None: they are not kept
    needed_BX: Tensor | None = None  # int64, which of the W hidden states are read, see `dinfer.core.step.model.Model`

    def reading(self, needed_BX: Tensor | None) -> PagedAttend:
        """The same for a forward of which these hidden states are read, in all lanes that stand for one row."""
        if needed_BX is None:
            return self
        return replace(self, needed_BX=needed_BX.repeat(self.pos_BW.shape[0] // needed_BX.shape[0], 1))

    def __call__(self, layer: int, qkv: Any, needed_BX: Tensor | None = None) -> Any:
        k_PTGE, v_PTGE, near = self.pool.layer(layer)
        interval_BW = self.local_BW if near and self.local_BW is not None else self.interval_BW
        pools = k_PTGE.flatten(0, 1), v_PTGE.flatten(0, 1)
        q_BWHE = rotate_and_store(qkv, *pools, self.write_X)
        if self.queries is not None:
            self.queries.append(q_BWHE)
        if needed_BX is None:
            return paged_attention(
                q_BWHE, k_PTGE, v_PTGE, self.pages_BP, interval_BW, self.self_key_BW, qkv.input_format
            )
        if needed_BX.shape[1] == 0:
            return q_BWHE[:, :0]
        start_BX, end_BX = (at(bound_BW, needed_BX) for bound_BW in interval_BW)
        self_key_BX = None if self.self_key_BW is None else at(self.self_key_BW, needed_BX)
        q_BXHE = at(q_BWHE, needed_BX)  # the last of them: no interval may be written right before `paged_attention`
        return paged_attention(q_BXHE, k_PTGE, v_PTGE, self.pages_BP, (start_BX, end_BX), self_key_BX, qkv.input_format)
