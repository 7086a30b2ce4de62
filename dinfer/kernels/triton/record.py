"""What a step records of its writes: which positions change, what the model said of the tokens, steps and events.

One launch each, where torch takes a dozen. None waits, so all go into a graph.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dinfer.core.terms.stats import Draw
from dinfer.kernels.triton.launch import PIECE, WARPS, early, follow

VOCAB_PIECE = 4096  # logits that a program looks at at a time
LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def _changed(
    live_ptr, broken_ptr, pos_ptr, old_ptr, new_ptr, masked_ptr, open_ptr, out_ptr, each, count,
    P: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    follow(EARLY)
    at = tl.program_id(0) * P + tl.arange(0, P)
    there = at < count
    live = tl.load(live_ptr + at // each, mask=there, other=0) != 0
    live = live & (tl.load(broken_ptr + at // each, mask=there, other=1) == 0)
    masked, opened = (tl.load(masked_ptr + at, mask=there, other=0) != 0), (tl.load(open_ptr + at, mask=there) != 0)
    other = tl.load(new_ptr + at, mask=there, other=0) != tl.load(old_ptr + at, mask=there, other=0)
    changes = live & ((masked != opened) | (other & ~opened))
    tl.store(out_ptr + at, tl.where(changes, tl.load(pos_ptr + at, mask=there, other=-1), -1), mask=there)


def changed(
    live_B: Tensor, broken_B: Tensor, pos_RL: Tensor, old_RL: Tensor, new_RL: Tensor, masked_RL: Tensor, open_RL: Tensor
) -> Tensor:
    """The positions of live lanes that a decision changes, -1 at others. int64 [R, L]"""
    given = (x.contiguous() for x in (live_B, broken_B, pos_RL, old_RL, new_RL, masked_RL, open_RL))
    out_RL, count = torch.empty_like(pos_RL, memory_format=torch.contiguous_format), pos_RL.numel()
    _changed[(triton.cdiv(count, PIECE),)](
        *given, out_RL, count // len(live_B), count, P=PIECE, num_warps=WARPS, **early(pos_RL)
    )
    return out_RL


@triton.jit
def _log_sum(logits_ptr, vocab, by, P: tl.constexpr):
    """The log-sum-exp of a row of logits times `by`. float32"""
    column = tl.arange(0, P)
    best, total = tl.full((P,), LOWEST, tl.float32), tl.zeros((P,), tl.float32)
    for first in range(0, vocab, P):
        at = first + column
        x = tl.load(logits_ptr + at, mask=at < vocab, other=float("-inf")).to(tl.float32) * by
        top = tl.maximum(best, x)
        total = total * tl.exp(best - top) + tl.exp(x - top)
        best = top
    most = tl.max(best, 0)
    return most + tl.log(tl.sum(total * tl.exp(best - most), 0))


@triton.jit
def _said(
    logits_ptr, drawn_ptr, scale_ptr, token_ptr, wanted_ptr, logit_ptr, sum_ptr, chance_ptr, length, vocab,
    WANTED: tl.constexpr, DRAWS: tl.constexpr, P: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    follow(EARLY)
    row = tl.program_id(0).to(tl.int64)
    wanted = tl.load(wanted_ptr + row) if WANTED else 1
    if wanted == 0:
        tl.store(logit_ptr + row, 0.0)
        tl.store(sum_ptr + row, 0.0)
        tl.store(chance_ptr + row, 0.0)
        return
    token = row * vocab + tl.minimum(tl.maximum(tl.load(token_ptr + row), 0), vocab - 1)
    tl.store(logit_ptr + row, tl.load(logits_ptr + token).to(tl.float32))
    tl.store(sum_ptr + row, _log_sum(logits_ptr + row * vocab, vocab, 1.0, P))
    chance = float("nan")
    if DRAWS:
        scale = tl.load(scale_ptr + row // length)
        if scale > 0:
            by = 1.0 / scale.to(tl.float32)
            own = tl.load(drawn_ptr + token).to(tl.float32) * by
            chance = own - _log_sum(drawn_ptr + row * vocab, vocab, by, P)
    tl.store(chance_ptr + row, chance)


def said(
    logits_RLV: Tensor, draw: Draw | None, token_RL: Tensor, wanted_RL: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The fields of `dinfer.core.step.record.Said` of these tokens, at least where wanted (None: all)."""
    (rows, length, vocab), logits_RLV = logits_RLV.shape, logits_RLV.contiguous()
    out = [logits_RLV.new_empty(rows, length, dtype=torch.float32) for _ in range(3)]
    drawn_RLV = logits_RLV if draw is None else draw.logits_RLV.contiguous()
    scale_R1 = logits_RLV if draw is None else draw.scale_R1.expand(rows, 1).contiguous()
    wanted = token_RL if wanted_RL is None else wanted_RL.contiguous()
    _said[(rows * length,)](
        logits_RLV, drawn_RLV, scale_R1, token_RL.contiguous(), wanted, *out, length, vocab,
        WANTED=wanted_RL is not None, DRAWS=draw is not None, P=min(VOCAB_PIECE, triton.next_power_of_2(vocab)),
        num_warps=4, **early(logits_RLV),
    )  # fmt: skip
    return out[0], out[1], out[2]


