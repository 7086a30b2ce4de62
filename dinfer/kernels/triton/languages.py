"""Sets of states over the active positions of a row, and the choices that they admit; see `dinfer.kernels.languages`.

A program follows one lane from position to position. The sets lie in global memory, a byte for a state, and the threads
of a program meet at a barrier before they read what others wrote.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dinfer.kernels.lines import Languages, Line

PIECE, WARPS = 256, 4  # pairs, edges or states at a time


@triton.jit
def _language(place_ptr, meta_ptr, lane):
    """What `meta_G8` says of the lane's language."""
    meta_ptr += tl.load(place_ptr + lane) * 8
    states, classes = tl.load(meta_ptr).to(tl.int32), tl.load(meta_ptr + 1)
    return states, classes, tl.load(meta_ptr + 2), tl.load(meta_ptr + 3), tl.load(meta_ptr + 4).to(tl.int32)


@triton.jit
def _class_of(token, class_ptr, place_ptr, lane, vocab):
    token = tl.minimum(tl.maximum(token, 0), vocab - 1)
    return tl.load(class_ptr + tl.load(place_ptr + lane) * vocab + token).to(tl.int64)


@triton.jit
def _step(
    from_ptr, to_ptr, outside, opened, next_ptr, pair_ptr, states, classes, pairs,
    BACK: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """The set on the other side of a position. `next_ptr`: the state behind the first one by the position's token."""
    entry = tl.arange(0, PIECE)
    if outside:
        for at in range(0, states, PIECE):
            tl.store(
                to_ptr + at + entry, tl.load(from_ptr + at + entry, mask=at + entry < states), mask=at + entry < states
            )
    elif opened:
        for at in range(0, pairs, PIECE):
            inside = at + entry < pairs
            first = tl.load(pair_ptr + (at + entry) * 2, mask=inside, other=0).to(tl.int32)
            second = tl.load(pair_ptr + (at + entry) * 2 + 1, mask=inside, other=0).to(tl.int32)
            inside &= (first >= 0) & (first < states) & (second >= 0) & (second < states)
            source, target = (second, first) if BACK else (first, second)
            held = tl.load(from_ptr + source, mask=inside, other=0) != 0
            tl.store(to_ptr + target, held.to(tl.int8), mask=held & inside)
    else:
        for at in range(0, states, PIECE):
            first, inside = at + entry, at + entry < states
            second = tl.load(next_ptr + first * classes, mask=inside, other=-1).to(tl.int32)
            inside &= (second >= 0) & (second < states)
            source, target = (second, first) if BACK else (first, second)
            held = tl.load(from_ptr + source, mask=inside, other=0) != 0
            tl.store(to_ptr + target, held.to(tl.int8), mask=held & inside)
    tl.debug_barrier()


@triton.jit
def _sweeps(
    sets_ptr, token_ptr, open_ptr, outside_ptr, state_ptr, room_ptr, commit_ptr, choice_ptr,
    place_ptr, class_ptr, distance_ptr, next_ptr, pair_ptr, meta_ptr,
    lanes, active, width, vocab, distances, PIECE: tl.constexpr,
):  # fmt: skip
    """Plane 0: the states that a position can be entered in; 1: those that can be completed; 2: as 0, once a choice is
    written. The planes are empty at first."""
    lane, plane = tl.program_id(0).to(tl.int64), tl.program_id(1)
    states, classes, first_next, first_pair, pairs = _language(place_ptr, meta_ptr, lane)
    base_ptr, at_lane = sets_ptr + (plane * lanes + lane) * (active + 1) * width, lane * active
    next_ptr += first_next
    pair_ptr += first_pair * 2
    entry = tl.arange(0, PIECE)
    if plane == 1:
        distance_ptr += tl.load(place_ptr + lane) * distances
        room = tl.load(room_ptr + lane)
        for at in range(0, states, PIECE):
            near = tl.load(distance_ptr + at + entry, mask=at + entry < states, other=0) <= room
            tl.store(base_ptr + active * width + at + entry, near.to(tl.int8), mask=at + entry < states)
        tl.debug_barrier()
        for done in range(active):
            x = active - 1 - done
            token = tl.load(token_ptr + at_lane + x)
            _step(
                base_ptr + (x + 1) * width, base_ptr + x * width, tl.load(outside_ptr + at_lane + x) != 0,
                tl.load(open_ptr + at_lane + x) != 0, next_ptr + _class_of(token, class_ptr, place_ptr, lane, vocab),
                pair_ptr, states, classes, pairs, True, PIECE,
            )  # fmt: skip
    else:
        tl.store(base_ptr + tl.load(state_ptr + lane), 1)
        tl.debug_barrier()
        for x in range(active):
            token, opened = tl.load(token_ptr + at_lane + x), tl.load(open_ptr + at_lane + x) != 0
            if plane == 2:
                written = tl.load(commit_ptr + at_lane + x) != 0
                token = tl.where(written, tl.load(choice_ptr + at_lane + x), token)
                opened = opened & (written == 0)
            _step(
                base_ptr + x * width, base_ptr + (x + 1) * width, tl.load(outside_ptr + at_lane + x) != 0, opened,
                next_ptr + _class_of(token, class_ptr, place_ptr, lane, vocab),
                pair_ptr, states, classes, pairs, False, PIECE,
            )  # fmt: skip


@triton.jit
def _emptied(set_ptr, states, PIECE: tl.constexpr):
    entry = tl.arange(0, PIECE)
    for at in range(0, states, PIECE):
        tl.store(set_ptr + at + entry, tl.zeros((PIECE,), tl.int8), mask=at + entry < states)
    tl.debug_barrier()


@triton.jit
def _allowed(
    sets_ptr, out_ptr, place_ptr, edge_ptr, meta_ptr, lanes, active, width, most, PIECE: tl.constexpr
):  # fmt: skip
    """Marks the classes of one position. None is marked at first."""
    lane, x, entry = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, PIECE)
    meta_ptr += tl.load(place_ptr + lane) * 8
    states, classes = tl.load(meta_ptr).to(tl.int32), tl.load(meta_ptr + 1).to(tl.int32)
    edge_ptr += tl.load(meta_ptr + 5) * 3
    edges = tl.load(meta_ptr + 6).to(tl.int32)
    enter_ptr = sets_ptr + (lane * (active + 1) + x) * width
    leave_ptr = sets_ptr + ((lanes + lane) * (active + 1) + x + 1) * width
    out_ptr += (lane * active + x) * most
    for at in range(0, edges, PIECE):
        inside, entry_ptr = at + entry < edges, edge_ptr + (at + entry) * 3
        source = tl.load(entry_ptr, mask=inside, other=0).to(tl.int32)
        own = tl.load(entry_ptr + 1, mask=inside, other=0).to(tl.int32)
        target = tl.load(entry_ptr + 2, mask=inside, other=0).to(tl.int32)
        inside &= (source >= 0) & (source < states) & (target >= 0) & (target < states) & (own >= 0) & (own < classes)
        held = tl.load(enter_ptr + source, mask=inside, other=0) & tl.load(leave_ptr + target, mask=inside, other=0)
        tl.store(out_ptr + own, held, mask=inside & (held != 0))


