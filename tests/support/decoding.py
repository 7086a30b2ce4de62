"""Decoders over scripted logits: every step of one block, and a view to call a decoder with by hand."""

from typing import Any

import torch
from support.matrix import engine_for
from support.models import MASK, VOCAB
from support.scripted import Scripted
from torch import Tensor

from dinfer.core.engine.request import Request, Update, Wants
from dinfer.core.recipe.recipe import compose
from dinfer.core.step.cursors import BlockView

PROMPT = 1


def script(steps: int, length: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    """Logits [steps, PROMPT + length, V] in which the mask token never wins."""
    generator = torch.Generator().manual_seed(seed)
    table = scale * torch.randn(steps, PROMPT + length, VOCAB, generator=generator, dtype=torch.float64)
    table[..., MASK] = -20.0
    return table


def decode(
    decoder: dict[str, Any], table: Tensor, *options: dict[str, Any], **sampling: Any
) -> list[list[tuple[Update, set[int]]]]:
    """For each request: every step of one block over the scripted logits, and which positions are decoded after it."""
    length = table.shape[1] - PROMPT
    iteration = {"name": "blockwise", "block": length, "stop": "off"}
    offers = {"name": "standard", **sampling}
    recipe = compose(Scripted(table), iteration=iteration, decoder=decoder, cache="none", sampling=offers)
    requests = [Request.behind([1] * PROMPT, length, recipe.resolve(given)) for given in options]
    found: list[list[tuple[Update, set[int]]]] = [[] for _ in requests]
    for update in engine_for(recipe, rows=len(requests)).run(requests, Wants(snapshots=True)):
        masked = update.masked or []
        found[update.index].append((update, {i for i in range(length) if not masked[PROMPT + i]}))
    return found


def decoded(decoder: dict[str, Any], table: Tensor, **sampling: Any) -> list[set[int]]:
    return [positions for _, positions in decode(decoder, table, {}, **sampling)[0]]


def view_of(masked_RL: Tensor, *, seeds: Tensor, **options: float) -> BlockView:
    rows, length = masked_RL.shape
    zero_R = torch.zeros(rows, dtype=torch.int64)
    return BlockView(
        pos_RL=torch.arange(length).expand(rows, -1), tokens_RL=torch.full_like(masked_RL, MASK, dtype=torch.int64),
        masked_RL=masked_RL, given_RL=torch.zeros_like(masked_RL), step_R=zero_R, quota_R=masked_RL.sum(-1),
        floor_R=None, must_progress_R=zero_R.bool(), forward_R=zero_R, seed_R=seeds,
        prompt_R=zero_R, length_R=torch.full((rows,), length),
        options={
            k: torch.full((rows, 1), v, dtype=torch.int64 if isinstance(v, int) else torch.float64)
            for k, v in options.items()
        },
    )  # fmt: skip
