"""FOCUS (arXiv:2601.23278), which drops masked positions behind the first layers: one block at a time, one row.

Only masks whose importance rises most from one layer to the next are computed further. Importance is the attention that
a mask receives from the other masks. The rule is here, and not in the package, for comparison with a short window from
the leftmost mask, which needs nothing inside the network.

Shape suffixes: W positions of a pass, M masks among them, H query heads, G key heads, E head size, S canvas.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dinfer.core.kernels.attention import interval_attention
from dinfer.core.kernels.rotary import queries_keys_values


def importance(q_WHE: Tensor, k_WGE: Tensor, mask_M: Tensor) -> Tensor:
    """The attention that each mask receives from all masks, summed over heads: heads x M in all. [M]"""
    q_MHE, k_MGE = q_WHE[mask_M], k_WGE[mask_M]
    k_MHE = k_MGE.repeat_interleave(q_MHE.shape[1] // k_MGE.shape[1], 1)
    score_HMM = torch.einsum("ihe,jhe->hij", q_MHE, k_MHE) * q_MHE.shape[-1] ** -0.5
    wide_HMM = F.max_pool1d(score_HMM, 3, stride=1, padding=1)  # neighbours in the list of masks, not in the text
    return wide_HMM.softmax(-1).sum((0, 1))


def selected(rise_M: Tensor, target: int) -> tuple[str, list[int]]:
    """By which rule masks are chosen, and which: those that rose above the bar, or the `target` that rose most."""
    above_M = rise_M >= rise_M.mean() + rise_M.std(correction=0)
    if int(above_M.sum()) >= target:
        return "bar", above_M.nonzero()[:, 0].tolist()
    return "rank", sorted(rise_M.sort(descending=True, stable=True).indices[:target].tolist())


def with_neighbours(chosen: list[int], masks: list[int], progress: int) -> list[int]:
    """The masks that are kept: those chosen, their left neighbours, and what was never computed to the left of them."""
    kept = {*chosen, *(place - 1 for place in chosen)} & {*masks} or {*masks}
    return sorted(kept | {place for place in masks if progress < place < max(kept)})


@dataclass(slots=True)
class Attend:
    """Attention of one pass over a row's keys. In layer `boundary` it decides which positions are computed further."""

    run: "Focus"
    places: list[int]  # of the block
    masks: list[int]
    target: int
    pos_BW: Tensor
    needed_BX: None = None
    context_BW: None = None
    layers: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # queries and keys before the boundary
    by: str = "all"
    chosen: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    importance: list[list[float]] | None = None
    sees: int = 0

    def choose(self) -> None:
        """Sets what is kept, and how much is seen from now on."""
        self.by, self.chosen = "all", self.masks
        if len(self.masks) > self.target:
            mask_M = torch.tensor([self.places.index(place) for place in self.masks])
            first_M, second_M = (importance(q[0], k[0], mask_M) for q, k in self.layers[-2:])
            self.importance = [first_M.tolist(), second_M.tolist()]
            self.by, chosen = selected(second_M - first_M, self.target)
            self.chosen = [self.masks[i] for i in chosen]
        masks = with_neighbours(self.chosen, self.masks, self.run.progress) if self.masks else []
        self.kept = sorted({*masks, *self.places} - ({*self.masks} - {*masks}))
        self.sees = self.run.start + max(self.kept) + 1

    def __call__(self, layer: int, qkv: Any, needed_BX: None = None) -> Tensor:
        run, boundary = self.run, self.run.boundary
        q_BWHE, k_BWGE, v_BWGE = queries_keys_values(qkv)
        sees = int(self.pos_BW.max()) + 1
        if layer <= boundary:
            self.layers.append((q_BWHE, k_BWGE))
        if layer == boundary:
            self.choose()
        place_W = self.pos_BW[0]
        if layer > boundary:  # what was dropped is computed in vain, and leaves no keys
            kept_W = torch.tensor([place in self.kept for place in self.places])
            place_W, k_BWGE, v_BWGE = place_W[kept_W], k_BWGE[:, kept_W], v_BWGE[:, kept_W]
        sees = self.sees if layer >= boundary else sees
        k_SGE, v_SGE = run.keys[layer]
        k_SGE[place_W], v_SGE[place_W] = k_BWGE[0], v_BWGE[0]
        return interval_attention(q_BWHE, k_SGE[None, :sees], v_SGE[None, :sees], None)


