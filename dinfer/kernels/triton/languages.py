"""Sets of states over the active positions of a row, and the choices that they admit; see `dinfer.kernels.languages`.

A program follows one lane from position to position. The sets lie in global memory, a byte for a state, and the threads
of a program meet at a barrier before they read what others wrote.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dinfer.kernels.lines import Languages, Line

MOST = 16384  # pairs, edges or states at a time
OPEN, OUTSIDE = tl.constexpr(-1), tl.constexpr(-2)  # codes of a position; the others are the class of its token


@triton.jit
def _language(place_ptr, meta_ptr, lane):
    """What `meta_G8` says of the lane's language."""
    meta_ptr += tl.load(place_ptr + lane) * 8
    states, classes = tl.load(meta_ptr).to(tl.int32), tl.load(meta_ptr + 1)
    return states, classes, tl.load(meta_ptr + 2), tl.load(meta_ptr + 3), tl.load(meta_ptr + 4).to(tl.int32)


@triton.jit
def _class_of(token, class_ptr, place_ptr, lane, vocab, mask):
    token = tl.minimum(tl.maximum(token, 0), vocab - 1)
    return tl.load(class_ptr + tl.load(place_ptr + lane) * vocab + token, mask=mask, other=0).to(tl.int32)


@triton.jit
def _step(from_ptr, to_ptr, code, next_ptr, pair_ptr, states, classes, pairs, BACK: tl.constexpr, PIECE: tl.constexpr):
    """The set on the other side of a position."""
    entry = tl.arange(0, PIECE)
    if code == OUTSIDE:
        for at in range(0, states, PIECE):
            tl.store(
                to_ptr + at + entry, tl.load(from_ptr + at + entry, mask=at + entry < states), mask=at + entry < states
            )
    elif code == OPEN:
        for at in range(0, pairs, PIECE):
            inside = at + entry < pairs
            pair = tl.load(pair_ptr + at + entry, mask=inside, other=0)
            first, second = pair & 0xFFFF, pair >> 16
            inside &= (first < states) & (second >= 0) & (second < states)
            source, target = (second, first) if BACK else (first, second)
            held = tl.load(from_ptr + source, mask=inside, other=0) != 0
            tl.store(to_ptr + target, held.to(tl.int8), mask=held & inside)
    else:
        for at in range(0, states, PIECE):
            first, inside = at + entry, at + entry < states
            second = tl.load(next_ptr + first * classes + code, mask=inside, other=-1).to(tl.int32)
            inside &= (second >= 0) & (second < states)
            source, target = (second, first) if BACK else (first, second)
            held = tl.load(from_ptr + source, mask=inside, other=0) != 0
            tl.store(to_ptr + target, held.to(tl.int8), mask=held & inside)
    tl.debug_barrier()


