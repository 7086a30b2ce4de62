"""The contract of a format of weights, and weights as they are.

A format is how a weight is made, held and multiplied. A new one is a file in a folder `rounding` of a layer, and
registers a class in `FORMATS`.

Shape suffixes: O outputs, K inputs, X experts.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from dinfer.core.kernels.linear import linear
from dinfer.core.kernels.moe import ExpertWeight, PlainExperts
from dinfer.core.kernels.types import Deferred, InputFormat, Matrices
from dinfer.core.provided import packages
from dinfer.core.registry import Registry

FORMATS: Registry = Registry("format", *packages("rounding"))

Weight = tuple[Tensor, ...]
"""The tensors of a weight: its values, which are a parameter, and the format's buffers (`beside`)."""


Method = TypeVar("Method", bound=Callable[..., Any])


def untraced(method: Method) -> Method:
    """Marks a method that torch.compile is to leave out, because our kernels are faster than what it makes.

    Not by `torch.compiler.disable` at once: that imports the compiler, which takes as long as torch itself and 145 MB.
    """
    vars(method)["untraced"] = True
    return method


class Format(ABC):
    """How a weight is held: a matrix [O, K] of a linear layer, or one for each expert, [X, O, K]."""

    beside: ClassVar[tuple[str, ...]] = ()  # name endings of the buffers that belong to a parameter
    stored: ClassVar[str | None] = None  # the dtype of a checkpoint's weights that it holds unchanged

    def __deepcopy__(self, memo: dict[int, Any]) -> "Format":
        """Itself, so that a copy of a network can be quantized too: code compares formats by identity."""
        return self

    def like(self, *details: Any) -> "Format":
        """The same for a checkpoint's weight of which `details` say more, such as the inputs of a group."""
        return self

    def check(self, device: torch.device, what: str) -> None:
        """Raises ValueError if the device cannot compute with it. `what` names in the message who asks for it."""
        return None

    @abstractmethod
    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Weight:
        """Unwritten tensors for a weight of that shape in a model of that dtype, on torch's default device."""

    @abstractmethod
    def make(self, weight: Tensor) -> Weight:
        """The tensors that hold a weight, rounded if need be. Raises ValueError for a shape that it cannot hold."""

    @abstractmethod
    def linear(self, x: Deferred, weight: Weight, bias_O: Tensor | None, *, parts: bool = False) -> Deferred:
        """x times the weight's transpose. [..., K] -> [..., O]. `parts`: the consumer adds up partial sums."""

    @abstractmethod
    def experts(self, weight: Weight) -> ExpertWeight:
        """How tiles of rows are multiplied with the matrices of experts."""

    def input_format(self, weight: Weight) -> InputFormat:
        """How whatever makes the inputs of that weight should leave them."""
        return "plain"

    def take(self, weight: Weight, at: tuple[slice, ...], values: Tensor, scale: Tensor) -> None:
        """Fills a part of a weight with a checkpoint's values [..., O, K], around 0, and their scales [..., O, G].

        Only for formats with `stored`.
        """
        raise NotImplementedError

    def put(self, weight: Weight, at: tuple[slice, ...], values: Tensor) -> None:
        """Rounds whole rows as `make` does, and fills them into a weight that may be `settled`. Raises ValueError.

        `values`: floats [..., O, K] in the dtype of the model; `at`: where they go. No format here rounds a row by
        another one, so that the bits are those of the whole weight.
        """
        for held, made in zip(weight, self.make(values), strict=True):
            held.detach()[at[:-1]].copy_(made)

    def held(self, weight: Weight, at: tuple[slice, ...]) -> Sequence[Tensor]:
        """What it holds of a part of a weight, in the order of outputs."""
        return [part.detach()[at[: part.ndim]] for part in weight]

    def settled(self, weight: Weight) -> Weight:
        """A weight that is all there, as its device reads it fastest: as it is, unless a format says otherwise."""
        return weight

    def widened(self, weight: Weight) -> Tensor:
        """The values as floats. [..., O, K]. Only for formats of embeddings."""
        raise NotImplementedError

    def rows(self, weight: Weight, index: Tensor) -> Tensor:
        """The outputs of a matrix at `index`, as floats. [...] -> [..., K]. Only for formats of embeddings."""
        raise NotImplementedError

    def nbytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """The bytes of a weight."""
        with torch.device("meta"):
            return sum(tensor.nbytes for tensor in self.empty(shape, dtype))


@FORMATS.register("plain")
class Plain(Format):
    """Floats of the model's dtype, or of the format's own."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self.dtype = dtype

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Weight:
        return (torch.empty(shape, dtype=self.dtype or dtype),)

    def make(self, weight: Tensor) -> Weight:
        return (weight,)

    def linear(self, x: Deferred, weight: Weight, bias_O: Tensor | None, *, parts: bool = False) -> Deferred:
        return linear(x, weight[0], bias_O, parts=parts)

    def widened(self, weight: Weight) -> Tensor:
        return weight[0]

    def rows(self, weight: Weight, index: Tensor) -> Tensor:
        return F.embedding(index, weight[0])

    def experts(self, weight: Weight) -> ExpertWeight:
        return PlainExperts(Matrices(*weight))


PLAIN = Plain()
