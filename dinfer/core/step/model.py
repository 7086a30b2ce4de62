"""What the step needs of a network, a network of the step, and what is chosen beside it.

Shape suffixes as in `dinfer.core.step.contracts`.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import or_
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from dinfer.core.options import options_of, values_of
from dinfer.core.ranks.ranks import ALONE, Ranks
from dinfer.core.step.contracts import CachePolicy, Component, Decoder, Iteration
from dinfer.core.step.cursors import BlockView
from dinfer.core.step.request import DEFAULTS, Resolved
from dinfer.core.step.shape import HostFacts
from dinfer.core.terms.spec import ModelSpec
from dinfer.core.terms.stats import Draw, VocabularySlice


class Attend(Protocol):
    """What a model needs beside its inputs: positions, attention over keys, and what is read of it."""

    @property
    def pos_BW(self) -> Tensor: ...
    @property
    def context_BW(self) -> Tensor | None: ...  # bool, positions before the active region; only if `spec.encoder`
    @property
    def needed_BX(self) -> Tensor | None: ...  # int64, which of the W hidden states are read, see `Model.forward`

    def __call__(self, layer: int, qkv: Any, needed_BX: Tensor | None = None) -> Any:
        """Norms and rotates queries and keys, keeps what is to be kept, and attends. [B, W, heads, E]

        `needed_BX`: only the queries at these of the W places attend. [B, X, heads, E]
        Where `qkv` says that the next layer takes rounded rows, it may leave these instead: `Grouped` or `Rounded`.
        `qkv` is what `dinfer.core.kernels.rotary.projections` makes of a layer's projections; only kernels look inside.
        """
        ...


class Network(Protocol):
    """What a forward needs. It keeps no state between calls; keys and values go through `attend`."""

    def embed(self, tokens_BW: Tensor) -> Tensor: ...  # [B, W, D]
    def forward(self, x_BWD: Tensor, attend: Attend) -> Tensor:
        """Hidden states before the final norm. [B, W, D], or of the places `attend.needed_BX` alone, [B, X, D].

        Nobody reads the others. A network that makes use of that computes keys and values of all places in its last
        layer, and all else of the places that are read.
        """
        ...

    def logits(self, h_BLD: Tensor) -> Tensor: ...  # [B, L, V]


class Model(Network, Protocol):
    """A network, and what it is."""

    spec: ModelSpec

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...

    def mix(self, logits_BLV: Tensor) -> Tensor: ...  # [B, L, D], the expected embedding under softmax(logits)


@runtime_checkable
class OwnLogits(Protocol):
    """What a `Model` also defines if ranks may divide its vocabulary."""

    def own_logits(self, h_BLD: Tensor) -> Tensor:
        """The logits of the tokens `ranks.vocabulary(spec.vocab)` alone. [B, L, D] -> [B, L, own]"""
        ...


class Divided(OwnLogits, Protocol):
    """What a `Model` also defines if ranks may divide its weights."""

    ranks: Ranks

    def join(self, ranks: Ranks) -> None:
        """Makes a network that holds the share of one rank compute with the others. Once, before anything else."""
        ...


Options = Mapping[str, Tensor]
"""Per-request options of one component by name, [R, 1] each."""


class Sampling(Component):
    """Decides which token each position is offered, in steps where some row does not take the most likely one.

    For models without a mask token it also decides what open positions hold.
    """

    kind = "sampling"
    neutral: ClassVar[Mapping[str, float]] = {}  # the values of options at which they change nothing
    by_parts: ClassVar[bool] = False  # `adjust` and `draw` do with a rank's part of the vocabulary (`columns`)
    suppress: tuple[int, ...] = ()
    suppress_mask: bool = False  # statistics as if the mask token could not be predicted
    precision: str | None = None  # of the softmax behind the statistics; None: as the decoder has it

    def asks(self, options: Mapping[str, float]) -> bool:
        """Whether a request with these options needs steps with the extra `Sampled`. Host side."""
        return bool(self.suppress) or any(options.get(name, value) != value for name, value in self.neutral.items())

    def top_candidates(self, options: Mapping[str, float], vocab: int) -> int:
        """Size of the top-k candidate set of a request with these options; 0 means unrestricted. Host side.

        The step then sorts so many tokens and not the whole vocabulary.
        """
        return 0

    @abstractmethod
    def adjust(
        self, logits_RLV: Tensor, view: BlockView, options: Options, spec: ModelSpec, columns: VocabularySlice
    ) -> Tensor:
        """Logits for the decoder to adjust, a new tensor, without tokens that may not be offered."""

    @abstractmethod
    def draw(
        self, logits_RLV: Tensor, count_RV: Tensor, view: BlockView, options: Options, spec: ModelSpec, top: int,
        columns: VocabularySlice,
    ) -> Draw:  # fmt: skip
        """Draws a token for each position. A row whose options are neutral must come out as without sampling.

        `count_RV`: how often the canvas holds each token. `top`: the largest `top_candidates` of the rows, or more.
        """

    @abstractmethod
    def noise(self, seed: Tensor, pos: Tensor, step: Tensor, vocab: int) -> Tensor:
        """Uniform random tokens, which open positions hold after `step` denoise steps of the request. int64"""


@dataclass(frozen=True)
class Parts:
    """A recipe as the step takes it: a model and four choices."""

    model: Model
    iteration: Iteration
    decoder: Decoder
    cache: CachePolicy
    sampling: Sampling

    @cached_property
    def abilities(self) -> tuple[type[Any], ...]:
        """Classes of `dinfer.core.step.ability.Ability` that its steps ask, in the order of their hooks."""
        return ()

    @cached_property
    def facts(self) -> HostFacts:
        """What the host must know of the abilities of its steps."""
        return reduce(or_, (ability.facts(self) for ability in self.abilities), HostFacts())

    @property
    def ranks(self) -> Ranks:
        """The ranks that divide the model among them."""
        return getattr(self.model, "ranks", ALONE)  # asked several times a step: checking a protocol takes long

    @cached_property
    def request_options(self) -> Mapping[str, int | float]:
        """The options that every request may set for itself, by full name such as "decoder.threshold": the defaults."""
        return {
            f"{part.kind}.{info.name}": values_of(part)[info.name]
            for part in (self.decoder, self.sampling)
            for info in options_of(part)
            if info.per_request
        }

    def values(self, options: Resolved = DEFAULTS) -> Mapping[str, float]:
        """A request's options by full name, in the order of `request_options`."""
        return options.values or {name: float(value) for name, value in self.request_options.items()}

    def sampling_of(self, options: Resolved = DEFAULTS) -> dict[str, float]:
        """The sampling's options of a request, by name."""
        named = ((name.partition("sampling."), value) for name, value in self.values(options).items())
        return {own: value for (_, kind, own), value in named if kind}
