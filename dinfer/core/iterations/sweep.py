"""Iterations that go through the canvas from left to right, and what others share with them.

* blockwise: One block after the other, masks fed as they are (LLaDA, arXiv:2502.09992).
* block_diffusion: One block after the other of a block-causal model (arXiv:2503.09573; LLaDA2.0, SDAR).
* full: Whole canvas at once: any position may be decoded at any step (MaskGIT, arXiv:2202.04200; LLaDA without blocks).
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

import torch

from dinfer.core.kernels.dispatch import triton, use_triton
from dinfer.core.refusals import Refusal, Trait
from dinfer.core.registry import ITERATIONS, option
from dinfer.core.step.contracts import BlockAfter, Iteration, ModelSpec, Moved, RowCursors, State
from dinfer.core.step.mixins import Aligned, Edits
from dinfer.core.terms.plan import Position


@dataclass(frozen=True, slots=True)
class Grid:
    """Where blocks begin and end."""

    block: int  # length of a block
    align: bool = True  # blocks begin at multiples of `block`; False: at the next position to be decoded
    lead: int = 0  # a multiple of `lead` is a block of one position, other blocks end at multiples of `block`; 0: off

    def block_at(self, pos: Position) -> tuple[Position, Position]:
        """The block `[start, end)` in which `pos` is the next position to be decoded."""
        first = pos // self.block * self.block
        if self.lead:
            more = first + self.block - pos - 1
            return pos, pos + 1 + (pos % self.lead != 0) * more
        start = first if self.align else pos
        return start, start + self.block


@dataclass(frozen=True, kw_only=True)
class AlignedSweep(Iteration, Aligned):
    """One block after the other, each beginning at a multiple of the block length. Blocks without masks are skipped.

    `stop` says what a generated stop token does. "block" finishes its block. "cut" ends the row as soon as all before
    the first one is decoded. Decoded tokens do not change, so the answer is the same in fewer forwards; decoders that
    edit refuse it. Positions that are left undecoded hold EOS.
    """

    refusals: ClassVar[tuple[Refusal, ...]] = (
        Refusal(
            "iteration.stop=cut ends a row while {decoder} may still edit what it decoded.",
            iteration=Trait(
                lambda iteration: iteration.stop == "cut", "`iteration.stop=cut`", instead="iteration.stop=block"
            ),
            decoder=Edits,
        ),
    )

    block: int = option(32, "block length, in tokens", least=1)
    stop: Literal["block", "cut", "off"] = option(
        "block", "at a stop token: finish its 'block'; 'cut' once all before it is decoded; 'off': decode all the same"
    )

    @property
    def grid(self) -> Grid:
        """Where blocks begin and end."""
        return Grid(self.block)

    def first_region(self, prompt: int, length: int) -> tuple[int, int]:
        start, end = self.grid.block_at(prompt)
        return start, min(end, length)

    @property
    def alignment(self) -> int:
        return self.block if self.grid.align and not self.grid.lead else 1

    def advance(self, lanes: RowCursors, after: BlockAfter, state: State) -> Moved:
        return sweep_on(lanes, after, self.grid, self.stop)


def sweep_on(lanes: RowCursors, after: BlockAfter, grid: Grid, stop: str = "off") -> Moved:
    """Moves rows whose blocks are all finished to the next block.

    A row enters the block of `next_B`, or is done if that is at its length. A stop token that is not given also ends
    the row. With `stop` "block" the row is done once its blocks are finished, with "cut" once all positions before that
    token are decoded. "off" ignores the token.
    """
    if use_triton(after.next_B, "advance"):
        return triton("advance").sweep_on(lanes, after, grid, stop)
    leaves_B, next_B = after.finished_BK.all(-1), after.next_B
    done_B = leaves_B & (next_B >= lanes.length_B)
    if stop != "off":
        ends_BX = after.stop_BKL.flatten(1) & ~after.given_BKL.flatten(1)
        open_BX = after.open_BKL.flatten(1)
        cut_B = (ends_BX & (open_BX.cumsum(-1) == 0)).any(-1) if stop == "cut" else ends_BX.any(-1) & leaves_B
        done_B = done_B | cut_B
    enters_B = leaves_B & ~done_B
    start_B, end_B = grid.block_at(next_B)
    start_B = torch.where(enters_B, start_B, lanes.start_B)
    end_B = torch.where(enters_B, torch.minimum(end_B, lanes.length_B), lanes.end_B)
    return Moved(start_B, end_B, lanes.block_B + leaves_B, enters_B[:, None], done_B)


@dataclass(frozen=True, kw_only=True)
class BlockSweep(AlignedSweep):
    """The same from the end of the prompt on, or, where gaps are filled in, from the beginning of each."""

    align: bool = option(
        False, "begin blocks at multiples of the block length, so that the first one may overlap the prompt"
    )

    @property
    def grid(self) -> Grid:
        return Grid(self.block, align=self.align)


@ITERATIONS.register("blockwise")
@dataclass(frozen=True, kw_only=True)
class Blockwise(BlockSweep):
    """Finishes a block before it begins the next; every masked position is fed the mask token.

    The last block is shorter if the canvas ends within it. A row stops after the block with a generated stop token;
    stop tokens of the prompt do not count.
    """

    paper = "LLaDA, arXiv:2502.09992"


@ITERATIONS.register("block_diffusion")
@dataclass(frozen=True, kw_only=True)
class BlockDiffusion(AlignedSweep):
    """Blocks that begin at multiples of the block length. Each sees itself and everything before it.

    This is for models trained so; with cache=block it is exact and cheap. The first block may overlap the prompt, whose
    tokens stay as they are. The last block is shorter if max_new_tokens ends within it. A row stops after the block
    with a generated stop token.

    A block may be a part of the model's attention block. Then the whole attention block is computed, and the part is
    decoded. With `lead`, the first of every `lead` positions is decoded by itself, before the others. If logits predict
    the next token, the last position of the block before gives these logits, so that step computes nothing else.
    Fast-dLLM v2 (arXiv:2509.26328) is block=8 and lead=32; with decoder=threshold it is SGLang's HierarchyBlock.
    """

    paper = "Block Diffusion, arXiv:2503.09573"

    block: int = option(0, "block length, in tokens; 0: that of the model's attention blocks")
    lead: int = option(0, "decode the first position of every so many by itself, before the others; 0: of none")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lead % (self.block or self.lead or 1):
            raise ValueError(f"iteration.lead={self.lead} must be 0 or a multiple of iteration.block={self.block}")

    def fitted(self, spec: ModelSpec) -> Self:
        return self if self.block else replace(self, block=spec.causal_block or 1)

    def incompatibility(self, spec: ModelSpec) -> str | None:
        if spec.encoder:
            return (
                "iteration=block_diffusion lets its first block overlap the prompt, which this model's encoder must "
                "read as a whole."
            )
        if spec.causal_block is None:
            return (
                "iteration=block_diffusion decodes a block as if nothing came behind it, but this model is "
                "bidirectional: it sees the masks there, and was trained to. Use iteration=blockwise, with align=true "
                "for the same blocks."
            )
        if self.lead and not spec.shift:
            return (
                f"iteration.lead={self.lead} takes the first token of a block from the block before it, but this "
                "model's logits are not shifted: they predict the token at their own position. Use iteration.lead=0."
            )
        if self.lead % spec.causal_block:
            return (
                f"iteration.lead={self.lead} must be a multiple of the model's attention block. Use "
                f"iteration.lead={spec.causal_block}."
            )
        return None

    @property
    def grid(self) -> Grid:
        return Grid(self.block, lead=self.lead)


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