@triton.jit
def _sweeps(
    sets_ptr, code_ptr, token_ptr, open_ptr, outside_ptr, state_ptr, room_ptr, commit_ptr, choice_ptr,
    place_ptr, class_ptr, distance_ptr, next_ptr, pair_ptr, meta_ptr,
    lanes, active, width, vocab, distances, LINE: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Plane 0: the states that a position can be entered in; 1: those that can be completed; 2 and 3: the same, once a
    choice is written. The planes are empty at first. Leaves the codes of a line, and of one with the choice."""
    lane, plane = tl.program_id(0).to(tl.int64), tl.program_id(1)
    states, classes, first_next, first_pair, pairs = _language(place_ptr, meta_ptr, lane)
    base_ptr, at_lane = sets_ptr + (plane * lanes + lane) * (active + 1) * width, lane * active
    code_ptr += (plane * lanes + lane) * active
    next_ptr += first_next
    pair_ptr += first_pair
    entry, x_X = tl.arange(0, PIECE), tl.arange(0, LINE)
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
    if plane % 2 == 1:
        distance_ptr += tl.load(place_ptr + lane) * distances
        room = tl.load(room_ptr + lane)
        for at in range(0, states, PIECE):
            near = tl.load(distance_ptr + at + entry, mask=at + entry < states, other=0) <= room
            tl.store(base_ptr + active * width + at + entry, near.to(tl.int8), mask=at + entry < states)
        tl.debug_barrier()
        for done in range(active):
            x = active - 1 - done
            _step(
                base_ptr + (x + 1) * width, base_ptr + x * width, tl.load(code_ptr + x), next_ptr, pair_ptr,
                states, classes, pairs, True, PIECE,
            )  # fmt: skip
    else:
        tl.store(base_ptr + tl.load(state_ptr + lane), 1)
        tl.debug_barrier()
        for x in range(active):
            _step(
                base_ptr + x * width, base_ptr + (x + 1) * width, tl.load(code_ptr + x), next_ptr, pair_ptr,
                states, classes, pairs, False, PIECE,
            )  # fmt: skip


@triton.jit
def _emptied(set_ptr, states, PIECE: tl.constexpr):
    entry = tl.arange(0, PIECE)
    for at in range(0, states, PIECE):
        tl.store(set_ptr + at + entry, tl.zeros((PIECE,), tl.int8), mask=at + entry < states)
    tl.debug_barrier()


@triton.jit
def _allowed(
    sets_ptr, code_ptr, whole_ptr, out_ptr, only_ptr, token_ptr, place_ptr, edge_ptr, size_ptr, lowest_ptr, meta_ptr,
    lanes, active, width, most, PIECE: tl.constexpr, CLASSES: tl.constexpr, FORCED: tl.constexpr,
):  # fmt: skip
    """Marks the classes of one position. None is marked at first. FORCED: says what is the only token, too, once what
    is admitted is written: planes 2 and 3 have the whole choice, 0 and 1 a part of it."""
    lane, x, entry = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, PIECE)
    place = tl.load(place_ptr + lane)
    meta_ptr += place * 8
    states, classes = tl.load(meta_ptr).to(tl.int32), tl.load(meta_ptr + 1).to(tl.int32)
    edge_ptr += tl.load(meta_ptr + 5) * 3
    edges = tl.load(meta_ptr + 6).to(tl.int32)
    plane = 0
    if FORCED:
        plane = tl.where(tl.load(whole_ptr + lane) != 0, 2, 0)
    enter_ptr = sets_ptr + ((plane * lanes + lane) * (active + 1) + x) * width
    leave_ptr = sets_ptr + (((plane + 1) * lanes + lane) * (active + 1) + x + 1) * width
    at_x = lane * active + x
    out_ptr += at_x * most
    for at in range(0, edges, PIECE):
        inside, entry_ptr = at + entry < edges, edge_ptr + (at + entry) * 3
        source = tl.load(entry_ptr, mask=inside, other=0).to(tl.int32)
        own = tl.load(entry_ptr + 1, mask=inside, other=0).to(tl.int32)
        target = tl.load(entry_ptr + 2, mask=inside, other=0).to(tl.int32)
        inside &= (source >= 0) & (source < states) & (target >= 0) & (target < states) & (own >= 0) & (own < classes)
        held = tl.load(enter_ptr + source, mask=inside, other=0) & tl.load(leave_ptr + target, mask=inside, other=0)
        tl.store(out_ptr + own, held, mask=inside & (held != 0))
    if FORCED:
        tl.debug_barrier()
        own = tl.arange(0, CLASSES)
        marked = tl.load(out_ptr + own, mask=own < most, other=0) != 0
        stop = classes - 2  # the last two classes are stop tokens and other tail tokens
        tokens = tl.sum(tl.where(marked, tl.load(size_ptr + place * most + own, mask=own < most, other=0), 0), 0)
        first = tl.min(tl.where(marked, own, CLASSES), 0)
        ends = (first >= stop) & (first < CLASSES)
        inside = tl.load(code_ptr + at_x) != OUTSIDE
        tl.store(only_ptr + at_x, (inside & ((tokens == 1) | ends)).to(tl.int8))
        best = tl.where(ends, stop, tl.where(first < CLASSES, first, 0))
        tl.store(token_ptr + at_x, tl.load(lowest_ptr + place * most + best).to(tl.int64))


@triton.jit
def _admitted(
    sets_ptr, code_ptr, room_ptr, commit_ptr, confidence_ptr, out_ptr, all_ptr,
    place_ptr, distance_ptr, next_ptr, pair_ptr, meta_ptr,
    lanes, active, width, distances, LINE: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Takes the whole choice, or tries its positions by falling confidence. A position that is taken changes the sets
    on both sides, and its code."""
    lane, entry, x_X = tl.program_id(0).to(tl.int64), tl.arange(0, PIECE), tl.arange(0, LINE)
    states, classes, first_next, first_pair, pairs = _language(place_ptr, meta_ptr, lane)
    next_ptr += first_next
    pair_ptr += first_pair
    distance_ptr += tl.load(place_ptr + lane) * distances
    line, plane, room = lane * active, lanes * (active + 1) * width, tl.load(room_ptr + lane)
    enter_ptr = sets_ptr + lane * (active + 1) * width
    leave_ptr, last_ptr = enter_ptr + plane, enter_ptr + 2 * plane + active * width
    chosen_ptr = code_ptr + 2 * lanes * active + line
    code_ptr += line
    left_X = tl.load(commit_ptr + line + x_X, mask=x_X < active, other=0) != 0
    whole = 0
    for at in range(0, states, PIECE):
        inside = at + entry < states
        near = tl.load(distance_ptr + at + entry, mask=inside, other=0) <= room
        ends = (tl.load(last_ptr + at + entry, mask=inside, other=0) != 0) & near & inside
        whole += tl.sum(ends.to(tl.int32), 0)
    tl.store(all_ptr + lane, whole)
    if whole > 0:
        tl.store(out_ptr + line + x_X, left_X.to(tl.int8), mask=x_X < active)
    else:
        confidence_X = tl.load(confidence_ptr + line + x_X, mask=left_X, other=0)
        for _ in range(tl.sum(left_X.to(tl.int32), 0)):
            best = tl.max(tl.where(left_X, confidence_X, -1.0), 0)
            x = tl.min(tl.where(left_X & (confidence_X == best), x_X, LINE), 0)
            left_X = left_X & (x_X != x)
            code, fits = tl.load(chosen_ptr + x), 0
            for at in range(0, states, PIECE):
                first, inside = at + entry, at + entry < states
                second = tl.load(next_ptr + first * classes + code, mask=inside, other=-1).to(tl.int32)
                inside &= (second >= 0) & (second < states)
                held = tl.load(enter_ptr + x * width + first, mask=inside, other=0) != 0
                held &= tl.load(leave_ptr + (x + 1) * width + second, mask=inside, other=0) != 0
                fits += tl.sum((held & inside).to(tl.int32), 0)
            if fits > 0:
                tl.store(out_ptr + line + x, 1)
                tl.store(code_ptr + x, code)
                tl.debug_barrier()
                for y in range(x, active):
                    _emptied(enter_ptr + (y + 1) * width, states, PIECE)
                    _step(
                        enter_ptr + y * width, enter_ptr + (y + 1) * width, tl.load(code_ptr + y), next_ptr, pair_ptr,
                        states, classes, pairs, False, PIECE,
                    )  # fmt: skip
                for before in range(x + 1):
                    y = x - before
                    _emptied(leave_ptr + y * width, states, PIECE)
                    _step(
                        leave_ptr + (y + 1) * width, leave_ptr + y * width, tl.load(code_ptr + y), next_ptr, pair_ptr,
                        states, classes, pairs, True, PIECE,
                    )  # fmt: skip


@triton.jit
def _run(
    state_ptr, token_ptr, passed_ptr, out_ptr, place_ptr, class_ptr, next_ptr, meta_ptr, active, vocab,
    LINE: tl.constexpr,
):  # fmt: skip
    """Only the positions that are passed cost time: most steps pass none."""
    lane, x_X = tl.program_id(0).to(tl.int64), tl.arange(0, LINE)
    states, classes, first_next, _, _ = _language(place_ptr, meta_ptr, lane)
    next_ptr += first_next
    line, state = lane * active, tl.load(state_ptr + lane)
    passed_X = tl.load(passed_ptr + line + x_X, mask=x_X < active, other=0) != 0
    token_X = tl.load(token_ptr + line + x_X, mask=passed_X, other=0)
    class_X = _class_of(token_X, class_ptr, place_ptr, lane, vocab, passed_X)
    for _ in range(tl.sum(passed_X.to(tl.int32), 0)):
        x = tl.min(tl.where(passed_X, x_X, LINE), 0)
        passed_X = passed_X & (x_X != x)
        after = tl.load(next_ptr + state * classes + tl.sum(tl.where(x_X == x, class_X, 0), 0)).to(tl.int64)
        state = tl.where((after >= 0) & (after < states), after, state)
    tl.store(out_ptr + lane, state)


@triton.jit
def _masked(logits_ptr, class_ptr, allowed_ptr, bound_ptr, length, vocab, most, keep, PIECE: tl.constexpr):
    place, token = tl.program_id(0).to(tl.int64), tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    if tl.load(bound_ptr + place) != 0:
        own = tl.load(class_ptr + place // length * vocab + token, mask=token < vocab, other=0).to(tl.int32)
        fits = tl.load(allowed_ptr + place * most + own, mask=token < vocab, other=0) != 0
        tl.store(logits_ptr + place * vocab + token, float("-inf"), mask=(token < vocab) & ~fits & (token != keep))


def _sizes(states: int) -> tuple[int, int]:
    """How many pairs, of which a language has some three for each state, a program takes at a time, and its warps."""
    piece = min(max(triton.next_power_of_2(3 * states), 256), MOST)
    return piece, min(piece // 64, 32)


def _sets(languages: Languages, place_B: Tensor, states: int, line: Line, *chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Forward and backward sets; with a choice (commits, tokens) also those once it is written.

    bool [2 or 4, B, X + 1, Q + 1], and the codes of the positions, int32 [2 or 4, B, X]
    """
    (lanes, active), (piece, warps) = line.token_BX.shape, _sizes(states)
    commit_BX, choice_BX = chosen or (line.open_BX, line.token_BX)
    sets = torch.zeros(4 if chosen else 2, lanes, active + 1, states + 1, dtype=torch.bool, device=place_B.device)
    codes = torch.empty(len(sets), lanes, active, dtype=torch.int32, device=place_B.device)
    read = (
        line.token_BX, line.open_BX, line.outside_BX, line.state_B, line.room_B, commit_BX, choice_BX, place_B,
        languages.class_GV, languages.distance_GQ, languages.next_Y, languages.pair_Y2.view(torch.int32),
        languages.meta_G8,
    )  # fmt: skip
    _sweeps[(lanes, len(sets))](
        sets.view(torch.int8), codes, *(t.contiguous() for t in read), lanes, active, states + 1,
        languages.class_GV.shape[1], languages.distance_GQ.shape[1],
        LINE=triton.next_power_of_2(active), PIECE=piece, num_warps=warps,
    )  # fmt: skip
    return sets, codes


def allowed(languages: Languages, place_B: Tensor, states: int, line: Line) -> Tensor:
    """See `dinfer.kernels.languages.Sweeps.allowed`."""
    return _marks(languages, place_B, *_sets(languages, place_B, states, line))[0]


def _marks(
    languages: Languages, place_B: Tensor, sets: Tensor, codes: Tensor, whole_B: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The allowed classes; with `whole_B` also which positions have but one token left, and that token."""
    (_, lanes, active), width = codes.shape, sets.shape[-1]
    (piece, warps), most = _sizes(width - 1), languages.size_GC.shape[1]
    allowed_BXC = torch.zeros(lanes, active, most, dtype=torch.bool, device=place_B.device)
    only_BX = torch.empty(lanes, active, dtype=torch.bool, device=place_B.device)
    token_BX = torch.empty(lanes, active, dtype=torch.int64, device=place_B.device)
    _allowed[(lanes, active)](
        sets.view(torch.int8), codes, place_B if whole_B is None else whole_B, allowed_BXC.view(torch.int8), only_BX,
        token_BX, place_B, languages.edge_Y3, languages.size_GC, languages.token_GC, languages.meta_G8,
        lanes, active, width, most, PIECE=piece, CLASSES=triton.next_power_of_2(most), FORCED=whole_B is not None,
        num_warps=warps,
    )  # fmt: skip
    return allowed_BXC, only_BX, token_BX


def settled(
    languages: Languages, place_B: Tensor, states: int, line: Line,
    commit_BX: Tensor, token_BX: Tensor, confidence_BX: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """See `dinfer.kernels.languages.Sweeps.settled`."""
    (lanes, active), (piece, warps) = line.token_BX.shape, _sizes(states)
    sets, codes = _sets(languages, place_B, states, line, commit_BX, token_BX)
    out_BX = torch.zeros_like(commit_BX, memory_format=torch.contiguous_format)
    whole_B = torch.empty(lanes, dtype=torch.int32, device=place_B.device)
    read = (
        line.room_B, commit_BX, confidence_BX, out_BX, whole_B, place_B,
        languages.distance_GQ, languages.next_Y, languages.pair_Y2.view(torch.int32), languages.meta_G8,
    )  # fmt: skip
    _admitted[(lanes,)](
        sets.view(torch.int8), codes, *(t.contiguous() for t in read),
        lanes, active, states + 1, languages.distance_GQ.shape[1],
        LINE=triton.next_power_of_2(active), PIECE=piece, num_warps=warps,
    )  # fmt: skip
    _, only_BX, only_token_BX = _marks(languages, place_B, sets, codes, whole_B)
    return out_BX, only_BX, only_token_BX


def run(languages: Languages, place_B: Tensor, state_B: Tensor, token_BX: Tensor, passed_BX: Tensor) -> Tensor:
    """See `dinfer.kernels.languages.Sweeps.run`."""
    out_B = torch.empty_like(state_B)
    read = state_B, token_BX, passed_BX, out_B, place_B, languages.class_GV, languages.next_Y, languages.meta_G8
    active, vocab = token_BX.shape[1], languages.class_GV.shape[1]
    _run[(len(state_B),)](
        *(t.contiguous() for t in read), active, vocab, LINE=triton.next_power_of_2(active), num_warps=1
    )
    return out_B


def masked(logits_RLV: Tensor, class_RV: Tensor, allowed_RLC: Tensor, bound_RL: Tensor, keep: int) -> Tensor:
    """See `dinfer.kernels.languages.masked`."""
    (rows, length, vocab), piece = logits_RLV.shape, 1024
    logits_RLV = logits_RLV.contiguous()
    read = class_RV.contiguous(), allowed_RLC.contiguous().view(torch.int8), bound_RL.contiguous()
    _masked[(rows * length, triton.cdiv(vocab, piece))](
        logits_RLV, *read, length, vocab, allowed_RLC.shape[-1], keep, PIECE=piece, num_warps=4
    )
    return logits_RLV
