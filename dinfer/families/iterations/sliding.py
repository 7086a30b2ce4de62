"""A window of fixed length that begins at the first open position (I-DLM, WeDLM; DSB's constant window)."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dinfer.core.kernels.dispatch import triton, use_triton
from dinfer.core.registry import ITERATIONS, option
from dinfer.core.step.contracts import BlockAfter, Iteration, ModelSpec, Moved, RowCursors, State
from dinfer.core.step.mixins import Pads, Slides


def last_length(spec: ModelSpec) -> State:
    """A state from which `asked` knows where padding may have found no room."""
    return {"most": torch.tensor(spec.max_length)}


def asked(lanes: RowCursors, padding: int, state: State) -> Tensor:
    """The end of what a request asks for. A canvas as long as the model's may have no padding. int64 [B]"""
    return lanes.length_B - padding * (lanes.length_B < state["most"])


@ITERATIONS.register("sliding")
@dataclass(frozen=True, kw_only=True)
class Sliding(Iteration, Slides, Pads):
    """The next `block` positions from the first open one on. It moves with every commit there.

    It has no blocks, so decoders never begin anew, and schedules by blocks have one.
    """

    paper = "I-DLM, github.com/thuEcstasy/I-DLM; WeDLM, github.com/Tencent/WeDLM"

    block: int = option(32, "positions that may be decoded at once", least=1)
    stop: Literal["cut", "off"] = option("cut", "at a stop token: 'cut' once all before it is decoded; 'off': go on")
    whole: bool = option(False, "the window has all its positions up to the last token, and decodes beyond it (WeDLM)")

    def padding(self, new_tokens: int) -> int:
        return self.block - 1 if self.whole else 0

    def first_region(self, prompt: int, length: int) -> tuple[int, int]:
        return prompt, min(prompt + self.block, length)

    def fresh_state(self, spec: ModelSpec, length: int) -> State:
        return last_length(spec)

    def advance(self, lanes: RowCursors, after: BlockAfter, state: State) -> Moved:
        given = lanes, after, state["most"], self.block, self.padding(0), self.stop == "cut"
        start_B, end_B, done_B = (triton("drafts").slide if use_triton(lanes.start_B, "advance") else slide)(*given)
        return Moved(start_B, end_B, lanes.block_B, torch.zeros_like(done_B)[:, None], done_B)


def slide(
    lanes: RowCursors, after: BlockAfter, most_B: Tensor, block: int, padding: int, cut: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Where the windows begin and end now, and which rows have nothing more to decode. [B] each"""
    open_BX = after.open_BKL.flatten(1)
    first_B = lanes.start_B + open_BX.to(torch.int64).argmax(-1)
    start_B = torch.where(open_BX.any(-1), first_B, after.next_B)
    done_B = start_B >= asked(lanes, padding, {"most": most_B})
    if cut:
        ends_BX = after.stop_BKL.flatten(1) & ~after.given_BKL.flatten(1)
        done_B = done_B | (ends_BX & (open_BX.cumsum(-1) == 0)).any(-1)
    start_B = torch.where(done_B, lanes.start_B, start_B)
    end_B = torch.where(done_B, lanes.end_B, torch.minimum(start_B + block, lanes.length_B))
    return start_B, end_B, done_B
