"""The statistics of the logits in one pass, and drawn tokens: the best of logits plus noise made where it is added.

A first launch takes pieces of the vocabulary, a second joins them. Neither writes a tensor of the vocabulary's size.
Between the two, ranks that divide the vocabulary exchange what they know of their pieces.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dinfer.core.kernels.random import MIX
from dinfer.core.terms.stats import Draw, TokenStats, VocabularySlice
from dinfer.kernels.triton.launch import early, follow

DRAW_PIECE = 1024  # logits that a program takes for a draw
DRAW_NUMBERS = 4  # of a piece, see `dinfer.scale.statistics.own_draw`
MIX_0, MIX_1, MIX_2 = (tl.constexpr(number) for number in MIX)


@triton.jit
def _mix(bits):
    """See `dinfer.core.kernels.random`; shifts to the right are logical."""
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
    columns: VocabularySlice,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The drawn tokens, their probabilities, and whether the mask token was drawn instead. [R, L] each

    `norm_R2`: the largest logit m of each position's belief, and the sum of e^(x - m) over the vocabulary.
    """
    belief_RLV, logits_RLV = draw.belief_RLV.contiguous(), draw.logits_RLV.contiguous()
    (blocks, length), vocab = belief_RLV.shape[:2], belief_RLV.shape[2]
    rows, own = blocks * length, triton.cdiv(columns.most, DRAW_PIECE)
    piece_RSN = norm_R2.new_empty(rows, own, DRAW_NUMBERS, dtype=torch.float64)
    token_RL = norm_R2.new_empty(blocks, length, dtype=torch.int64)
    confidence_RL, drawn_RL = norm_R2.new_empty(blocks, length), torch.empty_like(token_RL, dtype=torch.bool)
    wanted = logits_RLV if wanted_RL is None else wanted_RL.contiguous()
    scale_R, noisy_R = (t.expand(blocks, 1).contiguous() for t in (draw.scale_R1.double(), draw.noisy_R1))
    counters = draw.seed_R.contiguous(), draw.pos_RL.contiguous(), draw.step_R.contiguous()
    mask, given = -1 if mask_id is None else mask_id, {"WANTED": wanted_RL is not None, **early(logits_RLV)}
    _draw_scan[(rows, own)](
        belief_RLV, logits_RLV, wanted, scale_R, *counters, piece_RSN, length, vocab, mask, columns.first,
        P=DRAW_PIECE, num_warps=4, **given,
    )  # fmt: skip
    piece_NRSN = piece_RSN[None] if columns.all_gather is None else columns.all_gather(piece_RSN)
    pieces = len(piece_NRSN) * own
    _draw_gather[(rows,)](
        piece_NRSN, wanted, noisy_R, norm_R2, mask_confidence_RL, token_RL, confidence_RL, drawn_RL,
        length, own, pieces, WIDE=tl.float64 if norm_R2.dtype == torch.float64 else tl.float32,
        S=triton.next_power_of_2(pieces), num_warps=1, **given,
    )  # fmt: skip
    return token_RL, confidence_RL, drawn_RL


PIECE, TURNS = 4096, 4  # logits that a program takes at a time, and how often
GROUP = 8  # neighbours that a thread reads at once
LOWEST = tl.constexpr(-3.4028234663852886e38)
LOG2E = tl.constexpr(1.4426950408889634)
NUMBERS = 8  # of a piece, see `dinfer.scale.statistics.own_numbers`; a float32 holds every token's number


@triton.jit
def _power(x):
    """e^x. A maximum's own power must be 1, so the factor comes behind the difference."""
    return tl.exp(x) if x.dtype == tl.float64 else tl.exp2(x * LOG2E)


@triton.jit
def _two(first, second, other_first, other_second):
    """The largest two of two pairs."""
    return tl.maximum(first, other_first), tl.maximum(tl.minimum(first, other_first), tl.maximum(second, other_second))


