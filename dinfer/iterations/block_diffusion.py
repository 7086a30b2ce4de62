"""Block diffusion: one block after the other of a block-causal model (arXiv:2503.09573; LLaDA2.0, SDAR)."""

from __future__ import annotations

from dataclasses import dataclass

from dinfer.protocols import ModelSpec
from dinfer.registry import ITERATIONS
from dinfer.sweeps import AlignedSweep


@ITERATIONS.register("block_diffusion")
@dataclass(frozen=True, kw_only=True)
class BlockDiffusion(AlignedSweep):
    """Blocks from multiples of the block length on, each decoded in sight of itself and of all before it.

    For models trained so; with cache=block exact and cheap. The first block may overlap the prompt, whose tokens in
    it stay as they are; the last one is short where max_new_tokens ends. A row stops after the block in which a
    generated stop token stands, which changes nothing before that token.
    """

    paper = "Block Diffusion, arXiv:2503.09573"

    def unfit(self, spec: ModelSpec) -> str | None:
        if spec.causal_block is not None:
            return None
        return (
            "iteration=block_diffusion decodes a block as if nothing came behind it, but this model is bidirectional: "
            "it sees the masks there, and was trained to. Use iteration=blockwise, with align=true for the same blocks."
            if not spec.encoder
            else "iteration=block_diffusion lets its first block overlap the prompt, which this model's encoder must "
            "read as a whole. Use iteration=self_conditioned or blockwise."
        )
