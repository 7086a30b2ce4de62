"""What one kernel leaves to the next. Only kernels look inside; others pass it on, or `deferred.close` it.

Shape suffixes: S parts, N tokens, C chosen experts of a token, P pairs of token and expert, D hidden size,
B lanes, W positions, X query, key and value heads, E head size.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from dinfer.kernels.symmetric import Exchange

FLOAT8 = torch.float8_e4m3fn
LARGEST = {FLOAT8: 448, torch.int8: 127}


class Parts(NamedTuple):
    """Partial sums whose reduction is fused into the consumer, which adds them in order, in float32.

    With weights they are the outputs of each token's experts: those of one token are adjacent, its first C parts are
    multiplied by its weights, and a shared expert's comes last.
    """

    values: Tensor  # [S, ...]; with weights [P, D]
    dtype: torch.dtype  # that the sum is rounded to
    weights_NC: Tensor | None = None  # float32

    @property
    def shape(self) -> torch.Size:
        """Of the sum."""
        if self.weights_NC is None:
            return self.values.shape[1:]
        return torch.Size((self.weights_NC.shape[0], self.values.shape[-1]))

    def unflatten(self, dim: int, sizes: tuple[int, ...]) -> Self:
        """Splits a dimension of the sum, counted from the last; only without weights."""
        return self._replace(values=self.values.unflatten(dim, sizes))


class Rounded(NamedTuple):
    """Rows in 8 bits, whose scales the consumer multiplies its products with."""

    values: Tensor
    scale: Tensor  # float32, the shape of `values` without the last dimension
    dtype: torch.dtype  # of the rows before they were rounded
    wide: Tensor | None = None  # these rows, if the consumer wants both


class Summing(Protocol):
    """The ranks that divide the inputs of a layer among them."""

    @property
    def exchange(self) -> Exchange | None:
        """How kernels may add up two ranks' rows as they read them; None: they may not."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks, maybe in place."""
        ...


class Share(NamedTuple):
    """The addend of one rank, where ranks divide the inputs of a layer among them."""

    value: Tensor | Parts
    ranks: Summing

    @property
    def shape(self) -> torch.Size:
        return self.value.shape


Deferred = Tensor | Parts | Rounded | Share
"""A tensor, or one whose last sum or product is left to the kernel that reads it, so that no kernel runs for that
alone. `dinfer.kernels.deferred.close` makes a tensor of any."""


class Matrices(NamedTuple):
    """Weights of all experts, and of one that is shared, if there is one: [X, O, K] and [O, K], scales [X, O], [O]."""

    each: Tensor
    scale: Tensor | None = None
    shared: Tensor | None = None
    shared_scale: Tensor | None = None


class Dealt(NamedTuple):
    """Which experts are here, where ranks deal them out: those from `first` on, of so many in all."""

    first: int
    experts: int


class Plan(NamedTuple):
    """Which pairs of token and expert belong to each expert, and how they are cut into tiles of `rows` of one expert.

    `pairs_XN`: their numbers, ascending, counted token by token, and for each in the order of its experts. A shared
    expert is each token's last and the last of all, but its tiles come first: they are the most. A tile: its expert, or
    -1 if it is none, the first of its pairs among those of the expert and in the order of tiles, and how many they are.
    Where it is not `whole`, some pairs belong to experts that are elsewhere, and no tile has them.
    """

    pairs_XN: Tensor
    tile_I4: Tensor
    rows: int
    pairs: int
    whole: bool = True


Inputs = Literal["plain", "rounded", "both"]
"""How a layer takes its input rows: as they are, rounded to float8, or rounded with the original beside."""


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """RMSNorm of each query head, by the first E weights, and of each key head, by the last E (Qwen3's QK-norm)."""

    weight_X: Tensor  # [2 * E]
    eps: float


Table = tuple[Tensor, Tensor]
"""cos and signed sin of a rotation, see `dinfer.kernels.rotary.rotary_table`."""


class Projections(NamedTuple):
    """Queries, keys and values of a layer; norm and rotation are left to the kernel that stores the keys."""

    qkv_BWXE: Tensor | Parts  # query heads, then key heads, then as many value heads
    heads: int  # query heads
    table: Table
    norm: HeadNorm | None = None
