"""Block diffusion: one block after the other of a block-causal model (arXiv:2503.09573; LLaDA2.0, SDAR)."""

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from dinfer.iterations._sweep import AlignedSweep
from dinfer.kernels.advance import Grid
from dinfer.recipe.registry import ITERATIONS, option
from dinfer.step.contracts import ModelSpec


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
    shortest: ClassVar[int] = 0

    block: int = option(0, "block length, in tokens; 0: that of the model's attention blocks")
    lead: int = option(0, "decode the first position of every so many by itself, before the others; 0: of none")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lead < 0 or self.lead % (self.block or self.lead or 1):
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