@triton.jit
def _admitted(
    sets_ptr, token_ptr, open_ptr, outside_ptr, room_ptr, commit_ptr, choice_ptr, order_ptr, out_ptr,
    place_ptr, class_ptr, distance_ptr, next_ptr, pair_ptr, meta_ptr,
    lanes, active, width, vocab, distances, PIECE: tl.constexpr,
):  # fmt: skip
    """Takes the whole choice, or tries its positions in order. A position that is taken changes the sets on both sides.

    Writes to `token_ptr` and `open_ptr`, too.
    """
    lane, entry = tl.program_id(0).to(tl.int64), tl.arange(0, PIECE)
    states, classes, first_next, first_pair, pairs = _language(place_ptr, meta_ptr, lane)
    next_ptr += first_next
    pair_ptr += first_pair * 2
    distance_ptr += tl.load(place_ptr + lane) * distances
    line, plane, room = lane * active, lanes * (active + 1) * width, tl.load(room_ptr + lane)
    enter_ptr = sets_ptr + lane * (active + 1) * width
    leave_ptr, whole_ptr = enter_ptr + plane, enter_ptr + 2 * plane + active * width
    whole = 0
    for at in range(0, states, PIECE):
        inside = at + entry < states
        near = tl.load(distance_ptr + at + entry, mask=inside, other=0) <= room
        ends = (tl.load(whole_ptr + at + entry, mask=inside, other=0) != 0) & near & inside
        whole += tl.sum(ends.to(tl.int32), 0)
    if whole > 0:
        for x in range(active):
            tl.store(out_ptr + line + x, tl.load(commit_ptr + line + x))
    else:
        for i in range(active):
            x = tl.load(order_ptr + line + i)
            if tl.load(commit_ptr + line + x) != 0:
                choice = tl.load(choice_ptr + line + x)
                by_ptr = next_ptr + _class_of(choice, class_ptr, place_ptr, lane, vocab)
                fits = 0
                for at in range(0, states, PIECE):
                    first, inside = at + entry, at + entry < states
                    second = tl.load(by_ptr + first * classes, mask=inside, other=-1).to(tl.int32)
                    inside &= (second >= 0) & (second < states)
                    held = tl.load(enter_ptr + x * width + first, mask=inside, other=0) != 0
                    held &= tl.load(leave_ptr + (x + 1) * width + second, mask=inside, other=0) != 0
                    fits += tl.sum((held & inside).to(tl.int32), 0)
                if fits > 0:
                    tl.store(out_ptr + line + x, 1)
                    tl.store(open_ptr + line + x, 0)
                    tl.store(token_ptr + line + x, choice)
                    tl.debug_barrier()
                    for y in range(x, active):
                        _emptied(enter_ptr + (y + 1) * width, states, PIECE)
                        token = tl.load(token_ptr + line + y)
                        _step(
                            enter_ptr + y * width, enter_ptr + (y + 1) * width, tl.load(outside_ptr + line + y) != 0,
                            tl.load(open_ptr + line + y) != 0,
                            next_ptr + _class_of(token, class_ptr, place_ptr, lane, vocab),
                            pair_ptr, states, classes, pairs, False, PIECE,
                        )  # fmt: skip
                    for before in range(x + 1):
                        y = x - before
                        _emptied(leave_ptr + y * width, states, PIECE)
                        token = tl.load(token_ptr + line + y)
                        _step(
                            leave_ptr + (y + 1) * width, leave_ptr + y * width, tl.load(outside_ptr + line + y) != 0,
                            tl.load(open_ptr + line + y) != 0,
                            next_ptr + _class_of(token, class_ptr, place_ptr, lane, vocab),
                            pair_ptr, states, classes, pairs, True, PIECE,
                        )  # fmt: skip


