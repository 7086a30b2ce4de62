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
