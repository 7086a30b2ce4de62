"""Sets of states over the active positions of a row, and the choices they admit; see `structure.kernels.languages`.

A program follows one lane from position to position. The sets lie in global memory, a byte for a state, and the threads
of a program meet at a barrier before they read what others wrote. `held` are the `LaneLanguages` of a step, `line` is a
`Line` of `structure.kernels.lines`.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dinfer.kernels.triton.launch import early, follow

MOST = 16384  # pairs, edges or states at a time
SPARE = tl.constexpr(16)  # states that a set has more room for; none is ever in it
OPEN, OUTSIDE = tl.constexpr(-1), tl.constexpr(-2)  # codes of a position; the others are the class of its token


@triton.jit
def _language(place_ptr, meta_ptr, lane, width):
    """What `meta_G8` says of the lane's language. `width`: the states that sets have room for, and `SPARE`. Lanes
    without a constraint may stand at a language that has more."""
    meta_ptr += tl.load(place_ptr + lane) * 8
    states = tl.minimum(tl.load(meta_ptr), width - SPARE).to(tl.int32)
    return states, tl.load(meta_ptr + 2), tl.load(meta_ptr + 3), tl.load(meta_ptr + 4).to(tl.int32)


@triton.jit
def _class_of(token, class_ptr, place_ptr, lane, vocab, mask):
    token = tl.minimum(tl.maximum(token, 0), vocab - 1)
    return tl.load(class_ptr + tl.load(place_ptr + lane) * vocab + token, mask=mask, other=0).to(tl.int32)


@triton.jit
def _placed(
    row_ptr, slot_ptr, pos_ptr, place_ptr, live_ptr, outside_ptr, state_ptr, room_ptr, columns, active,
    LINE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    follow(EARLY)
    lane, x_X = tl.program_id(0).to(tl.int64), tl.arange(0, LINE)
    row_ptr += tl.load(slot_ptr + lane) * columns
    place, first, until = tl.load(row_ptr), tl.load(row_ptr + 2), tl.load(row_ptr + 3)
    at, there = lane * active + x_X, x_X < active
    pos = tl.load(pos_ptr + at, mask=there, other=-1)
    tl.store(outside_ptr + at, ((pos < first) | (pos >= until) | (place < 0)).to(tl.int8), mask=there)
    tl.store(place_ptr + lane, tl.maximum(place, 0))
    tl.store(live_ptr + lane, (place >= 0).to(tl.int8))
    tl.store(state_ptr + lane, tl.load(row_ptr + 1))
    tl.store(room_ptr + lane, tl.maximum(until - tl.maximum(tl.max(pos, 0) + 1, first), 0))


@triton.jit
def _pairs(pair_ptr, entry, pairs, states, width):
    """Neighbouring states, in one number. Where there are none it is the spare state twice, which is in no set."""
    pair = tl.load(pair_ptr + entry, mask=entry < pairs, other=-1)
    counts = ((pair & 0xFFFF) < states) & (pair >= 0) & (pair >> 16 < states)
    return tl.where(counts, pair, (width - 1) * 0x10001)


@triton.jit
def _spread(from_ptr, to_ptr, pair, back):
    first, second = pair & 0xFFFF, pair >> 16
    held = tl.load(from_ptr + tl.where(back > 0, second, first))
    tl.store(to_ptr + tl.where(back > 0, first, second), held, mask=held != 0)


@triton.jit
def _sweep(
    base_ptr, code_ptr, next_ptr, pair_ptr, begin, end, back, states, pairs, width,
    PIECE: tl.constexpr, SPAN: tl.constexpr, CLEAR: tl.constexpr,
):  # fmt: skip
    """Steps over the positions [begin, end), from the last on if `back` is 1. CLEAR: sets are not empty at first."""
    entry, state = tl.arange(0, PIECE), tl.arange(0, SPAN)
    pair = _pairs(pair_ptr, entry, pairs, states, width)  # most languages have no more
    onward, x = 1 - 2 * back, begin + back * (end - 1 - begin)
    code = tl.load(code_ptr + x, mask=begin < end, other=0)
    for done in range(end - begin):
        ahead = tl.load(code_ptr + x + onward, mask=done + 1 < end - begin, other=0)
        from_ptr, to_ptr = base_ptr + (x + back) * width, base_ptr + (x + 1 - back) * width
        if CLEAR:
            for at in range(0, states, SPAN):
                tl.store(to_ptr + at + state, tl.zeros((SPAN,), tl.int8), mask=at + state < states)
            tl.debug_barrier()
        if code == OPEN:
            _spread(from_ptr, to_ptr, pair, back)
            for at in range(PIECE, pairs, PIECE):
                _spread(from_ptr, to_ptr, _pairs(pair_ptr, at + entry, pairs, states, width), back)
        else:
            for at in range(0, states, SPAN):
                first, inside = at + state, at + state < states
                second = first
                if code != OUTSIDE:
                    second = tl.load(next_ptr + code * states + first, mask=inside, other=-1).to(tl.int32)
                inside &= (second >= 0) & (second < states)
                held = tl.load(from_ptr + tl.where(back > 0, second, first), mask=inside, other=0)
                tl.store(to_ptr + tl.where(back > 0, first, second), held, mask=inside & (held != 0))
        tl.debug_barrier()
        code = ahead
        x += onward


@triton.jit
def _sweeps(
    sets_ptr, code_ptr, token_ptr, open_ptr, outside_ptr, state_ptr, room_ptr, commit_ptr, choice_ptr,
    place_ptr, class_ptr, distance_ptr, next_ptr, pair_ptr, meta_ptr,
    lanes, active, width, vocab, distances,
    LINE: tl.constexpr, PIECE: tl.constexpr, SPAN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Plane 0: the states that a position can be entered in; 1: those that can be completed; 2 and 3: the same, once a
    choice is written. Leaves the codes of a line, and of one with the choice."""
    follow(EARLY)
    lane, plane = tl.program_id(0).to(tl.int64), tl.program_id(1)
    states, first_next, first_pair, pairs = _language(place_ptr, meta_ptr, lane, width)
    base_ptr, at_lane, back = sets_ptr + (plane * lanes + lane) * (active + 1) * width, lane * active, plane % 2
    code_ptr += (plane * lanes + lane) * active
    state, x_X = tl.arange(0, SPAN), tl.arange(0, LINE)
    there_X = x_X < active
    token_X = tl.load(token_ptr + at_lane + x_X, mask=there_X, other=0)
    open_X = tl.load(open_ptr + at_lane + x_X, mask=there_X, other=0) != 0
    if plane >= 2:
        written_X = tl.load(commit_ptr + at_lane + x_X, mask=there_X, other=0) != 0
        token_X = tl.where(written_X, tl.load(choice_ptr + at_lane + x_X, mask=there_X, other=0), token_X)
        open_X = open_X & (written_X == 0)
    code_X = tl.where(open_X, OPEN, _class_of(token_X, class_ptr, place_ptr, lane, vocab, there_X))
    code_X = tl.where(tl.load(outside_ptr + at_lane + x_X, mask=there_X, other=0) != 0, OUTSIDE, code_X)
    tl.store(code_ptr + x_X, code_X, mask=there_X)
    start, room = tl.load(state_ptr + lane), tl.load(room_ptr + lane)
    distance_ptr += tl.load(place_ptr + lane) * distances
    for at in range(0, width, SPAN):
        inside = at + state < states
        near = inside & (tl.load(distance_ptr + at + state, mask=inside, other=0) <= room)
        known = tl.where(back > 0, near, inside & (at + state == start))
        tl.store(base_ptr + back * active * width + at + state, known.to(tl.int8), mask=at + state < width)
    empty_ptr = base_ptr + (1 - back) * width
    for at in range(0, active * width, SPAN):
        tl.store(empty_ptr + at + state, tl.zeros((SPAN,), tl.int8), mask=at + state < active * width)
    tl.debug_barrier()
    _sweep(
        base_ptr, code_ptr, next_ptr + first_next, pair_ptr + first_pair, 0, active, back, states, pairs, width,
        PIECE, SPAN, False,
    )  # fmt: skip


