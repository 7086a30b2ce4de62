"""Regions behind a token that a causal pass gave, for models with two modes (Nemotron-Labs-Diffusion)."""

from dataclasses import dataclass
from typing import Literal

import torch

from dinfer.core.registry import ITERATIONS, option
from dinfer.core.step.contracts import BlockAfter, Iteration, ModelSpec, Moved, RowCursors, State
from dinfer.core.step.mixins import Pads
from dinfer.families.abilities.two_modes import Seeds
from dinfer.families.iterations.sliding import Sliding, asked, last_length


@ITERATIONS.register("seeded")
@dataclass(frozen=True, kw_only=True)
class Seeded(Iteration, Seeds, Pads):
    """Blocks whose first token comes from the causal pass before them, and whose other tokens are denoised.

    A causal pass over the prompt gives the first token. The block's masks see it and each other, and the decoder
    commits them over several passes. Another causal pass then computes the block's keys for good, and gives the next
    block's first token. This is for models trained so.
    """

    paper = "NVIDIA Nemotron-Labs-Diffusion"

    block: int = option(32, "block length, in tokens", least=2)
    stop: Literal["cut", "off"] = option("cut", "at a stop token: 'cut' once all before it is decoded; 'off': go on")

    def padding(self, new_tokens: int) -> int:
        return 1  # the first token of a block behind the last, which no pass has to give

    def first_region(self, prompt: int, length: int) -> tuple[int, int]:
        return prompt, min(prompt + 1, length)

    def fresh_state(self, spec: ModelSpec, length: int) -> State:
        return last_length(spec)

    def advance(self, lanes: RowCursors, after: BlockAfter, state: State) -> Moved:
        open_BX = after.open_BKL.flatten(1)
        finished_B = ~open_BX.any(-1)
        first_B = torch.where(finished_B, after.next_B, lanes.start_B + open_BX.to(torch.int64).argmax(-1))
        done_B = first_B >= asked(lanes, 1, state)
        if self.stop == "cut":
            ends_BX = after.stop_BKL.flatten(1) & ~after.given_BKL.flatten(1)
            done_B = done_B | (ends_BX & (open_BX.cumsum(-1) == 0)).any(-1)
        entered_B = finished_B & ~done_B
        start_B = torch.where(entered_B, lanes.end_B, lanes.start_B)
        end_B = torch.where(entered_B, torch.minimum(start_B + self.block, lanes.length_B), lanes.end_B)
        return Moved(start_B, end_B, lanes.block_B + finished_B, entered_B[:, None], done_B)


@ITERATIONS.register("seeded_drafts")
@dataclass(frozen=True, kw_only=True)
class SeededDrafts(Sliding, Seeds):
    """`sliding` for decoder=linear_spec: the model drafts behind the last token, and a causal pass verifies that."""

    paper = "NVIDIA Nemotron-Labs-Diffusion"
