"""What one kernel leaves to the next. Only kernels look inside; others pass it on or `deferred.close` it.

Shape suffixes: S parts, N tokens, C chosen experts of a token, P pairs of token and expert, D hidden size,
B lanes, W positions, X query, key and value heads, E head size.
"""

from typing import Literal, NamedTuple, Self

import torch
from torch import Tensor

from dinfer.core.ranks.ranks import Ranks

FLOAT8 = torch.float8_e4m3fn
LARGEST = {FLOAT8: 448, torch.int8: 127}
TILE = 64  # outputs of which the weights of a group in 4 bits are one piece of memory, for a GPU


class WeightPart(NamedTuple):
    """Some outputs of a weight, or of each of S weights, in one format.

    `kind`: "int8", "int4" or the block type of a GGUF file. `values`: bytes [O, B] or [S, O, B], with outputs next to
    each other. `scale`: [O, 1] for int8, [O, G] for int4, S in front of them for several weights. Blocks hold their own
    scales.
    """

    kind: str
    values: Tensor
    scale: Tensor | None = None

    @property
    def outputs(self) -> int:
        return self.values.shape[-2]


class PartialSums(NamedTuple):
    """Partial sums, which the consumer adds up in order, in float32.

    With weights they are the outputs of each token's experts. The parts of a token are adjacent. The first C are
    multiplied by its weights; a shared expert's part comes last, or in a tensor of its own.
    """

    values: Tensor  # [S, ...]; with weights [P, D]
    dtype: torch.dtype  # of the rounded sum
    weights_NC: Tensor | None = None  # float32
    plus_ND: Tensor | None = None  # added last; only with weights

    @property
    def shape(self) -> torch.Size:
        """The shape of the sum."""
        if self.weights_NC is None:
            return self.values.shape[1:]
        return torch.Size((self.weights_NC.shape[0], self.values.shape[-1]))

    def unflatten(self, dim: int, sizes: tuple[int, ...]) -> Self:
        """Splits a dimension of the sum, counted from the last; only without weights."""
        return self._replace(values=self.values.unflatten(dim, sizes))


class Rounded(NamedTuple):
    """Rows in 8 bits. The consumer multiplies its products by their scales."""

    values: Tensor
    scale: Tensor  # float32, the shape of `values` without the last dimension
    dtype: torch.dtype  # of the rows before rounding
    wide: Tensor | None = None  # the rows before rounding, if the consumer wants both


class Squares(NamedTuple):
    """What RMSNorm divides a row by, still in sums: sqrt(the mean of its squares + eps)."""

    sums_SR: Tensor  # float32: the sums of squares of S pieces of each row, a power of two
    eps: float


class Grouped(NamedTuple):
    """Rows as 8-bit integers, each group of neighbouring inputs at a scale of its own, for weights in 4 bits.

    There is room for rows of whole tiles. Nothing writes the last of them. With `squares` the reader divides: a factor
    of the whole row changes no integer of a group, and so many programs can share a row before its norm is known.
    """

    values_RK: Tensor
    scale_GR: Tensor  # float32, a 16th of each scale
    shape: torch.Size  # of the rows before rounding
    dtype: torch.dtype  # of the rows before rounding
    wide: Tensor | None = None  # the rows before rounding, if the consumer wants both
    squares: Squares | None = None  # never with `wide`


class Share(NamedTuple):
    """One rank's addend of a layer whose inputs are divided among ranks."""

    value: Tensor | PartialSums
    ranks: Ranks

    @property
    def shape(self) -> torch.Size:
        return self.value.shape


Deferred = Tensor | PartialSums | Rounded | Grouped | Share
"""A tensor, or a value whose last sum or product the reading kernel does, so that no kernel runs for it alone.
`dinfer.core.kernels.deferred.close` turns any of them into a tensor."""


class Matrices(NamedTuple):
    """Weights of all experts, [X, O, K], and of a shared expert, [O, K], with scales [X, O] and [O]."""

    each: Tensor
    scale: Tensor | None = None
    shared: Tensor | None = None
    shared_scale: Tensor | None = None


class Dealt(NamedTuple):
    """Which experts this rank has, if ranks deal them out whole."""

    first: int  # its first expert
    experts: int  # of all ranks


class Plan(NamedTuple):
    """The pairs of token and expert of each expert, cut into tiles of `rows` pairs of one expert.

    Pairs are numbered token by token, and within a token in the order of its experts. A shared expert is each token's
    last expert and the last of all. It has the most tiles, so they come first.
    """

    pairs_XN: Tensor  # the numbers of each expert's pairs, ascending
    tile_I4: Tensor  # expert (-1: no tile), first pair among the expert's, first pair in the order of tiles, pairs
    rows: int
    pairs: int  # those that no tile has included: of padding, and of experts of other ranks


class InGroups(NamedTuple):
    """A layer takes up to `GROUPED_ROWS` rows as `Grouped`, more as they are."""

    group: int  # inputs that share a scale
    both: bool = False  # whether it takes the rows as they are too


GROUPED_ROWS = 512
InputFormat = Literal["plain", "rounded", "both"] | InGroups
"""How a layer takes its input rows: as they are, rounded to float8, both, or in groups of 8-bit integers."""


class HeadNorm(NamedTuple):
    """RMSNorm of each query head, by the first E weights, and of each key head, by the last E (Qwen3's QK-norm)."""

    weight_X: Tensor  # [2 * E]
    eps: float


Table = tuple[Tensor, Tensor]
"""cos and signed sin of a rotation (`dinfer.core.kernels.rotary.rotary_table`)."""


class Projections(NamedTuple):
    """Queries, keys and values of a layer. The kernel that stores the keys applies norm and rotation."""

    qkv_BWXE: Tensor | PartialSums  # query heads, then key heads, then as many value heads
    heads: int  # query heads
    table: Table
    norm: HeadNorm | None = None
    input_format: InputFormat = "plain"  # how the layer behind the attention takes its inputs
