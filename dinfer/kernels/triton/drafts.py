"""Drafts that stand at open positions: what is fed, what is confirmed, how the window slides, and the next drafts.

A kernel for each, since a step of one request waits for nothing but launches.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dinfer.core.step.contracts import BlockAfter
from dinfer.core.step.cursors import RowCursors
from dinfer.core.step.work import Forward
from dinfer.kernels.triton.launch import early, follow

PIECE = 2048  # tokens of which one program finds the most likely ones


@triton.jit
def _of_pieces(
    logits_ptr, first_ptr, value_ptr, token_ptr, sum_ptr, block, vocab, pieces,
    DEPTH: tl.constexpr, FEW: tl.constexpr, PIECE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The most likely tokens of a piece of the vocabulary, and the largest logit and the sum of all beside it."""
    follow(EARLY)
    at, piece = tl.program_id(0), tl.program_id(1)
    row, place = at // DEPTH, at % DEPTH
    own = tl.minimum(tl.load(first_ptr + row).to(tl.int32) + place, block - 1)
    token = piece * PIECE + tl.arange(0, PIECE)
    line = logits_ptr + (row * block + own).to(tl.int64) * vocab
    values = tl.load(line + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    most = tl.max(values, 0)
    out = at * pieces + piece
    tl.store(sum_ptr + 2 * out, most)
    tl.store(sum_ptr + 2 * out + 1, tl.sum(tl.where(values == float("-inf"), 0.0, tl.exp(values - most)), 0))
    for rank in tl.static_range(FEW):
        most = tl.max(values, 0)
        best = tl.min(tl.where(values == most, token, vocab - 1), 0)
        tl.store(value_ptr + out * FEW + rank, most)
        tl.store(token_ptr + out * FEW + rank, best)
        values = tl.where(token == best, float("-inf"), values)


@triton.jit
def _of_rows(
    first_ptr, value_ptr, token_ptr, sum_ptr, worth_ptr, best_ptr, block, pieces,
    DEPTH: tl.constexpr, FEW: tl.constexpr, PIECES: tl.constexpr, PLACES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The most likely tokens of all pieces, and the logarithms of their chances."""
    follow(EARLY)
    at = tl.program_id(0)
    there = tl.load(first_ptr + at // DEPTH) + at % DEPTH < block
    piece = tl.arange(0, PIECES)
    largest = tl.load(sum_ptr + 2 * (at * pieces + piece), mask=piece < pieces, other=float("-inf"))
    sums = tl.load(sum_ptr + 2 * (at * pieces + piece) + 1, mask=piece < pieces, other=0.0)
    most = tl.max(largest, 0)
    total = most + tl.log(tl.sum(tl.where(sums > 0, sums * tl.exp(largest - most), 0.0), 0))
    place = tl.arange(0, PLACES)
    inside = place < pieces * FEW
    values = tl.load(value_ptr + at * pieces * FEW + place, mask=inside, other=float("-inf"))
    tokens = tl.load(token_ptr + at * pieces * FEW + place, mask=inside, other=0)
    for rank in tl.static_range(FEW):
        most = tl.max(values, 0)
        best = tl.min(tl.where(values == most, place, PLACES - 1), 0)
        tl.store(worth_ptr + at * FEW + rank, tl.where(there, most - total, float("-inf")))
        tl.store(best_ptr + at * FEW + rank, tl.sum(tl.where(place == best, tokens, 0), 0))
        values = tl.where(place == best, float("-inf"), values)


@triton.jit
def _paths(
    worth_ptr, best_ptr, drafts_ptr, stride, out_ptr, versions,
    DEPTH: tl.constexpr, FEW: tl.constexpr, MANY: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The likeliest paths. Those of one length follow one another, the ranks of their last drafts fastest."""
    follow(EARLY)
    row = tl.program_id(0)
    drafts = tl.load(drafts_ptr + row * stride) >= 0
    path = tl.arange(0, MANY)
    score = tl.full((MANY,), float("-inf"), tl.float32)
    begin = 0
    size = 1
    for length in tl.static_range(1, DEPTH + 1):
        size *= max(FEW >> (length - 1), 1)
        own = tl.zeros((MANY,), tl.float32)
        inner = size
        for place in tl.static_range(length):
            wide = max(FEW >> place, 1)
            inner = inner // wide
            rank = ((path - begin) // inner) % wide
            inside = (path >= begin) & (path < begin + size)
            own += tl.load(worth_ptr + (row * DEPTH + place) * FEW + rank, mask=inside, other=0.0)
        score = tl.where((path >= begin) & (path < begin + size) & drafts, own, score)
        begin += size
    for version in range(versions):
        largest = tl.max(score, 0)
        best = tl.min(tl.where(score == largest, path, MANY - 1), 0)
        start = 0
        count = 1
        for steps in tl.static_range(1, DEPTH + 1):
            count *= max(FEW >> (steps - 1), 1)
            below = count
            for at in tl.static_range(steps):
                own_wide = max(FEW >> at, 1)
                below = below // own_wide
                own_rank = ((best - start) // below) % own_wide
                here = (best >= start) & (best < start + count) & (largest > float("-inf"))
                token = tl.load(best_ptr + (row * DEPTH + at) * FEW + own_rank, mask=here, other=-1)
                tl.store(out_ptr + (row * versions + version) * DEPTH + at, token.to(tl.int64), mask=here)
            start += count
        score = tl.where(path == best, float("-inf"), score)


def paths(logits_RLV: Tensor, first_R: Tensor, draft_RL: Tensor, versions: int, depth: int, few: int) -> Tensor:
    """See `dinfer.families.decoders.isd.likeliest`. int64 [R, versions, depth]"""
    (rows, block, vocab), logits_RLV = logits_RLV.shape, logits_RLV.contiguous()
    pieces, options = triton.cdiv(vocab, PIECE), early(logits_RLV)
    at = rows * depth
    value, worth = (logits_RLV.new_empty(at, many, few, dtype=torch.float32) for many in (pieces, 1))
    token, best = (logits_RLV.new_empty(at, many, few, dtype=torch.int32) for many in (pieces, 1))
    sums = logits_RLV.new_empty(at, pieces, 2, dtype=torch.float32)
    out_RCD = first_R.new_full((rows, versions, depth), -1)
    size, many = 1, 0
    for place in range(depth):
        size *= max(few >> place, 1)
        many += size
    _of_pieces[(at, pieces)](
        logits_RLV, first_R, value, token, sums, block, vocab, pieces, DEPTH=depth, FEW=few, PIECE=PIECE, **options
    )
    _of_rows[(at,)](
        first_R, value, token, sums, worth, best, block, pieces, DEPTH=depth, FEW=few,
        PIECES=triton.next_power_of_2(pieces), PLACES=triton.next_power_of_2(pieces * few), **options,
    )  # fmt: skip
    _paths[(rows,)](
        worth, best, draft_RL, draft_RL.stride(0), out_RCD, versions, DEPTH=depth, FEW=few,
        MANY=triton.next_power_of_2(many + 1), **options,
    )  # fmt: skip
    return out_RCD


@triton.jit
def _decide(
    draft_ptr, token_ptr, best_ptr, masked_ptr, made_ptr, commit_ptr, shown_ptr, next_ptr, block, most,
    FIRST: tl.constexpr, X: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    follow(EARLY)
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, X)
    inside, line = at < block, row * block + at
    draft = tl.load(draft_ptr + line, mask=inside, other=-1)
    token = tl.load(token_ptr + line, mask=inside, other=-2)
    there = draft >= 0
    wrong = tl.where(there & (draft == token), X, at)
    count = tl.min(wrong, 0)
    most = tl.where(count == tl.sum(there.to(tl.int32), 0), most, 0)
    if FIRST:
        most = tl.where(tl.load(made_ptr + row) > 0, most, 0)
    behind = at + count + 1
    drafts = (at < most) & (behind < block)
    following = tl.load(best_ptr + row * block + behind, mask=inside & drafts, other=-1)
    masked = tl.load(masked_ptr + line, mask=inside, other=0) != 0
    tl.store(commit_ptr + line, masked & (at <= count), mask=inside)
    tl.store(shown_ptr + line, tl.where(at < count, draft, token), mask=inside)
    tl.store(next_ptr + line, tl.where(drafts, following, -1), mask=inside)


def decide(
    draft_RL: Tensor, token_RL: Tensor, best_RL: Tensor, masked_RL: Tensor, made_R: Tensor | None, most: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See `dinfer.families.decoders.isd.ISD.select`: what it commits, with which tokens, and the next drafts. [R, L]"""
    given = [x_RL.contiguous() for x_RL in (draft_RL, token_RL, best_RL, masked_RL)]
    commit_RL, shown_RL, next_RL = torch.empty_like(given[3]), torch.empty_like(given[1]), torch.empty_like(given[0])
    rows, block = draft_RL.shape
    _decide[(rows,)](
        *given, given[0] if made_R is None else made_R, commit_RL, shown_RL, next_RL, block, most,
        FIRST=made_R is not None, X=triton.next_power_of_2(block), num_warps=1, **early(draft_RL),
    )  # fmt: skip
    return commit_RL, shown_RL, next_RL


@triton.jit
def _slide(
    start_ptr, end_ptr, length_ptr, next_ptr, most_ptr, open_ptr, stop_ptr, given_ptr, out_start_ptr, out_end_ptr,
    done_ptr, active, block, padding, CUT: tl.constexpr, X: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    follow(EARLY)
    lane, at = tl.program_id(0).to(tl.int64), tl.arange(0, X)
    inside, line = at < active, lane * active + at
    start, end, length = tl.load(start_ptr + lane), tl.load(end_ptr + lane), tl.load(length_ptr + lane)
    opened = tl.load(open_ptr + line, mask=inside, other=0) != 0
    first = tl.min(tl.where(opened, at, X), 0)
    new = tl.where(first < X, start + first, tl.load(next_ptr + lane))
    done = new >= length - tl.where(length < tl.load(most_ptr + lane), padding, 0)
    if CUT:
        ends = tl.load(stop_ptr + line, mask=inside, other=0) != 0
        ends = ends & (tl.load(given_ptr + line, mask=inside, other=1) == 0) & (at < first)
        done = done | (tl.max(ends.to(tl.int32), 0) > 0)
    new = tl.where(done, start, new)
    tl.store(out_start_ptr + lane, new)
    tl.store(out_end_ptr + lane, tl.where(done, end, tl.minimum(new + block, length)))
    tl.store(done_ptr + lane, done)


def slide(
    lanes: RowCursors, after: BlockAfter, most_B: Tensor, block: int, padding: int, cut: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """See `dinfer.families.iterations.sliding.slide`."""
    open_BX, stop_BX, given_BX = (x.flatten(1).contiguous() for x in (after.open_BKL, after.stop_BKL, after.given_BKL))
    start_B, end_B = torch.empty_like(lanes.start_B), torch.empty_like(lanes.end_B)
    done_B, active = torch.empty_like(lanes.live_B), open_BX.shape[1]
    _slide[(len(start_B),)](
        lanes.start_B, lanes.end_B, lanes.length_B, after.next_B, most_B, open_BX, stop_BX, given_BX, start_B, end_B,
        done_B, active, block, padding, CUT=cut, X=triton.next_power_of_2(active), num_warps=1, **early(start_B),
    )  # fmt: skip
    return start_B, end_B, done_B


@triton.jit
def _feed(
    pos_ptr, tokens_ptr, status_ptr, start_ptr, end_ptr, row_ptr, drafts_ptr, fed_ptr, masks_ptr, width, block, lanes,
    many, mask, OPEN: tl.constexpr, OWN: tl.constexpr, X: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    follow(EARLY)
    lane, version, at = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.arange(0, X)
    inside, line = at < width, lane * width + at
    pos = tl.load(pos_ptr + line, mask=inside, other=-1)
    opened = (tl.load(status_ptr + line, mask=inside, other=-1) == OPEN) & (pos >= 0)
    token = tl.load(tokens_ptr + line, mask=inside, other=0)
    start = tl.load(start_ptr + lane)
    place = pos - start
    room = tl.where(version > 0, block, 0) if OWN else block  # beside others the row's own lane has no drafts
    takes = opened & (place >= 0) & (place < room) & (pos < tl.load(end_ptr + lane))
    row = tl.load(row_ptr + lane)
    which = version - 1 if OWN else version
    draft = tl.load(drafts_ptr + (row * many + which) * block + place, mask=takes, other=-1)
    token = tl.where(takes & (draft >= 0), draft, token)
    out = (version * lanes + lane) * width + at
    tl.store(fed_ptr + out, token, mask=inside)
    tl.store(masks_ptr + out, opened & (token == mask), mask=inside)


def feed(
    run: Forward, lanes: RowCursors, row_B: Tensor, drafts_NCX: Tensor, versions: int, mask: int, open_status: int
) -> tuple[Tensor, Tensor]:
    """See `dinfer.families.abilities.drafting.fed`."""
    pos_BW, tokens_BW, status_BW = (x_BW.contiguous() for x_BW in (run.pos_BW, run.tokens_BW, run.status_BW))
    (count, width), (_, many, block) = pos_BW.shape, drafts_NCX.shape
    fed_GW = tokens_BW.new_empty(count * (versions + 1), width)
    masks_GW = torch.empty_like(fed_GW, dtype=torch.bool)
    _feed[(count, versions + 1)](
        pos_BW, tokens_BW, status_BW, lanes.start_B, lanes.end_B, row_B, drafts_NCX, fed_GW, masks_GW, width, block,
        count, many, mask, OPEN=open_status, OWN=versions > 0, X=triton.next_power_of_2(width), num_warps=1,
        **early(pos_BW),
    )  # fmt: skip
    return fed_GW, masks_GW


@triton.jit
def _choose(
    token_ptr, paths_ptr, row_ptr, choice_ptr, draft_ptr, rows, versions, most, block, depth,
    C: tl.constexpr, D: tl.constexpr, X: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    follow(EARLY)
    row, version, place, at = tl.program_id(0).to(tl.int64), tl.arange(0, C), tl.arange(0, D), tl.arange(0, X)
    own = tl.load(row_ptr + row)
    inside = (version[:, None] > 0) & (version[:, None] <= versions) & (place[None, :] < depth)
    paths = paths_ptr + (own * most + version[:, None] - 1) * depth + place[None, :]
    draft = tl.load(paths, mask=inside, other=-1)
    token = tl.load(token_ptr + (version[:, None] * rows + row) * block + place[None, :], mask=inside, other=-2)
    wrong = tl.sum(((draft >= 0) & (draft != token)).to(tl.int32), 1)
    length = tl.where(wrong == 0, tl.sum((draft >= 0).to(tl.int32), 1), -1)
    length = tl.where(version <= versions, length, -1)
    choice = tl.min(tl.where(length == tl.max(length, 0), version, C), 0)
    tl.store(choice_ptr + row, choice.to(tl.int64))
    theirs = paths_ptr + (own * most + choice - 1) * depth + at
    chosen = tl.load(theirs, mask=at < tl.where(choice > 0, depth, 0), other=-1)
    tl.store(draft_ptr + row * block + at, chosen, mask=at < block)


def choose(token_CRL: Tensor, paths_NCD: Tensor, row_R: Tensor) -> tuple[Tensor, Tensor]:
    """See `dinfer.families.abilities.drafting.chosen`."""
    (count, rows, block), (_, most, depth) = token_CRL.shape, paths_NCD.shape
    choice_R, draft_RL = torch.empty_like(row_R), paths_NCD.new_empty(rows, block)
    _choose[(rows,)](
        token_CRL.contiguous(), paths_NCD, row_R, choice_R, draft_RL, rows, count - 1, most, block, depth,
        C=triton.next_power_of_2(count), D=triton.next_power_of_2(depth), X=triton.next_power_of_2(block), num_warps=1,
        **early(row_R),
    )  # fmt: skip
    return choice_R, draft_RL


@triton.jit
def _committed(commit_ptr, masked_ptr, out_ptr, active, X: tl.constexpr, EARLY: tl.constexpr):
    follow(EARLY)
    lane, at = tl.program_id(0).to(tl.int64), tl.arange(0, X)
    inside, line = at < active, lane * active + at
    commit = tl.load(commit_ptr + line, mask=inside, other=0) != 0
    commit = commit & (tl.load(masked_ptr + line, mask=inside, other=0) != 0)
    tl.store(out_ptr + lane, tl.max(tl.where(commit, at + 1, 0), 0).to(tl.int64))


def committed(commit_RL: Tensor, masked_RL: Tensor, lanes: int) -> Tensor:
    """See `dinfer.families.abilities.drafting.committed`."""
    out_B, active = torch.empty(lanes, dtype=torch.int64, device=commit_RL.device), commit_RL.numel() // lanes
    _committed[(lanes,)](
        commit_RL.contiguous(), masked_RL.contiguous(), out_B, active, X=triton.next_power_of_2(active), num_warps=1,
        **early(commit_RL),
    )  # fmt: skip
    return out_B