@triton.jit
def _scan(
    logits_ptr, wanted_ptr, piece_ptr, own, vocab, mask_id, first_token,
    WIDE: tl.constexpr, WANTED: tl.constexpr, ENTROPY: tl.constexpr, MARGIN: tl.constexpr, P: tl.constexpr,
    TURNS: tl.constexpr, G: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    follow(EARLY)
    # Programs next to each other read what is next to each other: with rows first, memory takes a quarter longer.
    row, piece = (tl.program_id(0) // own).to(tl.int64), tl.program_id(0) % own
    wanted = tl.load(wanted_ptr + row) if WANTED else 1
    if wanted == 0:
        return
    logits_ptr += row * vocab
    start = piece * (P * TURNS)
    # Instructions bound this kernel. So the mask token is looked up, not searched, a thread keeps statistics of the
    # groups of G neighbours that it reads, and threads meet once, at the end.
    mask_lane = mask_id - first_token
    here = (mask_lane >= start) & (mask_lane < start + P * TURNS) & (mask_lane >= 0) & (mask_lane < vocab)
    lure = tl.load(logits_ptr + mask_lane, mask=here, other=float("-inf")).to(WIDE)
    column, group = tl.arange(0, P), tl.arange(0, P // G)
    best, total = tl.full((P // G,), LOWEST, WIDE), tl.zeros((P // G,), WIDE)
    second, slope = tl.full((P // G,), float("-inf"), WIDE), tl.zeros((P // G,), WIDE)
    turn = tl.zeros((P // G,), tl.int32)
    ahead = tl.load(logits_ptr + start + column, mask=start + column < vocab, other=float("-inf"))
    for t in range(0, tl.minimum(tl.cdiv(vocab - start, P), TURNS)):
        x, lane = ahead, start + t * P + column
        after = lane + P  # the next logits come while these are used
        ahead = tl.load(logits_ptr + after, mask=(after < vocab) & (t + 1 < TURNS), other=float("-inf"))
        if here:
            x = tl.where(lane == mask_lane, float("-inf"), x)
        x = tl.reshape(x.to(WIDE), (P // G, G))
        if MARGIN:
            high, lower = tl.reduce((x, tl.full((P // G, G), float("-inf"), WIDE)), 1, _two)
            second = tl.maximum(tl.minimum(best, high), tl.maximum(second, lower))
        else:
            high = tl.max(x, 1)
        turn = tl.where(high > best, t, turn)
        top = tl.maximum(best, high)
        shrink, shift = _power(best - top), x - top[:, None]
        power = _power(shift)
        if ENTROPY:
            slope = (slope + tl.where(total == 0.0, 0.0, (best - top) * total)) * shrink
            slope += tl.sum(tl.where(x == float("-inf"), 0.0, shift * power), 1)
        best, total = top, total * shrink + tl.sum(power, 1)
    most = tl.max(best, 0)
    empty = tl.sum(total, 0) == 0.0  # every logit is -inf; NaN if one is NaN or infinite
    at = tl.min(tl.where(best == most, turn * (P // G) + group, TURNS * (P // G) - 1), 0)
    lane = start + at * G + tl.arange(0, G)
    again = tl.load(logits_ptr + lane, mask=(lane < vocab) & (lane != mask_lane), other=float("-inf")).to(WIDE)
    token = tl.where(empty, start, tl.min(tl.where(again == most, lane, vocab - 1), 0))
    if logits_ptr.dtype.element_ty == tl.float32:  # noqa: SIM102 (a constant, so other types have no such code)
        if (most == LOWEST) & (empty == 0):  # a logit that no thread has noticed, since it began with the same number
            token = vocab - 1
            for i in range(0, TURNS):
                place = start + i * P + column
                least = tl.load(logits_ptr + place, mask=(place < vocab) & (place != mask_lane), other=float("-inf"))
                token = tl.minimum(token, tl.min(tl.where(least == LOWEST, place, vocab - 1), 0))
    highest = tl.where(empty, float("-inf"), most)
    top = tl.maximum(highest, lure)
    base = tl.where(top == float("-inf"), 0.0, top)
    shrink, lured = _power(best - base), _power(lure - base)
    whole = tl.sum(total * shrink, 0) + lured
    if ENTROPY:
        slope = (slope + tl.where(total == 0.0, 0.0, (best - base) * total)) * shrink
        sloped = tl.sum(slope, 0) + tl.where(lure == float("-inf"), 0.0, (lure - base) * lured)
    else:
        sloped = whole
    runner_up = top
    if MARGIN:
        best = tl.where(best == LOWEST, float("-inf"), best)
        first, lower = tl.reduce((best, second), 0, _two)
        runner_up = tl.where(lure > first, first, tl.maximum(lure, lower))
    piece_ptr += tl.program_id(0).to(tl.int64) * 8
    tl.store(piece_ptr, tl.where(whole == whole, top, float("nan")))
    tl.store(piece_ptr + 1, whole)
    tl.store(piece_ptr + 2, sloped)
    tl.store(piece_ptr + 3, highest)
    tl.store(piece_ptr + 4, top)
    tl.store(piece_ptr + 5, runner_up)
    tl.store(piece_ptr + 6, lure)
    tl.store(piece_ptr + 7, (first_token + token).to(WIDE))


@triton.jit
def _gather(
    wanted_ptr, piece_ptr, out_token_ptr, confidence_ptr, mask_ptr, entropy_ptr, margin_ptr, norm_ptr, own, pieces,
    WIDE: tl.constexpr, WANTED: tl.constexpr, ENTROPY: tl.constexpr, MARGIN: tl.constexpr, MASK: tl.constexpr,
    NORM: tl.constexpr, S: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    follow(EARLY)
    row = tl.program_id(0).to(tl.int64)
    wanted = tl.load(wanted_ptr + row) if WANTED else 1
    if wanted == 0:
        zero = tl.zeros((), WIDE)
        tl.store(out_token_ptr + row, 0)
        tl.store(confidence_ptr + row, zero)
        tl.store(mask_ptr + row, zero)
        if ENTROPY:
            tl.store(entropy_ptr + row, zero)
        if MARGIN:
            tl.store(margin_ptr + row, zero)
        return
    piece = tl.arange(0, S)
    inside = piece < pieces
    rank = piece // own
    at = piece_ptr + ((rank * tl.num_programs(0) + row) * own + piece - rank * own) * 8
    top = tl.load(at, mask=inside, other=float("-inf"))
    broken = tl.max((top != top).to(tl.int32), 0) > 0
    first = tl.load(at + 4, mask=inside, other=float("-inf"))
    peak = tl.max(first, 0)
    empty = first == float("-inf")
    shift = tl.where(empty, 0.0, first - peak)
    shrink = tl.where(empty, 0.0, tl.exp(shift))
    part = tl.load(at + 1, mask=inside, other=0.0)
    total = tl.sum(part * shrink, 0)
    best = tl.load(at + 3, mask=inside, other=float("-inf"))
    winner = tl.argmax(best, 0)
    highest = tl.max(best, 0)
    spoilt = tl.where(broken, float("nan"), 0.0).to(WIDE)
    if NORM:
        tl.store(norm_ptr + row * 2, peak + spoilt)
        tl.store(norm_ptr + row * 2 + 1, total)
    token = tl.load(at + 7, mask=inside, other=0.0)
    tl.store(out_token_ptr + row, tl.sum(tl.where(piece == winner, token, 0.0), 0).to(tl.int64))
    lost = tl.where(highest == float("-inf"), float("nan"), spoilt)
    tl.store(confidence_ptr + row, tl.exp(highest - peak) / total + lost)
    if MASK:
        lure = tl.max(tl.load(at + 6, mask=inside, other=float("-inf")), 0)
        tl.store(mask_ptr + row, tl.exp(lure - peak) / total + spoilt)
    else:
        tl.store(mask_ptr + row, spoilt)
    if ENTROPY:
        slope = tl.load(at + 2, mask=inside, other=0.0)
        tl.store(entropy_ptr + row, tl.log(total) - tl.sum((slope + shift * part) * shrink, 0) / total + spoilt)
    if MARGIN:
        other = tl.load(at + 5, mask=inside, other=float("-inf"))
        second = tl.max(tl.where(piece == tl.argmax(first, 0), other, first), 0)
        tl.store(margin_ptr + row, (1.0 - tl.exp(second - peak)) / total + spoilt)


def token_stats(
    logits_RLV: Tensor, mask_id: int | None, dtype: torch.dtype, *, needs: Collection[str] = (),
    draw: Draw | None = None, wanted_RL: Tensor | None = None, columns: VocabularySlice | None = None,
    drawn_RL: Tensor | None = None,
) -> TokenStats:  # fmt: skip
    """See `dinfer.core.kernels.token_stats.token_stats`."""
    logits_RLV = (logits_RLV if draw is None else draw.belief_RLV).contiguous()
    shape, vocab = logits_RLV.shape[:-1], logits_RLV.shape[-1]
    columns = columns or VocabularySlice(0, vocab, vocab)
    rows, own = shape.numel(), triton.cdiv(columns.most, PIECE * TURNS)
    wide = torch.promote_types(logits_RLV.dtype, dtype)
    wide = torch.promote_types(wide, torch.float32)
    piece_RSN = logits_RLV.new_empty(rows, own, NUMBERS, dtype=wide)
    given: dict[str, Any] = {
        "WIDE": tl.float64 if wide == torch.float64 else tl.float32, "WANTED": wanted_RL is not None,
        "ENTROPY": "entropy" in needs, "MARGIN": "margin" in needs, **early(logits_RLV),
    }  # fmt: skip
    mask = -1 if mask_id is None else mask_id
    wanted = logits_RLV if wanted_RL is None else wanted_RL.contiguous()
    _scan[(rows * own,)](
        logits_RLV, wanted, piece_RSN, own, vocab, mask, columns.first, P=PIECE, TURNS=TURNS, G=GROUP, num_warps=4,
        **given,
    )  # fmt: skip
    piece_NRSN = piece_RSN[None] if columns.all_gather is None else columns.all_gather(piece_RSN)
    pieces = len(piece_NRSN) * own
    token_RL = torch.empty(shape, dtype=torch.int64, device=logits_RLV.device)
    confidence_RL, mask_RL = (logits_RLV.new_empty(shape, dtype=wide) for _ in range(2))
    entropy_RL, margin_RL = (torch.empty_like(mask_RL) if name in needs else None for name in ("entropy", "margin"))
    norm_R2 = logits_RLV.new_empty(rows, 2, dtype=wide) if draw is not None else None
    _gather[(rows,)](
        wanted, piece_NRSN, token_RL, confidence_RL, mask_RL,
        *(confidence_RL if made is None else made for made in (entropy_RL, margin_RL, norm_R2)), own, pieces,
        MASK=mask_id is not None, NORM=draw is not None, S=triton.next_power_of_2(pieces), num_warps=1, **given,
    )  # fmt: skip
    best_RL = token_RL if "best" in needs else None
    stats = TokenStats(token_RL, confidence_RL, mask_RL, entropy_RL, margin_RL, best_RL)
    if draw is None or norm_R2 is None:
        return stats
    token_RL, confidence_RL, mask_drawn_RL = draw_tokens(draw, mask_id, norm_R2, mask_RL, wanted_RL, columns)
    drawn = replace(stats, token_RL=token_RL, confidence_RL=confidence_RL, mask_drawn_RL=mask_drawn_RL)
    return stats.where(drawn_RL, drawn)
