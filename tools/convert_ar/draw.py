"""Text that the base model writes itself: a question drawn at temperature 1, and its most likely answer."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from tools.convert_ar.base import Base, Weights, cast, heads_of, mlp, norm, project

STARTS = (
    "What is", "What are", "Why do", "How does", "How do I", "How can I", "Explain", "Describe", "Write a", "Write an",
    "List", "Give me", "Tell me about", "Summarize", "Rewrite", "Translate", "Can you", "Could you", "Please", "Who",
    "When", "Where", "Which", "Is it", "Do", "I want to", "I need", "Help me", "Name", "Compare", "Define", "Create",
    "Suggest", "Write a Python function", "Write a short story about", "Write a poem about", "Write a letter",
    "What's the difference between", "In one sentence,", "Hi", "Hello", "Fix", "Classify", "Answer", "Make a plan for",
)  # fmt: skip
"""How every second question begins, so that they are of many kinds."""
TOP = 64  # tokens that a draw is from


class Sampler:
    """Draws many rows side by side. With a thousand rows a card is never idle."""

    def __init__(self, base: Base, rows: int, length: int, parts: int = 4) -> None:
        self.base, self.rows, self.length = base, rows, length
        self.layers: list[Weights] = cast(base.layers(), base.dtype)
        self.head = base.head().to(base.dtype)
        _, kv_heads, size, _ = base.shape
        where = {"device": base.device}
        self.keys = torch.zeros(len(self.layers), 2, rows, kv_heads, length, size, dtype=base.dtype, **where)
        self.token, self.next = (torch.zeros(rows, dtype=torch.long, **where) for _ in "ab")
        self.at = torch.zeros((), dtype=torch.long, **where)
        self.temperature = torch.ones(rows, 1, **where)
        self.places = torch.arange(length, **where)
        self.cos, self.sin = base.rotation(self.places)
        self.widths = [-(-length * (part + 1) // parts) for part in range(parts)]

    @torch.no_grad()
    def step(self, width: int) -> None:
        """Feeds `token` at `at`, whose row sees `width` places at most, and draws `next`."""
        heads, kv_heads, size, eps = self.base.shape
        x = F.embedding(self.token, self.base.table()).float()[:, None]
        cos, sin = (table.index_select(0, self.at[None]) for table in (self.cos, self.sin))
        seen = (self.places[:width] <= self.at)[None, None, None]
        for i, w in enumerate(self.layers):
            q, k, v = heads_of(norm(x, w["norm1"], eps).to(self.base.dtype), w, cos, sin, self.base.shape)
            for j, one in enumerate((k, v)):
                self.keys[i, j].index_copy_(2, self.at[None], one)
            keys, values = self.keys[i, 0, :, :, :width], self.keys[i, 1, :, :, :width]
            scores = (q.reshape(self.rows, kv_heads, heads // kv_heads, size) @ keys.transpose(-1, -2)).float()
            shares = (scores * size**-0.5).masked_fill(~seen, -1e30).softmax(-1).to(q.dtype)
            mixed = (shares @ values).reshape(self.rows, 1, heads * size)
            x = mlp(x + project(mixed, w, "o_proj"), w, eps, self.base.dtype)
        h = norm(x[:, 0], self.base.body.norm.weight, eps).to(self.base.dtype)
        best, ids = (h @ self.head.T).float().topk(min(TOP, len(self.head)), -1)
        share = (best / self.temperature.clamp(min=1e-3)).softmax(-1)
        drawn = (share / torch.empty_like(share).exponential_()).argmax(-1, keepdim=True)
        self.next.copy_(ids.gather(1, torch.where(self.temperature > 1e-3, drawn, 0))[:, 0])
        self.at.add_(1)

    @torch.no_grad()
    def draw(self, forced: Tensor, open_: int, temperatures: tuple[float, float]) -> Tensor:
        """Rows of `length` tokens: those of `forced` [B, L] where it is not -1, others drawn.

        The temperature is the first until a row's first `open_` token that was drawn, and then the second.
        """
        self.at.zero_()
        self.temperature.fill_(temperatures[0])
        tokens = forced.clone()
        self.token.copy_(tokens[:, 0])
        answering = torch.zeros(self.rows, 1, dtype=torch.bool, device=self.base.device)
        for at in range(1, self.length):
            self.step(next(width for width in self.widths if width >= at))
            given = tokens[:, at]
            chosen = torch.where(given < 0, self.next, given)
            answering |= ((given < 0) & (chosen == open_))[:, None]
            self.temperature.copy_(torch.where(answering, temperatures[1], temperatures[0]))
            tokens[:, at] = chosen
            self.token.copy_(chosen)
        return tokens


def openings(base: Base, rows: int, length: int, seed: int, *, plain: bool) -> Tensor:
    """The forced beginnings of rows, -1 behind them. `plain`: none says how the question begins."""
    draws = random.Random(seed)
    forced = torch.full((rows, length), -1)
    for row in range(rows):
        ids = list(base.chat.before)
        if not plain and draws.random() < 0.5:
            ids += base.tokenizer(draws.choice(STARTS), add_special_tokens=False)["input_ids"]
        forced[row, : len(ids)] = torch.tensor(ids)
    return forced.to(base.device)


def conversations(base: Base, rows: Tensor, *, finished: bool = True) -> Iterator[tuple[list[int], int]]:
    """Each row's question and answer up to the stop token, and where the answer begins.

    Rows are left out whose question does not end, is shorter than 4 tokens or has no opening of an answer behind it;
    and with `finished` those whose answer has no end, or fewer than 4 tokens.
    """
    start, after, stop = len(base.chat.before), list(base.chat.after), base.chat.stop
    for row in rows.tolist():
        if stop not in row[start:]:
            continue
        end = row.index(stop, start)
        answer = end + len(after)
        if end - start < 4 or row[end:answer] != after or base.chat.mask in row:
            continue
        last = row.index(stop, answer) if stop in row[answer:] else None
        if finished and (last is None or last - answer < 4):
            continue
        yield row[: len(row) if last is None else last + 1], answer


def repeats(tokens: list[int], n: int = 4) -> float:
    """The share of n-grams that occurred before."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def write_text(
    base: Base, path: Path, *, rows: int, length: int, conversations_wanted: int, seconds: float, seed: int,
    temperature: float, most_repeats: float = 1.0, plain: bool = False,
) -> int:  # fmt: skip
    """Draws until there are as many conversations as wanted, or the time is up. Returns how many were kept.

    A line of the file has `tokens` and `answer`, the index of the answer's first token.
    """
    torch.manual_seed(seed)
    sampler, begun, kept, drawn = Sampler(base, rows, length), time.monotonic(), 0, 0
    bar = tqdm(total=conversations_wanted, desc="drawing", unit="conversation", mininterval=5)
    part = path.with_suffix(".part")
    with part.open("w") as file:
        while kept < conversations_wanted and (not drawn or time.monotonic() - begun < seconds):
            forced = openings(base, rows, length, seed * 1_000_003 + drawn, plain=plain)
            tokens = sampler.draw(forced, base.chat.stop, (1.0, temperature))
            drawn += rows
            for conversation, answer in conversations(base, tokens):
                if repeats(conversation[answer:]) > most_repeats or kept == conversations_wanted:
                    continue
                file.write(json.dumps({"tokens": conversation, "answer": answer}) + "\n")
                kept += 1
                bar.update()
    bar.close()
    part.replace(path)
    print(f"{path}: kept {kept} of {drawn} rows, {drawn * length / (time.monotonic() - begun):,.0f} tokens/s")
    return kept
