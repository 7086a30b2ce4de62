"""How the tensors of one model are divided among ranks: plain data."""

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Rank:
    """The number of this process among the `ranks` that divide the tensors of one model (tensor parallelism)."""

    rank: int = 0
    ranks: int = 1
    expert_parallel: bool = False  # experts are dealt out whole; otherwise each rank has a part of every expert

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.ranks:
            raise ValueError(f"rank={self.rank} must be 0 to {self.ranks - 1}, as there are ranks={self.ranks}")


WHOLE = Rank()


class Section(NamedTuple):
    """Equal units that follow one another along a dimension, such as the query heads."""

    name: str
    units: int
    size: int = 1  # positions of a unit

    def share(self, rank: Rank) -> tuple[int, int]:
        """The units `[first, end)` of a rank. ValueError if they do not divide.

        Key heads that are fewer than the ranks are repeated; tokens of the vocabulary need not divide.
        """
        units, ranks = self.units, rank.ranks
        if units % ranks == 0 or self.name == "vocab":
            return units * rank.rank // ranks, units * (rank.rank + 1) // ranks
        if self.name == "kv_heads" and ranks % units == 0:
            first = rank.rank * units // ranks
            return first, first + 1
        raise ValueError(f"{self.name}={units} cannot be divided among ranks={ranks}: it must be a multiple")


@dataclass(frozen=True, slots=True)
class Split:
    """How ranks divide one dimension of a parameter: each has its share of every section, in order."""

    dim: int
    sections: tuple[Section, ...]

    def ranges(self, rank: Rank) -> list[tuple[int, int]]:
        """The positions `[first, end)` that a rank holds, section by section."""
        found, begin = [], 0
        for section in self.sections:
            first, end = section.share(rank)
            found.append((begin + first * section.size, begin + end * section.size))
            begin += section.units * section.size
        return found


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a checkpoint's tensor goes in a parameter of the network, and how ranks divide that parameter.

    A parameter of all experts has these as its first dimension. Such a tensor is the matrix of one expert, or one of
    three dimensions holds a matrix of each.
    """

    parameter: str
    shape: tuple[int, ...]  # of the tensor
    row: int = 0  # where in the matrix its first row goes
    split: Split | None = None  # None: every rank holds the whole parameter
    experts: int = 0  # that the parameter is of
    expert: int | None = None  # whose matrix it is; None: all experts', or the parameter is not of experts

    @property
    def at(self) -> tuple[slice, ...]:
        """The part of the parameter that the tensor fills: a slice for each dimension."""
        at = [slice(0, size) for size in self.shape]
        rows = max(len(at) - 2, 0)
        at[rows] = slice(self.row, self.row + self.shape[rows])
        return (*([] if self.expert is None else [slice(self.expert, self.expert + 1)]), *at)

    def division(self, rank: Rank) -> Split | None:
        """How the parameter is divided; None: every rank holds it whole."""
        if rank.ranks == 1:
            return None
        return Split(0, (Section("experts", self.experts),)) if self.experts and rank.expert_parallel else self.split

    def pieces(self, rank: Rank = WHOLE) -> list[tuple[tuple[slice, ...], tuple[slice, ...]]]:
        """What a rank reads: slices of the tensor, and the part of the rank's own parameter that they fill."""
        at, source = self.at, tuple(slice(0, size) for size in self.shape)
        if (split := self.division(rank)) is None:
            return [(source, at)]
        dim, found, begin = split.dim, [], 0
        for first, end in split.ranges(rank):
            low, high = max(first, at[dim].start), min(end, at[dim].stop)
            if low < high:
                mine, theirs = list(at), list(source)
                mine[dim] = slice(begin + low - first, begin + high - first)
                if (own := dim - len(at) + len(source)) >= 0:
                    theirs[own] = slice(low - at[dim].start, high - at[dim].start)
                found.append((tuple(theirs), tuple(mine)))
            begin += end - first
        return found
