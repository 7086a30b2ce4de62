"""Linear layers whose weights any format of `dinfer.core.layers.format` holds, and rounding a network to one.

Kernels of one layer leave unfinished values to those of the next (`Deferred`). A module that takes part has a method
`deferred`. What somebody put around or into such a module, an adapter, a parametrization or a hook, is never passed
over: then the module is called with tensors, as any other (`apply`).
"""

from operator import attrgetter
from typing import Any, ClassVar

from torch import Tensor, nn

from dinfer.core.kernels.deferred import close, share
from dinfer.core.kernels.dispatch import untouched
from dinfer.core.kernels.moe import ExpertWeight, wide_linear
from dinfer.core.kernels.types import Deferred, InputFormat
from dinfer.core.layers.format import PLAIN, Format, Weight
from dinfer.core.ranks.ranks import Ranks


def fused(module: nn.Module) -> bool:
    """Whether a module takes and gives unfinished values: its class itself, no parent, defines `deferred`."""
    return "deferred" in vars(type(module)) and untouched(module)


def inputs_of(module: Any) -> InputFormat:
    """How whatever makes the inputs of a module should leave them."""
    return module.input_format if fused(module) else "plain"


def apply(module: Any, x: Deferred, *more: Any) -> Deferred:
    """A module's outputs, for a consumer that finishes them. Raises ValueError for an adapter of a rank's share."""
    if fused(module):
        return module.deferred(x, *more)
    if any(isinstance(part, Formatted) and part.divided for part in module.modules()):
        raise ValueError(
            f"{type(module).__name__} is around or in a layer that ranks divide among them, and it cannot be divided; "
            "use tensor_parallel=1, or merge the adapter first"
        )
    return module(close(x), *more)


class Formatted(nn.Module):
    """A module some of whose parameters are weights that a format holds."""

    formats: dict[str, Format]  # by the name of the parameter
    divided: bool = False  # whether it holds one rank's share
    rounds: ClassVar[bool] = True  # whether `quantize` rounds its weights

    def weight_of(self, name: str) -> Weight:
        """The tensors of a weight: the parameter, and the buffers of its format."""
        # By name, since a parametrized weight is no parameter.
        return attrgetter(name)(self), *(self.get_buffer(f"{name}{end}") for end in self.formats[name].beside)

    def hold(self, name: str, weight: Weight, held: Format) -> None:
        """Replaces a weight by one of that format."""
        setattr(self, name, nn.Parameter(weight[0], requires_grad=False))
        for end, tensor in zip(held.beside, weight[1:], strict=True):
            self.register_buffer(f"{name}{end}", tensor, persistent=False)
        self.formats[name] = held

    def write(self, name: str, values: Tensor) -> None:
        """Writes a weight in the format that holds it, rounded if need be. Raises ValueError."""
        for held, made in zip(self.weight_of(name), self.formats[name].make(values), strict=True):
            held.detach().copy_(made)

    def expert(self, name: str) -> ExpertWeight:
        """A weight as the matrix of one expert, or of all of them."""
        return self.formats[name].experts(self.weight_of(name))


class Linear(Formatted, nn.Linear):
    """As torch's, for as few rows as a denoising step has.

    `ranks` add up the outputs of all ranks, where they divide the inputs among them.
    """

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self.formats = {"weight": PLAIN}
        self.ranks: Ranks | None = None

    @property
    def input_format(self) -> InputFormat:
        """How whatever makes the inputs should leave them."""
        return self.formats["weight"].input_format(self.weight_of("weight"))

    def forward(self, x: Deferred) -> Tensor:
        return close(self.deferred(x, parts=False))

    def deferred(self, x: Deferred, *, parts: bool = True) -> Deferred:
        """As called, for a consumer that may add up ranks' addends, and `parts` of each."""
        out = self.formats["weight"].linear(x, self.weight_of("weight"), self.bias, parts=parts)
        return share(out, self.ranks)


class Router(nn.Linear):
    """The scores of all experts, in float32 or wider."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    input_format: ClassVar[InputFormat] = "plain"

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., X]"""
        return close(self.deferred(x)).view(*x.shape[:-1], -1)

    def deferred(self, x: Deferred) -> Deferred:
        """[..., D] -> [N, X]"""
        return wide_linear(x, self.weight)


class Embedding(Formatted, nn.Embedding):
    """A table of vectors, as a checkpoint has it: `quantize` leaves it alone."""

    rounds = False

    def __init__(self, rows: int, width: int) -> None:
        super().__init__(rows, width)
        self.formats = {"weight": PLAIN}

    @property
    def table(self) -> Tensor:
        """All vectors. [V, D]"""
        return self.formats["weight"].widened(self.weight_of("weight"))

    def forward(self, tokens: Tensor) -> Tensor:
        """[...] -> [..., D]; no other row is widened."""
        return self.formats["weight"].rows(self.weight_of("weight"), tokens)

    def logits(self, x: Deferred) -> Tensor:
        """As the head of a network that has none of its own. [..., D] -> [..., V]"""
        return close(self.formats["weight"].linear(x, self.weight_of("weight"), None))


def formatted(network: nn.Module, embeddings: bool = False) -> dict[str, tuple[Formatted, str]]:
    """The parameters that formats hold: their modules and what they are called there.

    Those that `quantize` rounds, and the `embeddings`, which it does not, if they are wanted too.
    """
    modules = {
        path: module
        for path, module in network.named_modules()
        if isinstance(module, Formatted) and (module.rounds or embeddings)
    }
    return {f"{path}.{own}": (module, own) for path, module in modules.items() for own in module.formats}
