"""An endless, seeded stream of training rows for `tools/train_tiny.py`, made by worker processes.

A row is `prompt, solution, EOS, EOS, ...` up to one of a few fixed row lengths. So a batch needs neither padding nor an
attention mask, although its prompts differ in length, and the model sees responses of every length.

Shape suffixes: B rows, T positions.
"""

from __future__ import annotations

import itertools
import multiprocessing
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from dinfer.demo.problems import stream

SHORTEST_RESPONSE = 48
# The families that take longest to learn come twice as often.
FAMILY_TURNS = ("purchases", "sharing", "travel", "ages", "chains", "walks") * 2 + ("turns", "lists")
PROBLEMS_PER_SHARD = 16_384


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of equal length."""

    tokens_BT: NDArray[np.int16]
    prompt_B: NDArray[np.int16]  # lengths of the prompts


class WordEncoder:
    """Encodes the generator's texts word by word from a table, several times faster than the tokenizer."""

    # The pieces into which the tokenizer's pre-tokenizers cut the generator's texts.
    _WORD = re.compile(r"\d| ?[A-Za-z]+| ?[^\sA-Za-z\d]+|\s")

    def __init__(self, tokenizer_file: str) -> None:
        self.tokenizer: Tokenizer = Tokenizer.from_file(tokenizer_file)
        self.known: dict[str, list[int]] = {}

    def __call__(self, text: str) -> list[int]:
        ids: list[int] = []
        for word in self._WORD.findall(text):
            found = self.known.get(word)
            if found is None:
                found = self.known[word] = self.tokenizer.encode(word).ids
            ids += found
        return ids

    def check(self, text: str) -> None:
        """Raises ValueError if the table and the tokenizer disagree."""
        if self(text) != self.tokenizer.encode(text).ids:
            raise ValueError(f"the words of {text!r} do not encode as the whole; mend WordEncoder")


_encoder: WordEncoder | None = None  # of this worker process


def _start_worker(tokenizer_file: str) -> None:
    global _encoder
    _encoder = WordEncoder(tokenizer_file)


def _shard(seed: int, lengths: Mapping[int, int]) -> dict[int, Batch]:
    """The rows of a shard by row length, without those that fit in no row."""
    if _encoder is None:
        raise RuntimeError("the worker has no tokenizer; start it with _start_worker")
    special = _encoder.tokenizer.token_to_id
    user, assistant, eos = special("<|user|>"), special("<|assistant|>"), special("<|endoftext|>")
    rng = Random(seed)
    rows: dict[int, list[tuple[list[int], list[int]]]] = {length: [] for length in lengths}
    source = stream("train", seed, FAMILY_TURNS)
    for index, problem in zip(range(PROBLEMS_PER_SHARD), source, strict=False):
        if index < 20:
            _encoder.check(problem.question)
            _encoder.check(problem.solution)
        prompt, solution = [user, *_encoder(problem.question), assistant], _encoder(problem.solution)
        needed = len(prompt) + max(len(solution) + 1, SHORTEST_RESPONSE)
        fitting = [length for length in lengths if length >= needed]
        if fitting:
            rows[rng.choices(fitting, [lengths[length] for length in fitting])[0]].append((prompt, solution))
    shard = {}
    for length, pairs in rows.items():
        tokens_BT = np.full((len(pairs), length), eos, np.int16)
        for row_T, (prompt, solution) in zip(tokens_BT, pairs, strict=True):
            row_T[: len(prompt) + len(solution)] = prompt + solution
        shard[length] = Batch(tokens_BT, np.array([len(prompt) for prompt, _ in pairs], np.int16))
    return shard


@dataclass(frozen=True, slots=True)
class Shard:
    """Whole batches by row length, and the order to train on them: (row length, first row)."""

    parts: dict[int, Batch]
    order: list[tuple[int, int]]


def shards(tokenizer_file: Path, lengths: Mapping[int, int], seed: int, size: int, workers: int) -> Iterator[Shard]:
    """Batches of `size` rows, many at a time. They depend on seed and size, but not on the number of workers.

    `lengths`: row lengths, and the weight with which a row that fits takes each.
    """
    waiting: dict[int, Batch] = {}
    context = multiprocessing.get_context("spawn")  # a forked child would inherit the GPU's context
    with context.Pool(workers, _start_worker, (str(tokenizer_file),)) as pool:
        seeds = (seed * 1_000_003 + index for index in itertools.count())
        pending = [pool.apply_async(_shard, (next(seeds), lengths)) for _ in range(2 * workers)]
        for count in itertools.count():
            fresh = pending.pop(0).get()
            pending.append(pool.apply_async(_shard, (next(seeds), lengths)))
            parts, order = {}, []
            for length, batch in fresh.items():
                if length in waiting:
                    rows = np.concatenate((waiting[length].tokens_BT, batch.tokens_BT))
                    batch = Batch(rows, np.concatenate((waiting[length].prompt_B, batch.prompt_B)))
                full = len(batch.prompt_B) // size * size
                parts[length] = Batch(batch.tokens_BT[:full], batch.prompt_B[:full])
                waiting[length] = Batch(batch.tokens_BT[full:], batch.prompt_B[full:])
                order += [(length, at) for at in range(0, full, size)]
            # Shuffled, or it would train on one row length at a time.
            Random(seed * 1_000_003 + count).shuffle(order)
            yield Shard(parts, order)
