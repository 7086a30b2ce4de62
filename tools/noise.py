"""The noise of training rows and the weights of their loss: LLaDA's, or that of block diffusion.

A bidirectional model is trained on whole rows (LLaDA, arXiv:2502.09992), a block-causal one on blocks (Block
Diffusion, arXiv:2503.09573). Each row or block draws a mask ratio t, masks each response token with probability t, and
weighs the loss at masks by 1/t. Prompts are never noised. The EOS that fill a response are ordinary tokens.

For editing decoders, some blocks have wrong tokens instead of masks (LLaDA2.1, arXiv:2602.08676). They are drawn at
random or drafted by the network, and the loss at all unmasked positions has weight 1. No block has both: with masks
beside its own wrong drafts, a network learnt not to trust decoded tokens, and decoded worse.

Shape suffixes: B rows, T positions, K blocks of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dinfer.core.terms.spec import ModelSpec

SMALLEST_RATIO = 1e-3  # LLaDA's smallest t of a row; a block's smallest masks one token on average
MOST_WRONG = 0.3  # the largest share of a block's tokens that are wrong

Guess = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """How rows are noised."""

    spec: ModelSpec
    digits_X: Tensor  # tokens that replace each other, as in wrong arithmetic
    wrong: float  # share of blocks with wrong tokens; 0: only masks have a loss
    generator: torch.Generator

    def __call__(self, tokens_BT: Tensor, prompt_B: Tensor, guess: Guess | None) -> tuple[Tensor, Tensor]:
        """The noised rows, int64 [B, T], and the weight of the loss at each position, float32 [B, T].

        `guess` gives the network's best tokens for a noised row, which then fill all masks.
        """
        rows, length = tokens_BT.shape
        response_BT = torch.arange(length, device=tokens_BT.device) >= prompt_B[:, None]
        ratio_BT = self._per_block(tokens_BT, self._ratios)
        wrong_BT = self._per_block(tokens_BT, self._rand) < self.wrong
        masked_BT = response_BT & ~wrong_BT & (self._uniform(tokens_BT) < ratio_BT)
        shown_BT = self._spoilt(tokens_BT, prompt_B, response_BT & wrong_BT) if self.wrong else tokens_BT
        shown_BT = torch.where(masked_BT, self.spec.mask_id, shown_BT)
        if guess is not None:
            shown_BT, masked_BT = torch.where(masked_BT, guess(shown_BT), shown_BT), masked_BT & False
        weight_BT = masked_BT / ratio_BT
        if self.wrong:
            weight_BT = weight_BT + (response_BT & ~masked_BT)
        return shown_BT, weight_BT / response_BT.sum(1, keepdim=True) / rows

    def _rand(self, *shape: int) -> Tensor:
        return torch.rand(shape, device=self.generator.device, generator=self.generator)

    def _uniform(self, like_BT: Tensor) -> Tensor:
        return self._rand(*like_BT.shape)

    def _per_block(self, like_BT: Tensor, draw: Callable[[int, int], Tensor]) -> Tensor:
        """A number for each block, repeated for its positions. [B, T]"""
        rows, length = like_BT.shape
        block = self.spec.causal_block or length
        return draw(rows, -(-length // block)).repeat_interleave(block, 1)[:, :length]

    def _ratios(self, rows: int, blocks: int) -> Tensor:
        """Stratified ratios: each t is uniform, and the batch covers (0, 1) evenly. [B, K]"""
        spread = torch.arange(rows * blocks, device=self.generator.device).view(rows, blocks) / (rows * blocks)
        even_BK = (self._rand() + spread).remainder(1)
        least = 1 / self.spec.causal_block if self.spec.causal_block else SMALLEST_RATIO
        return least + (1 - least) * even_BK

    def _spoilt(self, tokens_BT: Tensor, prompt_B: Tensor, where_BT: Tensor) -> Tensor:
        """Rows with some wrong tokens: random digits replace digits, others come from elsewhere in the response."""
        length = tokens_BT.shape[1]
        hit_BT = where_BT & (self._uniform(tokens_BT) < self._per_block(tokens_BT, self._rand) * MOST_WRONG)
        source_BT = prompt_B[:, None] + self._uniform(tokens_BT) * (length - prompt_B[:, None])
        other_BT = tokens_BT.gather(1, source_BT.long().clamp_max(length - 1))
        digit_BT = self.digits_X[(self._uniform(tokens_BT) * len(self.digits_X)).long()]
        wrong_BT = torch.where((tokens_BT[..., None] == self.digits_X).any(-1), digit_BT, other_BT)
        return torch.where(hit_BT, wrong_BT, tokens_BT)
