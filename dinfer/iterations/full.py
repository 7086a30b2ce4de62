"""Whole canvas at once: any position may be decoded at any step (MaskGIT, arXiv:2202.04200; LLaDA without blocks)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dinfer.protocols import BlockAfter, Iteration, Lanes, Moved
from dinfer.registry import ITERATIONS


@ITERATIONS.register("full")
@dataclass(frozen=True, kw_only=True)
class Full(Iteration):
    """One block that spans the whole generation. It ends when nothing is masked; a stop token does not end it.

    For models and decoders that choose their own order. Without blocks, LLaDA likes to fill the tail with EOS first.
    """

    paper = "MaskGIT, arXiv:2202.04200"

    def block_length(self, new_tokens: int) -> int:
        return new_tokens

    def first_region(self, prompt: int, length: int) -> tuple[int, int]:
        return prompt, length

    def advance(self, lanes: Lanes, after: BlockAfter) -> Moved:
        done_B = after.finished_BK.all(-1)
        lanes.block_B = lanes.block_B + done_B
        return Moved(torch.zeros_like(done_B), done_B)
