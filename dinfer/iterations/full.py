"""Whole canvas at once: any position may be decoded at any step (MaskGIT, arXiv:2202.04200; LLaDA without blocks)."""

from dataclasses import dataclass

from dinfer.iterations._sweep import sweep_on
from dinfer.kernels.advance import Grid
from dinfer.recipe.registry import ITERATIONS
from dinfer.step.contracts import BlockAfter, Iteration, Moved, RowCursors, State


@ITERATIONS.register("full")
@dataclass(frozen=True, kw_only=True)
class Full(Iteration):
    """One block that spans the whole generation. It ends when nothing is masked; a stop token does not end it.

    This is for models and decoders that choose their own order. Without blocks, LLaDA tends to fill the tail with EOS
    first.
    """

    paper = "MaskGIT, arXiv:2202.04200"

    def first_region(self, prompt: int, length: int) -> tuple[int, int]:
        return prompt, length

    def advance(self, lanes: RowCursors, after: BlockAfter, state: State) -> Moved:
        return sweep_on(lanes, after, Grid(1))  # behind its block, nothing is to be decoded
