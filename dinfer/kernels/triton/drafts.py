"""The paths of a tree of drafts, in three kernels: a step of one request waits for nothing but launches."""

import torch
import triton
import triton.language as tl
from torch import Tensor

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
