"""Drawn tokens: the best of logits plus Gumbel noise, whose numbers are made where they are added.

In two launches, pieces of the vocabulary first; no tensor of the vocabulary's size is written.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dinfer.core.stats import Draw
from dinfer.kernels.random import MIX
from dinfer.kernels.triton.launch import early, follow

PIECE = 1024
MIX_0, MIX_1, MIX_2 = (tl.constexpr(number) for number in MIX)


@triton.jit
def _mix(bits):
    """See `dinfer.kernels.random`; shifts to the right are logical."""
    bits = (bits ^ ((bits >> 30) & ((1 << 34) - 1))) * MIX_1
    bits = (bits ^ ((bits >> 27) & ((1 << 37) - 1))) * MIX_2
    return bits ^ ((bits >> 31) & ((1 << 33) - 1))


@triton.jit
def _scores(logits_ptr, scale_ptr, seed_ptr, pos_ptr, step_ptr, row, length, vocab, token, inside):
    """Logits with noise. float64"""
    block = row // length
    bits = _mix(tl.load(seed_ptr + block) + MIX_0)
    bits = _mix(bits + tl.load(pos_ptr + row) + MIX_0)
    bits = _mix(bits + tl.load(step_ptr + block) + MIX_0)
    bits = _mix(bits + token + MIX_0)
    uniform = (((bits >> 12) & ((1 << 52) - 1)).to(tl.float64) + 0.5) * 2.220446049250313e-16
    noise = -tl.log(-tl.log(uniform))
    logits = tl.load(logits_ptr + row * vocab + token, mask=inside, other=float("-inf")).to(tl.float64)
    return logits + tl.load(scale_ptr + block) * noise


@triton.jit
def _draw_scan(
    logits_ptr, wanted_ptr, scale_ptr, seed_ptr, pos_ptr, step_ptr, best_ptr, token_ptr, length, vocab, mask_id,
    WANTED: tl.constexpr, P: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    follow(EARLY)
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    wanted = tl.load(wanted_ptr + row) if WANTED else 1
    if wanted == 0:
        return
    token = (piece * P + tl.arange(0, P)).to(tl.int64)
    inside = token < vocab
    score = _scores(logits_ptr, scale_ptr, seed_ptr, pos_ptr, step_ptr, row, length, vocab, token, inside)
    score = tl.where((token == mask_id) | (score != score), float("-inf"), score)
    at = row * tl.num_programs(1) + piece
    tl.store(best_ptr + at, tl.max(score, 0))
    tl.store(token_ptr + at, piece * P + tl.argmax(score, 0))


@triton.jit
def _draw_gather(
    belief_ptr, logits_ptr, wanted_ptr, scale_ptr, noisy_ptr, seed_ptr, pos_ptr, step_ptr, best_ptr, token_ptr,
    norm_ptr, mask_confidence_ptr, out_token_ptr, confidence_ptr, drawn_ptr, length, vocab, pieces, mask_id,
    WIDE: tl.constexpr, WANTED: tl.constexpr, MASK: tl.constexpr, S: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    follow(EARLY)
    row, piece = tl.program_id(0).to(tl.int64), tl.arange(0, S)
    wanted = tl.load(wanted_ptr + row) if WANTED else 1
    if wanted == 0:
        tl.store(out_token_ptr + row, 0)
        tl.store(confidence_ptr + row, tl.zeros((), WIDE))
        tl.store(drawn_ptr + row, wanted != 0)
        return
    best = tl.load(best_ptr + row * pieces + piece, mask=piece < pieces, other=float("-inf"))
    score = tl.max(best, 0)
    token = tl.load(token_ptr + row * pieces + tl.argmax(best, 0))
    peak, total = tl.load(norm_ptr + row * 2), tl.load(norm_ptr + row * 2 + 1)
    confidence = tl.exp(tl.load(belief_ptr + row * vocab + token).to(WIDE) - peak) / total
    confidence = tl.where(score == float("-inf"), float("nan"), confidence)
    declined = tl.load(mask_confidence_ptr + row) > confidence
    if MASK:
        lure = _scores(
            logits_ptr, scale_ptr, seed_ptr, pos_ptr, step_ptr, row, length, vocab, mask_id.to(tl.int64), True
        )
        declined = tl.where(tl.load(noisy_ptr + row // length) != 0, lure > score, declined)
    tl.store(out_token_ptr + row, token)
    tl.store(confidence_ptr + row, confidence)
    tl.store(drawn_ptr + row, declined)


def draw_tokens(
    draw: Draw, mask_id: int | None, norm_R2: Tensor, mask_confidence_RL: Tensor, wanted_RL: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The drawn tokens, their probabilities, and whether the mask token was drawn instead. [R, L] each

    `norm_R2` holds the largest logit of each position's belief and the sum of all powers of e less it.
    """
    belief_RLV, logits_RLV = draw.belief_RLV.contiguous(), draw.logits_RLV.contiguous()
    (blocks, length), vocab = belief_RLV.shape[:2], belief_RLV.shape[2]
    rows, pieces = blocks * length, triton.cdiv(vocab, PIECE)
    best_XP = norm_R2.new_empty(rows, pieces, dtype=torch.float64)
    token_XP = norm_R2.new_empty(rows, pieces, dtype=torch.int64)
    token_RL = norm_R2.new_empty(blocks, length, dtype=torch.int64)
    confidence_RL, drawn_RL = norm_R2.new_empty(blocks, length), torch.empty_like(token_RL, dtype=torch.bool)
    wanted = logits_RLV if wanted_RL is None else wanted_RL.contiguous()
    scale_R, noisy_R = (t.expand(blocks, 1).contiguous() for t in (draw.scale_R1.double(), draw.noisy_R1))
    counters = draw.seed_R.contiguous(), draw.pos_RL.contiguous(), draw.step_R.contiguous()
    mask, given = -1 if mask_id is None else mask_id, {"WANTED": wanted_RL is not None, **early(logits_RLV)}
    _draw_scan[(rows, pieces)](
        logits_RLV, wanted, scale_R, *counters, best_XP, token_XP, length, vocab, mask, P=PIECE, num_warps=4, **given
    )
    _draw_gather[(rows,)](
        belief_RLV, logits_RLV, wanted, scale_R, noisy_R, *counters, best_XP, token_XP, norm_R2,
        mask_confidence_RL, token_RL, confidence_RL, drawn_RL, length, vocab, pieces, mask,
        WIDE=tl.float64 if norm_R2.dtype == torch.float64 else tl.float32, MASK=mask_id is not None,
        S=triton.next_power_of_2(pieces), num_warps=1, **given,
    )  # fmt: skip
    return token_RL, confidence_RL, drawn_RL
