"""Training states with several open blocks, and the targets there.

Masks: half of the rows are in the state of some step of the answer's own decoding (d3LLM, arXiv:2601.07568). The other
half has noise that rises from block to block (D2F, arXiv:2508.09192). Drafts: on some rows the network first fills
masks that it is not sure of, and the target is the right token everywhere. Moves: each block of some drafts may have
one token too many or too few. If deleting or splitting there makes more tokens right, that is the target.

Shape suffixes: B rows, D rows with drafts, T positions, K blocks of a row, L positions of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dinfer.core.terms.spec import ModelSpec

Read = Callable[[Tensor, int], tuple[Tensor, Tensor]]
SEEN = 0.5  # weight of a visible token, where a mask has 1
MOVE = 4.0  # weight of a move
GAIN = 2  # tokens that a move must make right


def blocks_of(spec: ModelSpec, prompt_B: Tensor, length: int, block: int) -> Tensor:
    """The attention block of each position. With `prompt_block` the prompt is block 0. [B, T]"""
    place_BT = torch.arange(length, device=prompt_B.device).expand(len(prompt_B), -1)
    if not spec.prompt_block:
        return place_BT // block
    return torch.where(place_BT < prompt_B[:, None], 0, (place_BT - prompt_B[:, None]) // block + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """How states are made. `drafts` and `moves` are shares of the rows."""

    spec: ModelSpec
    digits_X: Tensor
    block: int
    drafts: float
    moves: float
    generator: torch.Generator

    def __call__(
        self, tokens_BT: Tensor, prompt_B: Tensor, step_BT: Tensor, read: Read
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The network's inputs, the targets, and the weights of the loss, which sum to 1. [B, T] each

        `step_BT`: the step at which each token was decoded. `read(shown, rows)`: the network's best tokens for the
        first rows of the batch, and their probabilities.
        """
        rows, length = tokens_BT.shape
        response_BT = torch.arange(length, device=tokens_BT.device) >= prompt_B[:, None]
        masked_BT = response_BT & torch.where(
            self._rand(rows, 1) < 0.5, self._reached(step_BT), self._rising(tokens_BT, prompt_B)
        )
        moved, drafted = int(self.moves * rows), int(self.drafts * rows)
        whole_B1 = torch.arange(rows, device=tokens_BT.device)[:, None] < moved
        masked_BT = torch.where(whole_B1, response_BT & (self._rand(rows, 1) < 0.7) & masked_BT, masked_BT)
        shown_BT = torch.where(masked_BT, self.spec.mask, tokens_BT)
        if not drafted:
            weight_BT = masked_BT.float()
            return shown_BT, tokens_BT, weight_BT / weight_BT.sum().clamp_min(1)
        token_DT, chance_DT = read(shown_BT, drafted)
        bar_D1 = torch.where(whole_B1[:drafted], 0.0, 0.2 + 0.7 * self._rand(drafted, 1))
        fill_DT = masked_BT[:drafted] & (chance_DT > bar_D1)
        shown_BT = torch.cat((torch.where(fill_DT, token_DT, shown_BT[:drafted]), shown_BT[drafted:]))
        masked_BT = torch.cat((masked_BT[:drafted] & ~fill_DT, masked_BT[drafted:]))
        edited_B1 = torch.arange(rows, device=tokens_BT.device)[:, None] < drafted
        weight_BT = torch.where(response_BT & edited_B1 & ~masked_BT, SEEN, masked_BT.float())
        said_BT = tokens_BT
        if moved:
            spoilt_DT = self._moved(shown_BT[:moved], tokens_BT[:moved], response_BT[:moved])
            shown_BT = torch.cat((spoilt_DT, shown_BT[moved:]))
            own_DT, move_DT = self.realigned(shown_BT[:drafted], tokens_BT[:drafted], response_BT[:drafted])
            said_BT = torch.cat((own_DT, tokens_BT[drafted:]))
            weight_BT = torch.cat((torch.where(move_DT, MOVE, weight_BT[:drafted]), weight_BT[drafted:]))
        return shown_BT, said_BT, weight_BT / weight_BT.sum().clamp_min(1)

    def _rand(self, *shape: int) -> Tensor:
        return torch.rand(shape, device=self.generator.device, generator=self.generator)

    def _reached(self, step_BT: Tensor) -> Tensor:
        """The masks before a random step of the row's decoding. bool [B, T]"""
        steps_B1 = step_BT.amax(1, keepdim=True) + 1
        return step_BT >= (self._rand(len(step_BT), 1) * steps_B1).floor()

    def _rising(self, tokens_BT: Tensor, prompt_B: Tensor) -> Tensor:
        """Masks with a ratio that rises from block to block, from possibly none to possibly all. bool [B, T]"""
        rows, length = tokens_BT.shape
        blocks = -(-length // self.block) + 1
        ratio_BK = (1.4 * self._rand(rows, blocks) - 0.2).clamp(0, 1).sort(1).values
        block_BT = blocks_of(self.spec, prompt_B, length, self.block)
        # Otherwise blocks without a response token would take the lowest ratios.
        first_B1 = block_BT.gather(1, prompt_B[:, None])
        return self._rand(rows, length) < ratio_BK.gather(1, (block_BT - first_B1).clamp_min(0))

    def _moved(self, shown_DT: Tensor, tokens_DT: Tensor, response_DT: Tensor) -> Tensor:
        """Half of the blocks get a token too many or too few at a random place. [D, T]"""
        shown_DKL, response_DKL = self._parts(shown_DT), self._parts(response_DT)
        next_DKL = self._parts(tokens_DT.roll(-1, 1))
        rows, blocks, size = shown_DKL.shape
        place_L = torch.arange(size, device=shown_DT.device)
        first_DK1 = size - response_DKL.sum(-1, keepdim=True)
        at_DK1 = (first_DK1 + self._rand(rows, blocks, 1) * (size - first_DK1)).floor()
        draw_DK1 = torch.where(first_DK1 < size, self._rand(rows, blocks, 1), 1.0)
        fewer_DKL = torch.cat((shown_DKL[..., 1:], next_DKL[..., -1:]), -1)
        more_DKL = torch.cat((shown_DKL[..., :1], shown_DKL[..., :-1]), -1)
        source_DKL = first_DK1 + self._rand(rows, blocks, size) * (size - first_DK1)
        any_DKL = shown_DKL.gather(-1, source_DKL.long().clamp_max(size - 1))
        digit_DKL = self.digits_X[(self._rand(rows, blocks, size) * len(self.digits_X)).long()]
        kind_DK1 = self._rand(rows, blocks, 1)
        wrong_DKL = torch.where(kind_DK1 < 0.4, digit_DKL, torch.where(kind_DK1 < 0.7, shown_DKL, any_DKL))
        more_DKL = torch.where(place_L == at_DK1, wrong_DKL, more_DKL)
        moved_DKL = torch.where(draw_DK1 < 0.25, fewer_DKL, more_DKL)
        moved_DKL = torch.where((place_L >= at_DK1) & (draw_DK1 < 0.5), moved_DKL, shown_DKL)
        return moved_DKL.flatten(1)

    def realigned(self, shown_DT: Tensor, tokens_DT: Tensor, response_DT: Tensor) -> tuple[Tensor, Tensor]:
        """The targets of a draft with at most one move a block, int64 [D, T], and where it moves, bool [D, T]."""
        if self.spec.delete_id is None or self.spec.split_id is None:
            raise ValueError("moves need a model whose config names delete_token_id and split_token_id")
        shown_DKL, response_DKL = self._parts(shown_DT), self._parts(response_DT)
        own_DKL, before_DKL, after_DKL = (self._parts(tokens_DT.roll(by, 1)) for by in (0, 1, -1))
        place_L = torch.arange(self.block, device=shown_DT.device)
        right_DKL = (shown_DKL == own_DKL).int()
        kept_DKL = right_DKL.cumsum(-1) - right_DKL  # right before each place
        late_DKL, early_DKL = ((shown_DKL == other).int() for other in (before_DKL, after_DKL))
        # Behind an extra token, tokens stand one place late; behind a missing one, one place early.
        gone_DKL = kept_DKL + late_DKL.flip(-1).cumsum(-1).flip(-1) - late_DKL
        split_DKL = kept_DKL + early_DKL.flip(-1).cumsum(-1).flip(-1)
        score_DKL = torch.cat((gone_DKL, split_DKL), -1).masked_fill(~response_DKL.repeat(1, 1, 2), -1)
        order_DKL = score_DKL * self.block + place_L.repeat(2)  # the last of equal ones
        best_DK1 = order_DKL.argmax(-1, keepdim=True)
        gain_DK1 = score_DKL.gather(-1, best_DK1) - right_DKL.sum(-1, keepdim=True)
        at_DK1, deletes_DK1 = best_DK1 % self.block, best_DK1 < self.block
        moves_DK1 = gain_DK1 >= GAIN
        behind_DKL = torch.where(deletes_DK1, before_DKL, after_DKL)
        move_DK1 = torch.where(deletes_DK1, self.spec.delete_id, self.spec.split_id)
        said_DKL = torch.where(place_L < at_DK1, own_DKL, torch.where(place_L == at_DK1, move_DK1, behind_DKL))
        move_DKL = moves_DK1 & (place_L == at_DK1)
        return torch.where(moves_DK1, said_DKL, own_DKL).flatten(1), move_DKL.flatten(1)

    def _parts(self, x_DT: Tensor) -> Tensor:
        return x_DT.unflatten(1, (-1, self.block))