@triton.jit
def _keep(
    rows_ptr, slot_ptr, step_ptr, pos_ptr, open_ptr, logit_ptr, sum_ptr, drawn_ptr, each, capacity, count,
    CHANCES: tl.constexpr, P: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    follow(EARLY)
    at = tl.program_id(0) * P + tl.arange(0, P)
    pos = tl.load(pos_ptr + at, mask=at < count, other=-1)
    there = pos >= 0
    to = tl.load(slot_ptr + at // each, mask=there, other=0) * (4 * capacity) + pos
    now = tl.load(step_ptr + at // each, mask=there, other=0).to(tl.int32)
    now = tl.where(tl.load(open_ptr + at, mask=there, other=0) != 0, -1, now)
    first = tl.load(rows_ptr + to + capacity, mask=there, other=0)
    tl.store(rows_ptr + to, now, mask=there)
    tl.store(rows_ptr + to + capacity, tl.where(first < 0, now, first), mask=there)
    if CHANCES:
        chance = tl.load(logit_ptr + at, mask=there, other=0.0) - tl.load(sum_ptr + at, mask=there, other=0.0)
        drawn = tl.load(drawn_ptr + at, mask=there, other=0.0)
        tl.store(rows_ptr + to + 2 * capacity, chance.to(tl.int32, bitcast=True), mask=there)
        tl.store(rows_ptr + to + 3 * capacity, drawn.to(tl.int32, bitcast=True), mask=there)


def keep(
    rows_N4S: Tensor, slot_B: Tensor, step_B: Tensor, pos_BX: Tensor, open_BX: Tensor,
    said: tuple[Tensor, Tensor, Tensor] | None,
) -> None:  # fmt: skip
    """Notes the step that wrote each position last and first. int32

    With `said`, the fields of `Said`, also the bits of its log-probability by the model's own logits, and as drawn.
    """
    told = (pos_BX,) * 3 if said is None else tuple(x_BX.contiguous() for x_BX in said)
    given, count = (x.contiguous() for x in (slot_B, step_B, pos_BX, open_BX)), pos_BX.numel()
    _keep[(triton.cdiv(count, PIECE),)](
        rows_N4S, *given, *told, pos_BX.shape[1], rows_N4S.shape[2], count, CHANCES=said is not None, P=PIECE,
        num_warps=WARPS, **early(pos_BX),
    )  # fmt: skip


@triton.jit
def _log(
    event_ptr, count_ptr, slot_ptr, step_ptr, pos_ptr, old_ptr, new_ptr, masked_ptr, open_ptr, logit_ptr, sum_ptr,
    scratch, lanes, each, room, B: tl.constexpr, X: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    follow(EARLY)
    lane, other, column = tl.program_id(0), tl.arange(0, B), tl.arange(0, X)
    slot = tl.load(slot_ptr + lane)
    own = tl.load(slot_ptr + other, mask=other < lanes, other=-1) == slot
    if (slot == scratch) | (tl.sum((own & (other < lane)).to(tl.int32), 0) > 0):
        return  # the first lane of a slot writes for all
    last = tl.max(tl.where(own, other, 0), 0)
    count = tl.load(count_ptr + slot)
    for now in range(lane, last + 1):
        if tl.load(slot_ptr + now) == slot:
            at = now * each + column
            pos = tl.load(pos_ptr + at, mask=column < each, other=-1)
            changes = (pos >= 0).to(tl.int64)
            place = count + tl.cumsum(changes, 0) - 1
            there = (pos >= 0) & (place < room)
            old, new = tl.load(old_ptr + at, mask=there, other=0), tl.load(new_ptr + at, mask=there, other=0)
            old = tl.where(tl.load(masked_ptr + at, mask=there, other=0) != 0, -1 - old, old)
            new = tl.where(tl.load(open_ptr + at, mask=there, other=0) != 0, -1 - new, new)
            chance = tl.load(logit_ptr + at, mask=there, other=0.0) - tl.load(sum_ptr + at, mask=there, other=0.0)
            to = event_ptr + (slot * (room + 1) + place) * 5
            tl.store(to, tl.load(step_ptr + now + column * 0).to(tl.int32), mask=there)
            tl.store(to + 1, pos.to(tl.int32), mask=there)
            tl.store(to + 2, old.to(tl.int32), mask=there)
            tl.store(to + 3, new.to(tl.int32), mask=there)
            tl.store(to + 4, chance.to(tl.int32, bitcast=True), mask=there)
            count += tl.sum(changes, 0)
    tl.store(count_ptr + slot, count)


def log(
    event_NE5: Tensor, count_N: Tensor, slot_B: Tensor, step_B: Tensor, lanes: tuple[Tensor, ...],
    said: tuple[Tensor, Tensor],
) -> None:  # fmt: skip
    """Appends the changes of each lane to the events of its slot, and counts them.

    The last event of a slot is scratch, and so is the last slot: lanes without a row are all of that one.
    `lanes`: positions, tokens before and after, and which were open, and are. [B, X] each. `said`: logits and log-sums
    of the new tokens.
    """
    given = (x.contiguous() for x in (slot_B, step_B, *lanes, *said))
    count, each = lanes[0].shape
    _log[(count,)](
        event_NE5, count_N, *given, len(count_N) - 1, count, each, event_NE5.shape[1] - 1,
        B=triton.next_power_of_2(count), X=triton.next_power_of_2(each), num_warps=min(max(each // 64, 1), 8),
        **early(slot_B),
    )  # fmt: skip
