"""The engine's input and output, in token ids. The engine knows nothing of text."""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from dinfer.core.step.cursors import Phase
from dinfer.core.step.request import Ask, Request, Resolved, T, of_kind
from dinfer.core.step.told import LEVELS, SURE, Level, Report, TokenLogprob

__all__ = ["Ask", "Completion", "Counts", "Deltas", "Request", "Resolved", "Update", "Wants"]

Deltas = Literal["commit", "block"]
"""When updates hold output: as soon as it is final, or with its block. Decoders that edit are final with the block."""


@dataclass(frozen=True, slots=True)
class Wants:
    """What the updates of a request hold beside its counts."""

    snapshots: bool = False  # the canvas
    deltas: Deltas | None = None  # new output
    drafts: bool = False  # the active blocks, drafts included
    logprobs: bool = False  # with deltas: log-probabilities of new output
    tokens: tuple[int, ...] = ()  # with logprobs: of these first
    ends: bool = False  # with deltas: also the stop token that ended the output

    @property
    def canvas(self) -> bool:
        """Whether the host needs the canvas after each step."""
        return self.snapshots or self.drafts or self.deltas is not None

    def of(self, request: Request) -> Request:
        """The request, with what its steps must report for this."""
        if not (self.logprobs or self.drafts):
            return request
        report = Report(int(Level.LOGPROBS if self.logprobs else Level.DRAFTS), self.tokens)
        return replace(request, asks=(*(ask for ask in request.asks if not isinstance(ask, Report)), report))


ONLY_COUNTS = Wants()


@dataclass(frozen=True, slots=True)
class Counts:
    """The cost and the yield of a request."""

    forwards: int  # NFE: forwards this request took part in
    prefills: int  # forwards that only computed keys, of the prompt or of a finished block
    refreshes: int  # forwards over the whole canvas that kept keys and values
    committed: int  # masked positions decoded, stop tokens included
    tokens: int  # generated tokens before the first stop token
    seconds: float  # wall time from admission to the last step
    positions: int = 0  # computed in all forwards, those of candidates and branches included
    hits: int = 0  # denoise steps without a forward, see `dinfer.speed.abilities.candidates`
    told: tuple[Any, ...] = ()  # what abilities tell of it, one of each kind

    def tells(self, kind: type[T]) -> T | None:
        """What an ability tells of this kind, such as how many tokens a constraint forced; None: nothing."""
        return of_kind(kind, self.told)

    @property
    def tpf(self) -> float:
        """Tokens per forward."""
        return self.tokens / self.forwards

    @property
    def positions_per_committed(self) -> float:
        """Computed positions, those of the prompt included, per decoded one."""
        return self.positions / max(self.committed, 1)


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request."""

    canvas: list[int]  # prompt and generation; positions that an early stop left undecoded hold the eos id
    output: list[int]  # generated tokens before the first stop token, those in gaps included
    stopped: bool  # a stop token ended it; False: max_new_tokens did
    counts: Counts
    decoded: list[bool] = field(default_factory=list)  # of each position of `canvas`: it was decoded, not filled up


@dataclass(slots=True)  # one is made for every row of every step, and a frozen one takes five times as long
class Update:
    """A request after a step."""

    index: int  # which request
    forwards: int
    phase: Phase  # of the step: over the prompt, the whole canvas or a window
    region: tuple[int, int]  # active positions of the step
    tokens: list[int] | None = None  # with snapshots: the canvas after the step
    masked: list[bool] | None = None  # with snapshots: its positions that are still to be decoded
    completion: Completion | None = None  # after the last step
    blocks: int = 0  # finished blocks
    new: list[int] | None = None  # with deltas: output that became final since the last update
    logprobs: list[TokenLogprob] | None = None  # with logprobs: of `new`
    active: list[int] | None = None  # with drafts: tokens of `region`, ~token where it is open
    offers: list[int] | None = None  # with drafts: tokens proposed or written there, see `Update.drafts`
    cached: int = 0  # tokens of the prompt whose keys were shared when the request began
    positions: int = 0  # computed so far
    committed: int = 0  # masked positions decoded so far
    error: Exception | None = None  # why the request ended without a completion: NonFiniteLogits, StalledRow, any

    @property
    def drafts(self) -> list[tuple[int, float, bool]]:
        """For each position of `region`: its token or the last proposal (-1: none), the probability of that, and
        whether it is a token. Empty without drafts."""
        pairs = zip(self.active or [], self.offers or [], strict=True)
        return [
            (offer // LEVELS if token < 0 else token, min(max(offer, 0) % LEVELS / SURE, 1.0), token >= 0)
            for token, offer in pairs
        ]

    @property
    def full(self) -> bool:
        """The step was a pass over the whole canvas."""
        return self.phase == Phase.FULL
