"""A recipe as the step takes it: a model and four choices, the sampling among them.

Shape suffixes as in `dinfer.step.contracts`.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from torch import Tensor

from dinfer.parallel.ranks import Ranks
from dinfer.step.canvas import BlockView
from dinfer.step.contracts import CachePolicy, Component, Decoder, Iteration, Options
from dinfer.step.model import Model
from dinfer.step.spec import ModelSpec
from dinfer.step.stats import Draw, VocabularySlice


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
        """Whether a request with these options needs steps with `StepShape.sampled`. Host side."""
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
        """Logits for the decoder to adjust, without tokens that may not be offered; never changed in place."""

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


@dataclass(frozen=True, slots=True)
class RequestOption:
    """An option that every request may set for itself."""

    kind: str  # of the component: decoder or sampling
    name: str
    default: int | float


class Parts(Protocol):
    """A model and four choices, as the step takes them: a `dinfer.recipe.recipe.Recipe`."""

    @property
    def model(self) -> Model: ...
    @property
    def iteration(self) -> Iteration: ...
    @property
    def decoder(self) -> Decoder: ...
    @property
    def cache(self) -> CachePolicy: ...
    @property
    def sampling(self) -> Sampling: ...
    @property
    def ranks(self) -> Ranks: ...
    @property
    def request_options(self) -> Sequence[RequestOption]: ...
    @property
    def abilities(self) -> tuple[type[Any], ...]: ...  # `dinfer.step.ability.Ability`, in the order of their hooks

    def sampling_of(self, options: Sequence[float]) -> dict[str, float]:
        """The sampling's options of a request."""
        ...
