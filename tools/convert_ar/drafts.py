"""Trains an adapter that only masks take: they draft what the base verifies (I-DLM, github.com/thuEcstasy/I-DLM).

A conversation is fed clean and causal, without the adapter and without a gradient. Behind anchors in its answer stand
groups of masks. A mask sees the clean tokens up to its anchor and the masks before it in its group, and predicts the
token behind its own place. The target is what the base itself would say there.

Shape suffixes: B rows, T clean positions, M masks, D width, C masks of a chunk, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.checkpoint import checkpoint

from tools.convert_ar.base import Base, ConversionError, Weights, heads_of, mixed, mlp, norm, project, visible
from tools.convert_ar.train import Settings, Texts, Trainer

CLEAN, MASKS = ("token", "place", "doc"), ("place", "anchor", "group", "doc", "told", "weight")
"""Of a clean position; of a mask: its place, its anchor and the clean position of its own place, both as they lie in
the row, its group, its conversation, and whether it is trained."""
DECAY = 0.85  # a draft counts only if those before it are right
CHUNK = 4096  # masks whose logits are held at once


def packed_drafts(texts: Texts, draws: np.random.Generator, settings: Settings) -> tuple[Tensor, Tensor]:
    """Rows full of conversations, and groups of masks behind random anchors. int64 [3, B, T] and [6, B, M]

    Raises ConversionError if no answer has two tokens: a mask behind the first one has nothing to predict.
    """
    clean = np.zeros((len(CLEAN), settings.batch, settings.width), dtype=np.int64)
    masks = np.zeros((len(MASKS), settings.batch, settings.masks), dtype=np.int64)
    clean[CLEAN.index("doc")] = -1
    masks[MASKS.index("anchor")], masks[MASKS.index("group")], masks[MASKS.index("doc")] = -1, -1, -2
    for row in range(settings.batch):
        anchor_N, end_N = _conversations(texts, draws, clean[:, row])
        groups = settings.masks // settings.drafts
        chosen = np.sort(draws.choice(len(anchor_N), groups, replace=len(anchor_N) < groups))
        ahead, anchor, end = (
            np.tile(np.arange(1, settings.drafts + 1), groups),
            *(np.repeat(one[chosen], settings.drafts) for one in (anchor_N, end_N)),
        )
        _, place, doc = clean[:, row, anchor]
        group = np.repeat(np.arange(groups), settings.drafts)
        told = np.minimum(anchor + ahead, end - 1)
        masks[:, row, : len(anchor)] = place + ahead, anchor, group, doc, told, anchor + ahead + 1 < end
    return torch.from_numpy(clean), torch.from_numpy(masks)


def _conversations(texts: Texts, draws: np.random.Generator, row: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Fills a row [3, T]. Returns where anchors may stand, and where the conversation of each ends. int64 [N]"""
    used, doc, anchors, ends = 0, 0, list[np.ndarray](), list[np.ndarray]()
    for _ in range(1000):
        ids, answer = texts.rows[int(draws.integers(len(texts.rows)))]
        if used + len(ids) > row.shape[1]:
            break
        if len(ids) - answer < 2:
            continue
        row[:, used : used + len(ids)] = ids, np.arange(len(ids)), np.full(len(ids), doc)
        anchors.append(np.arange(used + answer - 1, used + len(ids) - 2))
        used, doc = used + len(ids), doc + 1
        ends.append(np.full(len(anchors[-1]), used))
    if not anchors:
        raise ConversionError("no answer of the text has two tokens, which drafts are trained on: give longer answers")
    return np.concatenate(anchors), np.concatenate(ends)


