"""The contract of a model family, and where the tensors of its checkpoints go."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from dinfer.core.ranks.split import WHOLE, Rank, Section
from dinfer.core.step.contracts import Component
from dinfer.core.terms.spec import ExpertLayout, ModelSpec


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


class ModelFamily(Component):
    """What the checkpoints of one family mean. Options say which one; `dinfer.core.loading.checkpoint` loads it."""

    kind = "model"
    harmless: ClassVar[frozenset[str]] = frozenset()  # fields of config.json that it need not read, see `Fields.unread`
    unused: ClassVar[tuple[str, ...]] = ()  # beginnings of the names of tensors that the network has no use for
    adapter: str | None = None  # hub name or folder of a LoRA adapter to merge
    tokenizer: ClassVar[str | None] = None  # transformers class for checkpoints whose own tokenizer is remote code

    @classmethod
    @abstractmethod
    def matches(cls, config: dict[str, Any]) -> bool:
        """Whether a checkpoint's config.json belongs to this family."""

    @abstractmethod
    def spec(self, config: dict[str, Any]) -> ModelSpec:
        """Reads config.json; raises ValueError for what is missing or not supported."""

    @abstractmethod
    def network(self, spec: ModelSpec) -> Any:
        """The network, a `Model`; on whatever device is torch's default."""

    @abstractmethod
    def weights(self, spec: ModelSpec, experts: ExpertLayout = "separate") -> dict[str, Placement]:
        """Every tensor the checkpoint must have, and where it goes."""

    def finished(self, network: Any, folder: Any, rank: Rank = WHOLE) -> Any:
        """The network of a rank, once it holds the weights of the checkpoint in `folder`. A family may add to it."""
        return network

    @property
    def template(self) -> str | None:
        """The adapter whose chat template, if it has one, stands in place of the checkpoint's."""
        return self.adapter

    def copies(self, spec: ModelSpec) -> dict[str, str]:
        """Names of tied weights that some programs also save, and for each the name in `weights` that it repeats."""
        return {}
