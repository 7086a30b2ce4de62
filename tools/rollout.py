"""The answers of a network in training, and the order in which it decodes them.

It is a plain loop without a key cache: the network is small, and thousands of rows run at once.

Shape suffixes: B rows, T positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Read = Callable[[Tensor], tuple[Tensor, Tensor]]
ANSWER = 12  # tokens that hold "Answer: ..." of every problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """A step commits masks surer than `threshold`, and the surest mask of the first unfinished block.

    The next block opens when the share `add_at` of the last one is decoded. At most `blocks` are open.
    """

    threshold: float
    mask_id: int
    eos_id: int
    add_at: float = 0.1
    blocks: int = 4

    @torch.no_grad()
    def __call__(
        self, read: Read, tokens_BT: Tensor, prompt_B: Tensor, block_BT: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Decodes the responses. Returns tokens and the step of each, [B, T], and the steps of each row, [B].

        `read` gives the best token and its probability at each position. EOS fills the row behind the first EOS.
        """
        place_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        response_BT = place_T >= prompt_B[:, None]
        shown_BT = torch.where(response_BT, self.mask_id, tokens_BT)
        step_BT = torch.full_like(tokens_BT, -1)
        last_B1 = block_BT.gather(1, prompt_B[:, None])
        steps_B, done_B = torch.zeros_like(prompt_B), torch.zeros_like(prompt_B, dtype=torch.bool)
        for step in range(tokens_BT.shape[1]):
            masked_BT = shown_BT == self.mask_id
            token_BT, chance_BT = read(shown_BT)
            chance_BT = chance_BT.masked_fill(~masked_BT, -1.0)
            first_B1 = block_BT.masked_fill(~masked_BT, 10**6).amin(1, keepdim=True)
            best_B1 = chance_BT.masked_fill(block_BT != first_B1, -1.0).argmax(1, keepdim=True)
            write_BT = masked_BT & (block_BT <= last_B1) & (chance_BT > self.threshold)
            write_BT = (write_BT | ((place_T == best_B1) & masked_BT)) & ~done_B[:, None]
            shown_BT = torch.where(write_BT, token_BT, shown_BT)
            step_BT = torch.where(write_BT, step, step_BT)
            steps_B += ~done_B
            masked_BT = shown_BT == self.mask_id
            end_BT = ((shown_BT == self.eos_id) & response_BT).cumsum(1) > 0
            done_B = done_B | ~(masked_BT & ~end_BT).any(1)
            own_BT = (block_BT == last_B1) & response_BT
            share_B1 = (own_BT & ~masked_BT).sum(1, keepdim=True) / own_BT.sum(1, keepdim=True).clamp_min(1)
            open_B1 = last_B1 - block_BT.masked_fill(~masked_BT, 10**6).amin(1, keepdim=True) + 1 < self.blocks
            last_B1 = last_B1 + ((share_B1 >= self.add_at) & open_B1 & ~end_BT.any(1, keepdim=True))
            if step % 4 == 3 and bool(done_B.all()):
                break
        end_BT = ((shown_BT == self.eos_id) & response_BT).cumsum(1) > 0
        shown_BT = torch.where(end_BT, self.eos_id, shown_BT)
        step_BT = torch.where(response_BT & (step_BT < 0), steps_B[:, None] - 1, step_BT)
        return shown_BT, step_BT, steps_B


def answers(tokens_BT: Tensor, prompt_B: Tensor, answer_id: int, eos_id: int) -> Tensor:
    """The tokens from the first "Answer" of each response on, or EOS if there is none. int64 [B, ANSWER]"""
    place_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
    found_BT = (tokens_BT == answer_id) & (place_T >= prompt_B[:, None])
    first_B1 = torch.where(found_BT, place_T, tokens_BT.shape[1]).amin(1, keepdim=True)
    padded_BT = torch.nn.functional.pad(tokens_BT, (0, ANSWER + 1), value=eos_id)
    return padded_BT.gather(1, first_B1 + torch.arange(ANSWER, device=tokens_BT.device))