@dataclass(slots=True)
class Focus:
    """The state of a row, and of the block that it is in."""

    model: Any
    tokens: list[int]
    mask_id: int
    block: int
    alpha: float
    threshold: float
    boundary: int
    whole: bool  # the last pass of a block computes all of it
    keys: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    start: int = 0
    uncached: list[bool] = field(default_factory=list)
    progress: int = -1
    commits: list[int] = field(default_factory=list)  # of the block's steps that committed something
    forwards: int = 0

    def prefill(self, prompt: int) -> None:
        """Computes the complete blocks of the prompt, and begins with the block behind them."""
        spec, size = self.model.spec, len(self.tokens)
        self.keys = [
            tuple(torch.zeros(size, spec.kv_heads, spec.head_dim, dtype=self.model.dtype) for _ in "kv")  # type: ignore[misc]
            for _ in range(spec.layers)
        ]
        while self.start + self.block <= prompt:
            self.enter()
            self.forward([*range(self.block)], [], 0)
            self.start += self.block
        self.forwards = 1 if self.start else 0
        self.enter()

    def enter(self) -> None:
        self.uncached, self.progress, self.commits = [True] * self.block, -1, []

    def forward(self, places: list[int], masks: list[int], target: int) -> tuple[Attend, Tensor]:
        """One pass over places of the block: how it went, and the logits of all of them. [W, V]"""
        pos_BW = torch.tensor([[self.start + place for place in places]])
        attend = Attend(self, places, masks, target, pos_BW)
        tokens_BW = torch.tensor([[self.tokens[pos] for pos in pos_BW[0].tolist()]])
        h_BWD = self.model.forward(self.model.embed(tokens_BW), attend)
        self.forwards += 1
        return attend, self.model.logits(h_BWD)[0]

    @property
    def masks(self) -> list[int]:
        """The masked places of the block."""
        here = self.tokens[self.start : self.start + self.block]
        return [place for place, token in enumerate(here) if token == self.mask_id]

    def step(self) -> dict[str, Any]:
        """One pass and its commits, in the words of the goldens."""
        masks = self.masks
        places = [place for place in range(self.block) if self.uncached[place]] or [*range(self.block)]
        if not masks and self.whole:
            places = [*range(self.block)]
        mean = sum(self.commits) / len(self.commits) if self.commits else 1.0
        target = min(len(masks), max(1, math.ceil(max(mean, 1) * self.alpha)))
        before, progress = [place not in masks for place in range(self.block)], self.progress
        attend, logits_WV = self.forward(places, masks, target)
        offers: list[list[Any]] = []
        for place, row_V in zip(places, logits_WV.softmax(-1), strict=True):
            if place in masks and place in attend.kept:
                offers.append([place, int(row_V.argmax()), float(row_V.max())])
        sure = [offer for offer in offers if offer[2] >= self.threshold] or sorted(offers, key=lambda o: -o[2])[:1]
        for place, token, _ in sure:
            self.tokens[self.start + place] = token
        self.commits += [len(sure)] if sure else []
        self.progress = max(self.progress, *attend.kept)
        for place in places:  # once more after the token to its right is known
            self.uncached[place] = not (before[place] and (place + 1 == self.block or before[place + 1]))
        settled = [place for place in range(self.block) if not self.uncached[place]]
        return {
            "block": self.start, "places": places, "masks": masks, "mean": mean, "target": target,
            "progress": progress, "sees_first": self.start + max(places) + 1, "importance": attend.importance,
            "by": attend.by, "chosen": attend.chosen, "sees_later": attend.sees, "kept": attend.kept,
            "offers": offers, "commits": [offer[:2] for offer in sure], "kept_from_now_on": settled,
            "after": self.tokens[self.start : self.start + self.block],
        }  # fmt: skip
