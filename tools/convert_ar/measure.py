"""What a converted model's answers are worth: tokens a forward, and what the base says of the text."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from tools.convert_ar.base import Base, Weights, cast, causal_scores, hidden, masked_layer, visible
from tools.convert_ar.draw import repeats


@dataclass(frozen=True)
class Score:
    """Of all answers together."""

    answers: int
    tokens: int
    nll: float  # by the base, nats a token
    repeats: float  # share of 4-grams that occurred before, mean of the answers
    forwards: int
    tokens_per_forward: float


def unadapted(layers: list[Weights]) -> list[Weights]:
    return [{name: None if name.endswith(".a") else one for name, one in w.items()} for w in layers]


@torch.no_grad()
def answers(
    base: Base, layers: list[Weights], prompts: list[list[int]], *, block: int, threshold: float, new: int = 128
) -> tuple[list[list[int]], list[int]]:
    """Greedy answers block by block, and the forwards of each.

    A forward fills all masks of a row's block whose token has at least the probability `threshold`, and the surest
    mask. An answer ends with the block that holds the stop token. Everything is computed anew in each forward.
    """
    chat, device, rows = base.chat, base.device, len(prompts)
    length = -(-(max(map(len, prompts)) + new) // block) * block
    places = torch.arange(length, device=device)
    blocks = places // block
    seen = visible(blocks[:, None] >= blocks[None], base.dtype)
    starts = torch.tensor([len(prompt) for prompt in prompts], device=device)
    x = torch.full((rows, length), chat.mask, device=device)
    for i, prompt in enumerate(prompts):
        x[i, : len(prompt)] = torch.tensor(prompt, device=device)
    last, now = starts + new, starts // block
    live, forwards = torch.ones(rows, dtype=torch.bool, device=device), torch.zeros(rows, dtype=torch.long)
    while live.any():
        inside = (blocks == now[:, None]) & (places < last[:, None]) & (places >= starts[:, None])
        masked = inside & (x == chat.mask) & live[:, None]
        h = hidden(base, layers, x, places, seen, masked_layer)[masked]
        logits = (h @ base.head().to(h.dtype).T).float()
        logits[:, chat.mask] = -torch.inf
        sure, picks = torch.zeros(x.shape, device=device), x.clone()
        best, ids = logits.softmax(-1).max(-1)
        sure[masked], picks[masked] = best, ids
        taken = masked & (sure >= threshold)
        taken |= masked & (places == sure.masked_fill(~masked, -1).argmax(1)[:, None])
        x = torch.where(taken, picks, x)
        forwards += live.cpu()
        done = live & ~(inside & (x == chat.mask)).any(1)
        ended = (inside & (x == chat.stop)).any(1) | ((now + 1) * block >= last)
        live, now = live & ~(done & ended), torch.where(done, now + 1, now)
    found = [row[start:end] for row, start, end in zip(x.tolist(), starts.tolist(), last.tolist(), strict=True)]
    cut = [one[: one.index(chat.stop) + 1] if chat.stop in one else one for one in found]
    return cut, forwards.tolist()


@torch.no_grad()
def judged(base: Base, prompts: list[list[int]], found: list[list[int]], forwards: list[int]) -> dict[str, Any]:
    """The score of answers, over all processes. NLL is by the base, without the adapter."""
    layers = unadapted(cast(base.layers(), base.dtype))
    sums = torch.zeros(5, dtype=torch.float64)
    for i in range(0, len(prompts), 16):
        part = [(prompt, answer) for prompt, answer in zip(prompts[i : i + 16], found[i : i + 16], strict=True)]
        scores = causal_scores(base, layers, [prompt + answer for prompt, answer in part], base.chat.stop)
        for (prompt, answer), score in zip(part, scores, strict=True):
            sums += torch.tensor([1, len(answer), -float(score[len(prompt) - 1 :].sum()), repeats(answer), 0])
    sums[4] = sum(forwards)
    if dist.is_initialized():
        sums = sums.to(base.device)
        dist.all_reduce(sums)
    rows, tokens, nll, again, calls = sums.tolist()
    score = Score(int(rows), int(tokens), nll / tokens, again / rows, int(calls), tokens / max(calls, 1))
    return asdict(score)


def share(rows: list[Any]) -> list[Any]:
    """Those of this process."""
    return rows[dist.get_rank() :: dist.get_world_size()] if dist.is_initialized() else rows


def grid(base: Base, conversations: list[tuple[list[int], int]], blocks: tuple[int, ...], new: int) -> list[Any]:
    """Scores by block length and threshold, and of the conversations as they are. Threshold 2: one token a forward."""
    mine = share(conversations)
    prompts = [tokens[:start] for tokens, start in mine]
    layers = cast(base.layers(), base.dtype)
    given = [tokens[start:][:new] for tokens, start in mine]
    table: list[Any] = [{"what": "text of the base", **judged(base, prompts, given, [len(one) for one in given])}]
    told = not dist.is_initialized() or dist.get_rank() == 0
    if told:
        print(table[0], flush=True)
    for block in blocks:
        for threshold in (2.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4):
            found, forwards = answers(base, layers, prompts, block=block, threshold=threshold, new=new)
            row = {"block": block, "threshold": threshold, **judged(base, prompts, found, forwards)}
            row["samples"] = [base.tokenizer.decode(one) for one in found[:3]]
            table.append(row)
            if told:
                print({name: value for name, value in row.items() if name != "samples"}, flush=True)
    return table


def sample(base: Base, prompt: list[int], block: int) -> str:
    """One answer at threshold 0.9."""
    found, _ = answers(base, cast(base.layers(), base.dtype), [prompt], block=block, threshold=0.9, new=64)
    return str(base.tokenizer.decode(found[0]))