@triton.jit
def _allowed(
    sets_ptr, code_ptr, whole_ptr, out_ptr, place_ptr, edge_ptr, size_ptr, lowest_ptr, meta_ptr,
    choice_ptr, admitted_ptr, written_ptr, token_ptr, forced_ptr, text_ptr, only_ptr,
    lanes, active, width, most,
    PIECE: tl.constexpr, CLASSES: tl.constexpr, FORCED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Marks the classes of one position. FORCED: says what is written there, too, once what is admitted is written:
    planes 2 and 3 have the whole choice, 0 and 1 a part of it."""
    follow(EARLY)
    lane, x, entry, own = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, PIECE), tl.arange(0, CLASSES)
    at_x = lane * active + x
    out_ptr += at_x * most
    tl.store(out_ptr + own, tl.zeros((CLASSES,), tl.int8), mask=own < most)
    place = tl.load(place_ptr + lane)
    meta_ptr += place * 8
    states, classes = tl.minimum(tl.load(meta_ptr), width - SPARE).to(tl.int32), tl.load(meta_ptr + 1).to(tl.int32)
    edge_ptr += tl.load(meta_ptr + 5) * 3
    edges = tl.load(meta_ptr + 6).to(tl.int32)
    plane = 0
    if FORCED:
        plane = tl.where(tl.load(whole_ptr + lane) != 0, 2, 0)
    enter_ptr = sets_ptr + ((plane * lanes + lane) * (active + 1) + x) * width
    leave_ptr = sets_ptr + (((plane + 1) * lanes + lane) * (active + 1) + x + 1) * width
    tl.debug_barrier()
    for at in range(0, edges, PIECE):
        inside, entry_ptr = at + entry < edges, edge_ptr + (at + entry) * 3
        source = tl.load(entry_ptr, mask=inside, other=0).to(tl.int32)
        by = tl.load(entry_ptr + 1, mask=inside, other=0).to(tl.int32)
        target = tl.load(entry_ptr + 2, mask=inside, other=0).to(tl.int32)
        inside &= (source >= 0) & (source < states) & (target >= 0) & (target < states) & (by >= 0) & (by < classes)
        held = tl.load(enter_ptr + source, mask=inside, other=0) & tl.load(leave_ptr + target, mask=inside, other=0)
        tl.store(out_ptr + by, held, mask=inside & (held != 0))
    if FORCED:
        tl.debug_barrier()
        marked = tl.load(out_ptr + own, mask=own < most, other=0) != 0
        stop = classes - 2  # the last two classes are stop tokens and other tail tokens
        tokens = tl.sum(tl.where(marked, tl.load(size_ptr + place * most + own, mask=own < most, other=0), 0), 0)
        first = tl.min(tl.where(marked, own, CLASSES), 0)
        ends = (first >= stop) & (first < CLASSES)
        code = tl.load(code_ptr + plane * lanes * active + at_x)
        only = (code != OUTSIDE) & ((tokens == 1) | ends)
        forced = only & (code == OPEN)
        best = tl.where(ends, stop, tl.where(first < CLASSES, first, 0))
        admitted = tl.load(admitted_ptr + at_x) != 0
        lowest, choice = tl.load(lowest_ptr + place * most + best).to(tl.int64), tl.load(choice_ptr + at_x)
        tl.store(written_ptr + at_x, (admitted | forced).to(tl.int8))
        tl.store(token_ptr + at_x, tl.where(forced, lowest, choice))
        tl.store(forced_ptr + at_x, forced.to(tl.int8))
        tl.store(text_ptr + at_x, (forced & (best != stop)).to(tl.int8))
        tl.store(only_ptr + at_x, only.to(tl.int8))


@triton.jit
def _admitted(
    sets_ptr, code_ptr, room_ptr, commit_ptr, outside_ptr, confidence_ptr, out_ptr, all_ptr,
    place_ptr, distance_ptr, next_ptr, pair_ptr, meta_ptr,
    lanes, active, width, distances, LINE: tl.constexpr, PIECE: tl.constexpr, SPAN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Takes the whole choice, or tries its positions by falling confidence. A position that is taken changes the sets
    on both sides, and its code."""
    follow(EARLY)
    lane, state, x_X = tl.program_id(0).to(tl.int64), tl.arange(0, SPAN), tl.arange(0, LINE)
    states, first_next, first_pair, pairs = _language(place_ptr, meta_ptr, lane, width)
    next_ptr += first_next
    pair_ptr += first_pair
    distance_ptr += tl.load(place_ptr + lane) * distances
    line, plane, room = lane * active, lanes * (active + 1) * width, tl.load(room_ptr + lane)
    enter_ptr = sets_ptr + lane * (active + 1) * width
    leave_ptr, last_ptr = enter_ptr + plane, enter_ptr + 2 * plane + active * width
    chosen_ptr = code_ptr + 2 * lanes * active + line
    code_ptr += line
    asked_X = tl.load(commit_ptr + line + x_X, mask=x_X < active, other=0) != 0
    left_X = asked_X & (tl.load(outside_ptr + line + x_X, mask=x_X < active, other=0) == 0)
    whole = 0
    for at in range(0, states, SPAN):
        inside = at + state < states
        near = tl.load(distance_ptr + at + state, mask=inside, other=0) <= room
        ends = (tl.load(last_ptr + at + state, mask=inside, other=0) != 0) & near & inside
        whole += tl.sum(ends.to(tl.int32), 0)
    tl.store(all_ptr + lane, whole)
    tl.store(out_ptr + line + x_X, (asked_X & ((left_X == 0) | (whole > 0))).to(tl.int8), mask=x_X < active)
    if whole == 0:
        tl.debug_barrier()
        confidence_X = tl.load(confidence_ptr + line + x_X, mask=left_X, other=0)
        for _ in range(tl.sum(left_X.to(tl.int32), 0)):
            best = tl.max(tl.where(left_X, confidence_X, -1.0), 0)
            x = tl.min(tl.where(left_X & (confidence_X == best), x_X, LINE), 0)
            left_X = left_X & (x_X != x)
            code, fits = tl.load(chosen_ptr + x), 0
            for at in range(0, states, SPAN):
                first, inside = at + state, at + state < states
                second = tl.load(next_ptr + code * states + first, mask=inside, other=-1).to(tl.int32)
                inside &= (second >= 0) & (second < states)
                held = tl.load(enter_ptr + x * width + first, mask=inside, other=0) != 0
                held &= tl.load(leave_ptr + (x + 1) * width + second, mask=inside, other=0) != 0
                fits += tl.sum((held & inside).to(tl.int32), 0)
            if fits > 0:
                tl.store(out_ptr + line + x, 1)
                tl.store(code_ptr + x, code)
                tl.debug_barrier()
                _sweep(enter_ptr, code_ptr, next_ptr, pair_ptr, x, active, 0, states, pairs, width, PIECE, SPAN, True)
                _sweep(leave_ptr, code_ptr, next_ptr, pair_ptr, 0, x + 1, 1, states, pairs, width, PIECE, SPAN, True)


@triton.jit
def _leave(
    row_ptr, slot_ptr, pos_ptr, token_ptr, outside_ptr, text_ptr, state_ptr, start_ptr, after_ptr, live_ptr, still_ptr,
    place_ptr, class_ptr, next_ptr, meta_ptr, columns, active, vocab, LINE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Only the positions that are passed cost time: most steps pass none."""
    follow(EARLY)
    lane, x_X = tl.program_id(0).to(tl.int64), tl.arange(0, LINE)
    states, first_next, _, _ = _language(place_ptr, meta_ptr, lane, 1 << 20)
    next_ptr += first_next
    row_ptr += tl.load(slot_ptr + lane) * columns
    at, there, state = lane * active + x_X, x_X < active, tl.load(state_ptr + lane)
    start, after = tl.load(start_ptr + lane), tl.load(after_ptr + lane)
    pos_X = tl.load(pos_ptr + at, mask=there, other=-1)
    passed_X = (pos_X >= 0) & (pos_X < after) & (tl.load(outside_ptr + at, mask=there, other=1) == 0)
    token_X = tl.load(token_ptr + at, mask=passed_X, other=0)
    class_X = _class_of(token_X, class_ptr, place_ptr, lane, vocab, passed_X)
    for _ in range(tl.sum(passed_X.to(tl.int32), 0)):
        x = tl.min(tl.where(passed_X, x_X, LINE), 0)
        passed_X = passed_X & (x_X != x)
        then = tl.load(next_ptr + tl.sum(tl.where(x_X == x, class_X, 0), 0) * states + state).to(tl.int64)
        state = tl.where((then >= 0) & (then < states), then, state)
    live = tl.load(live_ptr + lane) != 0
    still = live & (tl.load(still_ptr + lane) != 0)
    forced = tl.sum((tl.load(text_ptr + at, mask=there, other=0) != 0).to(tl.int64), 0)
    tl.store(row_ptr + 4, tl.load(row_ptr + 4) + forced, mask=live)
    tl.store(row_ptr + 1, state, mask=still)
    tl.store(row_ptr + 5, tl.zeros((), tl.int64), mask=still & (after > start))


@triton.jit
def _fits(place_ptr, class_ptr, allowed_ptr, at, token, lane_places, vocab, classed, most):
    class_ptr += tl.load(place_ptr + at // lane_places) * classed
    own = tl.load(class_ptr + token, mask=token < vocab, other=0).to(tl.int32)
    return tl.load(allowed_ptr + at * most + own, mask=token < vocab, other=0) != 0


@triton.jit
def _masked(
    logits_ptr, place_ptr, class_ptr, allowed_ptr, outside_ptr, left_ptr, lane_places, vocab, classed, most, keep,
    PIECE: tl.constexpr, LEFT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """LEFT: says which positions have a token left."""
    follow(EARLY)
    at, token = tl.program_id(0).to(tl.int64), tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    if tl.load(outside_ptr + at) == 0:
        fits = _fits(place_ptr, class_ptr, allowed_ptr, at, token, lane_places, vocab, classed, most)
        out_ptr, others = logits_ptr + at * vocab + token, (token < vocab) & (token != keep)
        tl.store(out_ptr, float("-inf"), mask=others & ~fits)
        if LEFT:
            left = tl.load(out_ptr, mask=others & fits, other=float("-inf")) != float("-inf")
            tl.store(left_ptr + at, 1, mask=tl.max(left.to(tl.int32), 0) > 0)


@triton.jit
def _revived(
    logits_ptr, place_ptr, class_ptr, allowed_ptr, outside_ptr, left_ptr, lane_places, vocab, classed, most,
    PIECE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    follow(EARLY)
    at, token = tl.program_id(0).to(tl.int64), tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    if (tl.load(outside_ptr + at) == 0) & (tl.load(left_ptr + at) == 0):
        fits = _fits(place_ptr, class_ptr, allowed_ptr, at, token, lane_places, vocab, classed, most)
        tl.store(logits_ptr + at * vocab + token, 0.0, mask=fits & (token < vocab))


def placed(row_N6: Tensor, slot_B: Tensor, pos_BX: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See `dinfer.structure.kernels.languages.placed`."""
    place_B, state_B, room_B = (torch.empty_like(slot_B) for _ in range(3))
    live_B, outside_BX = (torch.empty_like(x, dtype=torch.bool) for x in (slot_B, pos_BX))
    flags = (x.view(torch.int8) for x in (live_B, outside_BX))
    active = pos_BX.shape[1]
    _placed[(len(slot_B),)](
        row_N6, slot_B, pos_BX.contiguous(), place_B, *flags, state_B, room_B, row_N6.shape[1], active,
        LINE=triton.next_power_of_2(active), num_warps=1, **early(slot_B),
    )  # fmt: skip
    return place_B, live_B, outside_BX, state_B, room_B


def _sizes(states: int) -> dict[str, int]:
    """How many pairs, of which a language has some three for each state, a program takes at a time, how many states,
    and its warps."""
    piece = min(max(triton.next_power_of_2(3 * states), 256), MOST)
    return {"PIECE": piece, "SPAN": min(triton.next_power_of_2(states), piece), "num_warps": min(piece // 64, 32)}


def _sets(held: Any, line: Any, *chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Forward and backward sets; with a choice (commits, tokens) also those once it is written.

    bool [2 or 4, B, X + 1, Q + SPARE], and the codes of the positions, int32 [2 or 4, B, X]
    """
    languages, place_B = held.languages, held.language_B
    lanes, active = line.token_BX.shape
    commit_BX, choice_BX = chosen or (line.open_BX, line.token_BX)
    planes = (4 if chosen else 2), lanes
    sets = torch.empty(*planes, active + 1, held.states + SPARE.value, dtype=torch.bool, device=place_B.device)
    codes = torch.empty(*planes, active, dtype=torch.int32, device=place_B.device)
    read = (
        line.token_BX, line.open_BX, line.outside_BX, line.state_B, line.room_B, commit_BX, choice_BX, place_B,
        languages.class_GV, languages.distance_GQ, languages.next_Y, languages.pair_Y2.view(torch.int32),
        languages.meta_G8,
    )  # fmt: skip
    _sweeps[(lanes, len(sets))](
        sets.view(torch.int8), codes, *(t.contiguous() for t in read), lanes, active, sets.shape[-1],
        languages.class_GV.shape[1], languages.distance_GQ.shape[1],
        LINE=triton.next_power_of_2(active), **_sizes(held.states), **early(place_B),
    )  # fmt: skip
    return sets, codes


def allowed(held: Any, line: Any) -> Tensor:
    """See `dinfer.structure.kernels.languages.Sweeps.allowed`."""
    return _marks(held, *_sets(held, line))


def _marks(held: Any, sets: Tensor, codes: Tensor, *settled: Tensor) -> Tensor:
    """The allowed classes. `settled`: what `_allowed` reads of a choice, and where it says what is written."""
    languages, place_B = held.languages, held.language_B
    _, lanes, active = codes.shape
    sizes, most = _sizes(held.states), languages.size_GC.shape[1]
    allowed_BXC = torch.empty(lanes, active, most, dtype=torch.bool, device=place_B.device)
    whole_B, *more = (x.view(torch.int8) if x.dtype == torch.bool else x for x in settled or (place_B,) * 8)
    _allowed[(lanes, active)](
        sets.view(torch.int8), codes, whole_B, allowed_BXC.view(torch.int8), place_B, languages.edge_Y3,
        languages.size_GC, languages.token_GC, languages.meta_G8, *more, lanes, active, sets.shape[-1], most,
        PIECE=sizes["PIECE"], CLASSES=triton.next_power_of_2(most), FORCED=bool(settled),
        num_warps=sizes["num_warps"], **early(place_B),
    )  # fmt: skip
    return allowed_BXC


def settled(held: Any, line: Any, commit_BX: Tensor, token_BX: Tensor, confidence_BX: Tensor) -> tuple[Tensor, ...]:
    """See `dinfer.structure.kernels.languages.Sweeps.settled`."""
    languages, place_B = held.languages, held.language_B
    lanes, active = line.token_BX.shape
    token_BX = token_BX.contiguous()
    sets, codes = _sets(held, line, commit_BX, token_BX)
    admitted_BX = torch.empty_like(commit_BX, memory_format=torch.contiguous_format)
    whole_B = torch.empty(lanes, dtype=torch.int32, device=place_B.device)
    read = (
        line.room_B, commit_BX, line.outside_BX, confidence_BX, admitted_BX, whole_B, place_B,
        languages.distance_GQ, languages.next_Y, languages.pair_Y2.view(torch.int32), languages.meta_G8,
    )  # fmt: skip
    _admitted[(lanes,)](
        sets.view(torch.int8), codes, *(t.contiguous() for t in read),
        lanes, active, sets.shape[-1], languages.distance_GQ.shape[1],
        LINE=triton.next_power_of_2(active), **_sizes(held.states), **early(place_B),
    )  # fmt: skip
    written_BX, forced_BX, text_BX, only_BX = (torch.empty_like(admitted_BX) for _ in range(4))
    found = written_BX, torch.empty_like(token_BX), forced_BX, text_BX, only_BX
    _marks(held, sets, codes, whole_B, token_BX, admitted_BX, *found)
    return found


def leave(
    held: Any, row_N6: Tensor, slot_B: Tensor, line: Any, token_BX: Tensor, pos_BX: Tensor, text_BX: Tensor,
    *regions: Tensor,
) -> None:  # fmt: skip
    """See `dinfer.structure.kernels.languages.Sweeps.leave`."""
    languages = held.languages
    read = (
        slot_B, pos_BX, token_BX, line.outside_BX, text_BX, line.state_B, *regions, held.language_B,
        languages.class_GV, languages.next_Y, languages.meta_G8,
    )  # fmt: skip
    columns, active, vocab = row_N6.shape[1], token_BX.shape[1], languages.class_GV.shape[1]
    _leave[(len(slot_B),)](
        row_N6, *(t.contiguous() for t in read), columns, active, vocab, LINE=triton.next_power_of_2(active),
        num_warps=1, **early(slot_B),
    )  # fmt: skip


def masked(held: Any, logits_RLV: Tensor, allowed_RLC: Tensor, outside_RL: Tensor, keep: int, revive: bool) -> Tensor:
    """See `dinfer.structure.kernels.languages.Sweeps.masked`."""
    place_B, class_GV = held.language_B, held.languages.class_GV
    (rows, length, vocab), piece = logits_RLV.shape, 1024
    logits_RLV = logits_RLV.contiguous()
    read = place_B, class_GV, allowed_RLC.contiguous().view(torch.int8), outside_RL.contiguous()
    left_RL = torch.zeros_like(outside_RL, dtype=torch.int8) if revive else outside_RL
    sizes = rows * length // len(place_B), vocab, class_GV.shape[1], allowed_RLC.shape[-1]
    grid, options = (rows * length, triton.cdiv(vocab, piece)), {"PIECE": piece, "num_warps": 4, **early(logits_RLV)}
    _masked[grid](logits_RLV, *read, left_RL, *sizes, keep, LEFT=revive, **options)
    if revive:
        _revived[grid](logits_RLV, *read, left_RL, *sizes, **options)
    return logits_RLV
