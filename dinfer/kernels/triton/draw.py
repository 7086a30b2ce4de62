"""Drawn tokens: the best of logits plus Gumbel noise, which is made where it is added.

The first launch takes pieces of the vocabulary, the second joins them. Neither writes a tensor of the vocabulary's
size. Between the two, ranks that divide the vocabulary exchange what they know of their pieces.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dinfer.kernels.random import MIX
from dinfer.kernels.triton.launch import early, follow
from dinfer.step.stats import Columns, Draw

PIECE = 1024
NUMBERS = 4  # of a piece, see `dinfer.kernels.token_stats.own_draw`
MIX_0, MIX_1, MIX_2 = (tl.constexpr(number) for number in MIX)


@triton.jit
def _mix(bits):
    """See `dinfer.kernels.random`; shifts to the right are logical."""
    bits = (bits ^ ((bits >> 30) & ((1 << 34) - 1))) * MIX_1
    bits = (bits ^ ((bits >> 27) & ((1 << 37) - 1))) * MIX_2
    return bits ^ ((bits >> 31) & ((1 << 33) - 1))


@triton.jit
def _scores(logits_ptr, scale_ptr, seed_ptr, pos_ptr, step_ptr, row, length, vocab, place, token, inside):
    """Logits plus noise of the tokens at these places of a row. float64"""
    block = row // length
    bits = _mix(tl.load(seed_ptr + block) + MIX_0)
    bits = _mix(bits + tl.load(pos_ptr + row) + MIX_0)
    bits = _mix(bits + tl.load(step_ptr + block) + MIX_0)
    bits = _mix(bits + token + MIX_0)
    uniform = (((bits >> 12) & ((1 << 52) - 1)).to(tl.float64) + 0.5) * 2.220446049250313e-16
    noise = -tl.log(-tl.log(uniform))
    logits = tl.load(logits_ptr + row * vocab + place, mask=inside, other=float("-inf")).to(tl.float64)
    return logits + tl.load(scale_ptr + block) * noise


@triton.jit
def _draw_scan(
    belief_ptr, logits_ptr, wanted_ptr, scale_ptr, seed_ptr, pos_ptr, step_ptr, piece_ptr, length, vocab, mask_id,
    first_token, WANTED: tl.constexpr, P: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    follow(EARLY)
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    wanted = tl.load(wanted_ptr + row) if WANTED else 1
    if wanted == 0:
        return
    place = (piece * P + tl.arange(0, P)).to(tl.int64)
    token = first_token + place
    score = _scores(logits_ptr, scale_ptr, seed_ptr, pos_ptr, step_ptr, row, length, vocab, place, token, place < vocab)
    score = tl.where(score != score, float("-inf"), score)
    lure = tl.max(tl.where(token == mask_id, score, float("-inf")), 0)
    score = tl.where(token == mask_id, float("-inf"), score)
    best = piece * P + tl.argmax(score, 0)
    at = piece_ptr + (row * tl.num_programs(1) + piece) * 4
    tl.store(at, tl.max(score, 0))
    tl.store(at + 1, (first_token + best).to(tl.float64))
    belief = tl.load(belief_ptr + row * vocab + best, mask=best < vocab, other=float("-inf"))
    tl.store(at + 2, belief.to(tl.float64))
    tl.store(at + 3, lure)


@triton.jit
def _draw_gather(
    piece_ptr, wanted_ptr, noisy_ptr, norm_ptr, mask_confidence_ptr, out_token_ptr, confidence_ptr, drawn_ptr,
    length, own, pieces, WIDE: tl.constexpr, WANTED: tl.constexpr, S: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    follow(EARLY)
    row, piece = tl.program_id(0).to(tl.int64), tl.arange(0, S)
    wanted = tl.load(wanted_ptr + row) if WANTED else 1
    if wanted == 0:
        tl.store(out_token_ptr + row, 0)
        tl.store(confidence_ptr + row, tl.zeros((), WIDE))
        tl.store(drawn_ptr + row, wanted != 0)
        return
    rank = piece // own
    at = piece_ptr + ((rank * tl.num_programs(0) + row) * own + piece - rank * own) * 4
    best = tl.load(at, mask=piece < pieces, other=float("-inf"))
    score, winner = tl.max(best, 0), piece == tl.argmax(best, 0)
    token = tl.sum(tl.where(winner, tl.load(at + 1, mask=winner, other=0.0), 0.0), 0)
    belief = tl.sum(tl.where(winner, tl.load(at + 2, mask=winner, other=0.0), 0.0), 0)
    lure = tl.max(tl.load(at + 3, mask=piece < pieces, other=float("-inf")), 0)
    peak, total = tl.load(norm_ptr + row * 2), tl.load(norm_ptr + row * 2 + 1)
    confidence = tl.exp(belief.to(WIDE) - peak) / total
    confidence = tl.where(score == float("-inf"), float("nan"), confidence)
    declined = tl.load(mask_confidence_ptr + row) > confidence
    declined = tl.where(tl.load(noisy_ptr + row // length) != 0, lure > score, declined)
    tl.store(out_token_ptr + row, token.to(tl.int64))
    tl.store(confidence_ptr + row, confidence)
    tl.store(drawn_ptr + row, declined)


def draw_tokens(
    draw: Draw, mask_id: int | None, norm_R2: Tensor, mask_confidence_RL: Tensor, wanted_RL: Tensor | None,
    columns: Columns,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The drawn tokens, their probabilities, and whether the mask token was drawn instead. [R, L] each

    `norm_R2`: the largest logit m of each position's belief, and the sum of e^(x - m) over the vocabulary.
    """
    belief_RLV, logits_RLV = draw.belief_RLV.contiguous(), draw.logits_RLV.contiguous()
    (blocks, length), vocab = belief_RLV.shape[:2], belief_RLV.shape[2]
    rows, own = blocks * length, triton.cdiv(columns.most, PIECE)
    piece_RSN = norm_R2.new_empty(rows, own, NUMBERS, dtype=torch.float64)
    token_RL = norm_R2.new_empty(blocks, length, dtype=torch.int64)
    confidence_RL, drawn_RL = norm_R2.new_empty(blocks, length), torch.empty_like(token_RL, dtype=torch.bool)
    wanted = logits_RLV if wanted_RL is None else wanted_RL.contiguous()
    scale_R, noisy_R = (t.expand(blocks, 1).contiguous() for t in (draw.scale_R1.double(), draw.noisy_R1))
    counters = draw.seed_R.contiguous(), draw.pos_RL.contiguous(), draw.step_R.contiguous()
    mask, given = -1 if mask_id is None else mask_id, {"WANTED": wanted_RL is not None, **early(logits_RLV)}
    _draw_scan[(rows, own)](
        belief_RLV, logits_RLV, wanted, scale_R, *counters, piece_RSN, length, vocab, mask, columns.first,
        P=PIECE, num_warps=4, **given,
    )  # fmt: skip
    piece_NRSN = piece_RSN[None] if columns.all_gather is None else columns.all_gather(piece_RSN)
    pieces = len(piece_NRSN) * own
    _draw_gather[(rows,)](
        piece_NRSN, wanted, noisy_R, norm_R2, mask_confidence_RL, token_RL, confidence_RL, drawn_RL,
        length, own, pieces, WIDE=tl.float64 if norm_R2.dtype == torch.float64 else tl.float32,
        S=triton.next_power_of_2(pieces), num_warps=1, **given,
    )  # fmt: skip
    return token_RL, confidence_RL, drawn_RL