@triton.jit
def _run(state_ptr, token_ptr, passed_ptr, out_ptr, place_ptr, class_ptr, next_ptr, meta_ptr, active, vocab):
    lane = tl.program_id(0).to(tl.int64)
    states, classes, first_next, _, _ = _language(place_ptr, meta_ptr, lane)
    state = tl.load(state_ptr + lane)
    for x in range(active):
        own = _class_of(tl.load(token_ptr + lane * active + x), class_ptr, place_ptr, lane, vocab)
        after = tl.load(next_ptr + first_next + state * classes + own).to(tl.int64)
        passed = (tl.load(passed_ptr + lane * active + x) != 0) & (after >= 0) & (after < states)
        state = tl.where(passed, after, state)
    tl.store(out_ptr + lane, state)


@triton.jit
def _masked(logits_ptr, class_ptr, allowed_ptr, bound_ptr, length, vocab, most, keep, PIECE: tl.constexpr):
    place, token = tl.program_id(0).to(tl.int64), tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    if tl.load(bound_ptr + place) != 0:
        own = tl.load(class_ptr + place // length * vocab + token, mask=token < vocab, other=0).to(tl.int32)
        fits = tl.load(allowed_ptr + place * most + own, mask=token < vocab, other=0) != 0
        tl.store(logits_ptr + place * vocab + token, float("-inf"), mask=(token < vocab) & ~fits & (token != keep))


def _sets(languages: Languages, place_B: Tensor, states: int, line: Line, *chosen: Tensor) -> Tensor:
    """Forward and backward sets; with a choice (commits, tokens) also the forward sets once it is written.

    bool [2 or 3, B, X + 1, Q + 1]
    """
    lanes, active = line.token_BX.shape
    commit_BX, choice_BX = chosen or (line.open_BX, line.token_BX)
    sets = torch.zeros(3 if chosen else 2, lanes, active + 1, states + 1, dtype=torch.bool, device=place_B.device)
    read = (
        line.token_BX, line.open_BX, line.outside_BX, line.state_B, line.room_B, commit_BX, choice_BX, place_B,
        languages.class_GV, languages.distance_GQ, languages.next_Y, languages.pair_Y2, languages.meta_G8,
    )  # fmt: skip
    _sweeps[(lanes, len(sets))](
        sets.view(torch.int8), *(t.contiguous() for t in read), lanes, active, states + 1,
        languages.class_GV.shape[1], languages.distance_GQ.shape[1], PIECE=PIECE, num_warps=WARPS,
    )  # fmt: skip
    return sets


def allowed(languages: Languages, place_B: Tensor, states: int, line: Line) -> Tensor:
    """See `dinfer.kernels.languages.Sweeps.allowed`."""
    sets, (lanes, active) = _sets(languages, place_B, states, line), line.token_BX.shape
    most = languages.size_GC.shape[1]
    allowed_BXC = torch.zeros(lanes, active, most, dtype=torch.bool, device=place_B.device)
    _allowed[(lanes, active)](
        sets.view(torch.int8), allowed_BXC.view(torch.int8), place_B, languages.edge_Y3, languages.meta_G8,
        lanes, active, states + 1, most, PIECE=PIECE, num_warps=WARPS,
    )  # fmt: skip
    return allowed_BXC


def admitted(
    languages: Languages, place_B: Tensor, states: int, line: Line,
    commit_BX: Tensor, token_BX: Tensor, order_BX: Tensor,
) -> Tensor:  # fmt: skip
    """See `dinfer.kernels.languages.Sweeps.admitted`. `order_BX`: the order in which positions are tried."""
    sets, (lanes, active) = _sets(languages, place_B, states, line, commit_BX, token_BX), line.token_BX.shape
    out_BX = torch.zeros_like(commit_BX, memory_format=torch.contiguous_format)
    read = (
        line.outside_BX, line.room_B, commit_BX, token_BX, order_BX, out_BX, place_B,
        languages.class_GV, languages.distance_GQ, languages.next_Y, languages.pair_Y2, languages.meta_G8,
    )  # fmt: skip
    _admitted[(lanes,)](
        sets.view(torch.int8), line.token_BX.clone(memory_format=torch.contiguous_format),
        line.open_BX.clone(memory_format=torch.contiguous_format), *(t.contiguous() for t in read),
        lanes, active, states + 1, languages.class_GV.shape[1], languages.distance_GQ.shape[1],
        PIECE=PIECE, num_warps=WARPS,
    )  # fmt: skip
    return out_BX


def run(languages: Languages, place_B: Tensor, state_B: Tensor, token_BX: Tensor, passed_BX: Tensor) -> Tensor:
    """See `dinfer.kernels.languages.Sweeps.run`."""
    out_B = torch.empty_like(state_B)
    read = state_B, token_BX, passed_BX, out_B, place_B, languages.class_GV, languages.next_Y, languages.meta_G8
    _run[(len(state_B),)](*(t.contiguous() for t in read), token_BX.shape[1], languages.class_GV.shape[1], num_warps=1)
    return out_B


def masked(logits_RLV: Tensor, class_RV: Tensor, allowed_RLC: Tensor, bound_RL: Tensor, keep: int) -> Tensor:
    """See `dinfer.kernels.languages.masked`."""
    (rows, length, vocab), piece = logits_RLV.shape, 1024
    logits_RLV = logits_RLV.contiguous()
    read = class_RV.contiguous(), allowed_RLC.contiguous().view(torch.int8), bound_RL.contiguous()
    _masked[(rows * length, triton.cdiv(vocab, piece))](
        logits_RLV, *read, length, vocab, allowed_RLC.shape[-1], keep, PIECE=piece, num_warps=WARPS
    )
    return logits_RLV