def clean_layer(
    x: Tensor, w: Weights, cos: Tensor, sin: Tensor, seen: Any, shape: Any, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """A layer of the base, and its keys and values. x [B, T, D] float32"""
    q, k, v = heads_of(norm(x, w["norm1"], shape[3]).to(dtype), w, cos, sin, shape)
    x = x + project(mixed(q, k, v, seen).transpose(1, 2).flatten(2), w, "o_proj")
    return mlp(x, w, shape[3], dtype), k, v


def mask_layer(
    x: Tensor, w: Weights, cos: Tensor, sin: Tensor, behind: tuple[Tensor, Tensor], seen: Any, shape: Any,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """A layer of the masks, which see keys and values of clean positions before their own. x [B, M, D] float32"""
    q, k, v = heads_of(norm(x, w["norm1"], shape[3]).to(dtype), w, cos, sin, shape)
    k, v = torch.cat([behind[0], k], 2), torch.cat([behind[1], v], 2)
    x = x + project(mixed(q, k, v, seen).transpose(1, 2).flatten(2), w, "o_proj")
    return mlp(x, w, shape[3], dtype)


def sights(clean: Tensor, masks: Tensor, width: int) -> tuple[Any, Any]:
    """Whether a clean position sees another, and a mask a key, as flex attention asks it. Clean keys come first."""
    doc, (_, anchor, group, of, _, _) = clean[2], masks
    most = masks.shape[-1] - 1

    def causal(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (doc[row, query] == doc[row, key])

    def drafting(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        before, own = key.clamp(max=width - 1), (key - width).clamp(0, most)
        known = (key < width) & (doc[row, before] == of[row, query]) & (before <= anchor[row, query])
        return known | ((key >= width) & (group[row, own] == group[row, query]) & (own <= query))

    return causal, drafting


class Drafter(Trainer):
    """A run that trains drafts."""

    def __init__(self, base: Base, settings: Settings, out: Any) -> None:
        super().__init__(base, settings, out)
        self.plain = [{name: None if name.endswith(".a") else one for name, one in w.items()} for w in self.layers]
        wrap = (lambda one: torch.compile(one, dynamic=False)) if settings.compile else (lambda one: one)
        self.clean_layer, self.mask_layer, self.agreement = wrap(clean_layer), wrap(mask_layer), wrap(agreement)
        where: Any = {"dtype": torch.long, "device": base.device}
        self.clean = torch.zeros(len(CLEAN), settings.batch, settings.width, **where)
        self.masks = torch.zeros(len(MASKS), settings.batch, settings.masks, **where)
        self.sees = sights(self.clean, self.masks, settings.width)

    def pack(self, texts: Texts, draws: np.random.Generator, step: int) -> Any:
        return packed_drafts(texts, draws, self.settings)

    def filled(self, rows: Any, step: int) -> Any:
        self.clean.copy_(rows[0], non_blocking=True)
        self.masks.copy_(rows[1], non_blocking=True)
        return None

    def seen(self) -> tuple[Any, Any]:
        rows, width, masks = self.settings.batch, self.settings.width, self.settings.masks
        sizes, device = ((width, width), (masks, width + masks)), self.base.device
        if self.settings.flex and device.type == "cuda":
            both = [
                create_block_mask(sees, rows, None, *size, device, _compile=True)
                for sees, size in zip(self.sees, sizes, strict=True)
            ]
            return both[0], both[1]
        row = torch.arange(rows, device=device)[:, None, None]
        dense = [
            sees(row, row, torch.arange(size[0], device=device)[:, None], torch.arange(size[1], device=device))
            for sees, size in zip(self.sees, sizes, strict=True)
        ]
        return visible(dense[0], self.base.dtype), visible(dense[1], self.base.dtype)

    @torch.no_grad()
    def known(self, seen: Any) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Hidden states of clean positions [B, T, D], and each layer's keys and values."""
        base, pairs = self.base, []
        x = F.embedding(self.clean[0], base.table()).float()
        cos, sin = (table[:, None] for table in base.rotation(self.clean[1]))
        for w in self.plain:
            x, k, v = self.clean_layer(x, w, cos, sin, seen, base.shape, base.dtype)
            pairs.append((k, v))
        return norm(x, base.body.norm.weight, base.shape[3]).to(base.dtype), pairs

    def drafted(self, pairs: list[tuple[Tensor, Tensor]], seen: Any) -> Tensor:
        """Hidden states of the masks. [B, M, D]"""
        base = self.base
        x = F.embedding(torch.full_like(self.masks[0], base.chat.mask), base.table()).float().requires_grad_()
        cos, sin = (table[:, None] for table in base.rotation(self.masks[0]))
        for w, behind in zip(self.layers, pairs, strict=True):
            x = self.mask_layer(x, w, cos, sin, behind, seen, base.shape, base.dtype)
        return norm(x, base.body.norm.weight, base.shape[3]).to(base.dtype)

    def loss(self, batch: Any) -> Tensor:
        found, right, weight = self.compared()
        self.right = right.detach()
        return (found * weight).sum() / weight.sum()

    def compared(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of each mask: its loss, whether its draft is the base's own token, its weight. Each [B, M]"""
        clean_sight, mask_sight = self.seen()
        known, pairs = self.known(clean_sight)
        h = self.drafted(pairs, mask_sight)
        told = known.gather(1, self.masks[4][..., None].expand(-1, -1, known.shape[-1]))
        head = self.base.head().to(h.dtype)
        parts = [
            checkpoint(self.agreement, mine, theirs, head, self.settings.soft, use_reentrant=False)
            for mine, theirs in zip(h.flatten(0, 1).split(CHUNK), told.flatten(0, 1).split(CHUNK), strict=True)
        ]
        loss, right = (torch.cat([part[i] for part in parts]).view_as(self.masks[0]) for i in (0, 1))
        depth = self.masks[0] - self.clean[1].gather(1, self.masks[1].clamp(min=0)) - 1
        return loss, right, self.masks[5] * DECAY ** depth.clamp(0, self.settings.drafts)


def agreement(h_CD: Tensor, told_CD: Tensor, head_VD: Tensor, soft: float) -> tuple[Tensor, Tensor]:
    """Of drafts beside the base's own rows: the cross entropy, and whether the most likely tokens are one. Each [C]

    `soft`: the share of the loss that is against the base's whole distribution, not its most likely token.
    """
    mine, theirs = (h_CD @ head_VD.T).float(), (told_CD @ head_VD.T).float()
    logs, best = mine.log_softmax(-1), theirs.argmax(-1)
    hard = -logs.gather(1, best[:, None])[:, 0]
    whole = -(theirs.softmax(-1) * logs).sum(-1)
    return (1 - soft) * hard + soft * whole, mine.argmax(-1) == best


def matches(right: Tensor, masks: Tensor, drafts: int) -> Tensor:
    """How many drafts in a row are right behind each anchor whose masks all have a target. int64 [N]"""
    groups = right.shape[1] // drafts * drafts
    right, trained = (one[:, :groups].reshape(-1, drafts) for one in (right, masks[5] > 0))
    return right[trained.all(1)].long().cumprod(1).sum(1)


def tokens_per_forward(matches_N: Tensor, drafts: int) -> tuple[float, float]:
    """What ISD commits in a forward with so many drafts: as published, and if each round had fresh drafts.

    As published, a round whose draft was refused leaves none to the next, which commits one token.
    """
    right = matches_N.clamp(max=drafts).float()
    refused = (right < drafts).float()
    return float((right + 1 + refused).mean() / (1 + refused.mean())), float(right.mean() + 1)


def held_matches(drafter: Drafter, texts: Texts, batches: int, seed: int = 0) -> Iterator[Tensor]:
    """`matches` in so many batches of texts."""
    draws = np.random.default_rng(seed)
    for _ in range(batches):
        drafter.filled(drafter.pack(texts, draws, 0), 0)
        with torch.no_grad():
            _, right, _ = drafter.compared()
        yield matches(right, drafter.masks, drafter.settings.drafts)
