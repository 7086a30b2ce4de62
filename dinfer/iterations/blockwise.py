"""Semi-autoregressive sweep: one block after the other, masks fed as they are (LLaDA, arXiv:2502.09992)."""

from dataclasses import dataclass

from dinfer.iterations._sweep import BlockSweep
from dinfer.recipe.registry import ITERATIONS


@ITERATIONS.register("blockwise")
@dataclass(frozen=True, kw_only=True)
class Blockwise(BlockSweep):
    """Finishes a block before it begins the next; every masked position is fed the mask token.

    The last block is shorter if the canvas ends within it. A row stops after the block with a generated stop token;
    stop tokens of the prompt do not count.
    """

    paper = "LLaDA, arXiv:2502.09992"
