"""Text that the base model writes itself: a question drawn at temperature 1, and its most likely answer."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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
LEAST_KEPT = 4  # tokens of an answer that is cut where it repeats itself
LEAST = 0.01  # tokens with a smaller share of the most likely one's probability are not drawn


class Sampler:
    """Draws many conversations side by side. A row whose conversation ended begins another, so a card is never idle."""

    def __init__(self, base: Base, rows: int, length: int, temperature: float) -> None:
        self.base, self.rows, self.length, self.answers_at = base, rows, length, temperature
        self.layers: list[Weights] = cast(base.layers(), base.dtype)
        self.head = base.head().to(base.dtype)
        _, kv_heads, size, _ = base.shape
        where: Any = {"device": base.device}
        self.keys = torch.zeros(len(self.layers), 2, rows, length, kv_heads, size, dtype=base.dtype, **where)
        self.tokens = torch.zeros(rows, length, dtype=torch.long, **where)
        self.forced = torch.full((rows, length), -1, **where)
        self.at, self.since = (torch.zeros(rows, dtype=torch.long, **where) for _ in "ab")
        self.ended = torch.zeros(rows, dtype=torch.bool, **where)
        self.row, self.places = torch.arange(rows, **where), torch.arange(length, **where)
        self.after = torch.tensor(base.chat.after, **where)
        self.cos, self.sin = base.rotation(self.places)
        self.replay = self.step

    def capture(self) -> None:
        """Makes a step one launch. On a card."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        self.replay = graph.replay

    def begin(self, rows: Tensor, forced: Tensor) -> None:
        """New conversations in some rows, which begin with the tokens of `forced` [R, L] that are not -1."""
        self.forced[rows], self.tokens[rows, 0] = forced, forced[:, 0]
        self.at[rows], self.since[rows], self.ended[rows] = 0, -1, False

    @torch.no_grad()
    def step(self) -> None:
        """Feeds each row's token and writes the next: a forced one, one that opens an answer, or a drawn one."""
        drawn, full = self.drawn(self.logits()), self.at == self.length - 1
        at = (self.at + 1).clamp(max=self.length - 1)
        given = self.forced.gather(1, at[:, None])[:, 0]
        chosen = torch.where(given < 0, drawn, given)
        since = torch.where((self.since < 0) | full, self.since, self.since + 1)
        opening = (since > 0) & (since < len(self.after))
        chosen = torch.where(opening, self.after[since.clamp(0, len(self.after) - 1)], chosen)
        stopped = (chosen == self.base.chat.stop) & (given < 0) & ~opening
        self.ended |= (stopped & (since > 0)) | (at == self.length - 1)
        self.since.copy_(torch.where(stopped & (since < 0), 0, since))
        self.tokens.scatter_(1, at[:, None], torch.where(full, self.tokens[:, -1], chosen)[:, None])
        self.at.copy_(at)

    def logits(self) -> Tensor:
        heads, kv_heads, size, eps = self.base.shape
        x = F.embedding(self.tokens.gather(1, self.at[:, None]), self.base.table()).float()
        cos, sin = (table[self.at][:, None, None] for table in (self.cos, self.sin))
        unseen = (self.places > self.at[:, None])[:, None, None]
        for i, w in enumerate(self.layers):
            q, k, v = heads_of(norm(x, w["norm1"], eps).to(self.base.dtype), w, cos, sin, self.base.shape)
            for j, one in enumerate((k, v)):
                self.keys[i, j, self.row, self.at] = one[:, :, 0]
            keys, values = (self.keys[i, j].transpose(1, 2) for j in (0, 1))
            scores = (q.reshape(self.rows, kv_heads, heads // kv_heads, size) @ keys.transpose(-1, -2)).float()
            shares = (scores * size**-0.5).masked_fill(unseen, -1e30).softmax(-1).to(q.dtype)
            found = (shares @ values).reshape(self.rows, 1, heads * size)
            x = mlp(x + project(found, w, "o_proj"), w, eps, self.base.dtype)
        return (norm(x[:, 0], self.base.body.norm.weight, eps).to(self.base.dtype) @ self.head.T).float()

    def drawn(self, logits: Tensor) -> Tensor:
        """A token of each row: at temperature 1 in questions, of those with a share above `LEAST` of the best one's."""
        temperature = torch.where(self.since < 0, 1.0, self.answers_at)[:, None]
        logits[:, self.base.chat.mask] = -torch.inf
        rare = logits < logits.amax(-1, keepdim=True) + math.log(LEAST)
        noise = -torch.empty_like(logits).exponential_().clamp_(min=1e-20).log_()
        return (logits + noise * temperature).masked_fill_(rare, -torch.inf).argmax(-1)

    def conversations(self, openings: Callable[[int], Tensor], every: int = 16) -> Iterator[tuple[list[int], int]]:
        """Each conversation up to its stop token, or to the end of the row, and where the answer begins. Endless.

        Questions of fewer than 4 tokens, or that do not end within half of a row, and answers of fewer than 4 tokens
        are left out. `openings`: how so many conversations begin.
        """
        before, opening = len(self.base.chat.before), len(self.after)
        self.begin(self.row, openings(self.rows).to(self.base.device))
        while True:
            for _ in range(every):
                self.replay()
            over = self.ended | ((self.since < 0) & (self.at > self.length // 2))
            rows = over.nonzero()[:, 0]
            found = zip(self.tokens[rows].tolist(), self.at[rows].tolist(), self.since[rows].tolist(), strict=True)
            done = list(found)
            if done:
                self.begin(rows, openings(len(done)).to(self.base.device))
            for row, at, since in done:
                answer = at - since + opening
                if since < opening or answer - opening - before < 4:
                    continue
                text = row[: at + 1]
                if self.base.chat.stop in text[answer:]:
                    text = text[: text.index(self.base.chat.stop, answer) + 1]
                if len(text) - answer >= 4:
                    yield text, answer


def openings(base: Base, rows: int, length: int, draws: random.Random, *, plain: bool) -> Tensor:
    """The forced beginnings of rows, -1 behind them. `plain`: none says how the question begins."""
    forced = torch.full((rows, length), -1)
    for row in range(rows):
        ids = list(base.chat.before)
        if not plain and draws.random() < 0.5:
            ids += base.tokenizer(draws.choice(STARTS), add_special_tokens=False)["input_ids"]
        ids = ids[: length // 2]  # a question ends within half of a row
        forced[row, : len(ids)] = torch.tensor(ids)
    return forced


def repeats(tokens: list[int], n: int = 4) -> float:
    """The share of n-grams that occurred before."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def before_repeats(tokens: list[int], most: float, n: int = 4) -> list[int]:
    """The longest beginning that ends with a new n-gram and whose share of repeated ones is at most so large."""
    seen, again, end = set[tuple[int, ...]](), 0, min(len(tokens), n - 1)
    for i in range(len(tokens) - n + 1):
        gram = tuple(tokens[i : i + n])
        again += gram in seen
        if gram not in seen and again <= most * (i + 1):
            end = i + n
        seen.add(gram)
    return tokens[:end]


def lines_of(part: Path) -> int:
    """How many lines a file has that was broken off; a line without an end is taken away."""
    if not part.is_file():
        return 0
    text = part.read_bytes()
    with part.open("r+b") as file:
        file.truncate(text.rfind(b"\n") + 1)
    return text.count(b"\n")


def write_text(
    sampler: Sampler, path: Path, *, conversations_wanted: int, seconds: float, seed: int, most_repeats: float = 1.0,
    whole: bool = False,
) -> int:  # fmt: skip
    """Draws until there are as many conversations as wanted, or the time is up. Returns how many were kept.

    A line of the file has `tokens` and `answer`, the index of the answer's first token. `whole`: only conversations
    that end, whose questions begin as the model likes. An answer that repeats itself is cut before it does. What was
    drawn before a stop stays.
    """
    part = path.with_suffix(".part")
    kept = lines_of(part)
    torch.manual_seed(seed + kept)
    base, draws, begun, drawn = sampler.base, random.Random(seed + kept), time.monotonic(), 0
    if base.device.type == "cuda":
        sampler.capture()
    bar = tqdm(total=conversations_wanted, initial=kept, desc="drawing", unit="conversation", mininterval=5)
    with part.open("a") as file:
        for tokens, answer in sampler.conversations(lambda n: openings(base, n, sampler.length, draws, plain=whole)):
            drawn += len(tokens)
            if most_repeats < 1 and repeats(tokens[answer:]) > most_repeats:
                tokens = tokens[:answer] + before_repeats(tokens[answer:], most_repeats)
            if len(tokens) - answer >= LEAST_KEPT and (tokens[-1] == base.chat.stop or not whole):
                file.write(json.dumps({"tokens": tokens, "answer": answer}) + "\n")
                kept += 1
                bar.update()
            if kept >= conversations_wanted or time.monotonic() - begun > seconds:
                break
    bar.close()
    part.replace(path)
    print(f"{path}: kept {kept}, {drawn / (time.monotonic() - begun):,.0f} tokens of conversations a second")
    return kept
