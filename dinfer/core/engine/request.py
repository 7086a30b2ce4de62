"""The engine's input and output, in token ids. The engine knows nothing of text."""

from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from dinfer.core.step.cursors import Phase
from dinfer.core.step.told import LEVELS, SURE, TokenLogprob
from dinfer.core.terms.spec import ModelSpec

Deltas = Literal["commit", "block"]
"""When updates hold output: as soon as it is final, or with its block. Decoders that edit are final with the block."""


@dataclass(frozen=True, slots=True)
class Wants:
    """What the updates of a request hold beside its counts."""

    snapshots: bool = False  # the canvas
    deltas: Deltas | None = None  # new output
    drafts: bool = False  # the active blocks, drafts included
    logprobs: bool = False  # with deltas: log-probabilities of new output

    @property
    def canvas(self) -> bool:
        """Whether the host needs the canvas after each step."""
        return self.snapshots or self.drafts or self.deltas is not None


ONLY_COUNTS = Wants()


@dataclass(frozen=True, slots=True)
class Request:
    """One row of work: `new_tokens` positions behind a prompt, or, with `gaps`, positions anywhere in it."""

    prompt: list[int]
    new_tokens: int
    options: list[float] = field(default_factory=list)  # from `Recipe.resolve`, without defaults at the end
    gaps: list[bool] | None = None  # which positions of `prompt` to fill in; None: none
    stops: bool = True  # a generated stop token ends it, if the iteration says so
    padding: int = 0  # positions behind all these, which are decoded and left out of the answer
    more: dict[str, Any] = field(default_factory=dict)  # what abilities need of it, in plain values
    first: int | None = None  # where an answer begins that is partly written; None: it begins open

    @property
    def asked(self) -> int:
        """Positions without the padding ones."""
        return len(self.prompt) + self.new_tokens

    @property
    def length(self) -> int:
        return self.asked + self.padding

    @property
    def masked(self) -> list[bool]:
        """Which positions to decode."""
        return (self.gaps or [False] * len(self.prompt)) + [True] * (self.new_tokens + self.padding)

    @property
    def text_behind_a_gap(self) -> bool:
        """Whether given text stands behind a gap. False for a partly written answer: its blocks see the written part as
        they see any decoded text."""
        gaps = (self.gaps or []) if self.first is None else []
        return True in gaps and not all(gaps[gaps.index(True) :])

    def check(self, spec: ModelSpec) -> None:
        """Raises a ValueError that names the field if the model cannot run the request."""
        each: type
        for name, value, each in (("prompt", self.prompt, int), ("gaps", self.gaps, bool)):
            if value is None and name == "gaps":
                continue
            if type(value) is not list or not {*map(type, value)} <= {each}:
                what = "token ids (integers)" if each is int else "true or false for each token of the prompt"
                raise ValueError(f"a request's {name} must be a list of {what}, not {value!r:.80}")
        for name, count in (("new_tokens", self.new_tokens), ("padding", self.padding)):
            if type(count) is not int or count < 0:
                raise ValueError(f"a request's {name}={count!r:.80} must be an integer, 0 or more")
        if type(self.stops) is not bool:
            raise ValueError(f"a request's stops={self.stops!r:.80} must be true or false")
        if not self.prompt:
            raise ValueError("the prompt is empty: give at least one token")
        gaps = [False] * len(self.prompt) if self.gaps is None else self.gaps
        if len(gaps) != len(self.prompt):
            raise ValueError(f"{len(gaps)} gaps for a prompt of {len(self.prompt)} tokens: give one for each")
        if not self.new_tokens and True not in gaps:
            raise ValueError("there is nothing to decode: give new_tokens, or gaps with an open position")
        for at, (token, gap) in enumerate(zip(self.prompt, gaps, strict=True)):
            if not (gap or 0 <= token < spec.vocab):
                raise ValueError(f"token {token} is outside the vocabulary of {spec.vocab}")
            if not gap and token == spec.mask_id:
                raise ValueError(
                    f"the mask token {token} stands at position {at}; a prompt is given text, and masks are put behind "
                    "it or into its gaps"
                )
        if self.length > spec.max_length:
            room = spec.max_length - len(self.prompt) - self.padding
            fewer = f" or ask for at most {room}" if room > 0 else ""
            raise ValueError(
                f"{len(self.prompt)} prompt tokens and {self.new_tokens} new ones exceed the model's {spec.max_length} "
                f"positions: shorten the prompt{fewer}"
            )

    def answer(self, canvas: list[int], stop_ids: Container[int]) -> tuple[list[int], bool]:
        """The generated tokens before the first stop token, and whether a stop token ended them."""
        gaps = self.gaps or []
        filled = [token for token, masked in zip(canvas, gaps, strict=False) if masked] + canvas[len(self.prompt) :]
        end = next((i for i, token in enumerate(filled) if token in stop_ids), len(filled))
        stopped = self.stops and end < len(filled)
        return filled[:end] if stopped else filled, stopped

    @property
    def start(self) -> int:
        """Where the answer begins: at the first position to decode, if nothing of it is written."""
        if self.first is not None:
            return self.first
        return self.gaps.index(True) if self.gaps and True in self.gaps else len(self.prompt)


def whole(request: Request) -> Request:
    """The request with its padding positions in the answer, for callers that look at the canvas."""
    return replace(request, new_tokens=request.new_tokens + request.padding, padding=0)


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
    more: Mapping[str, Any] = field(default_factory=dict)  # what abilities tell of it, such as forced commits

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
    more: Mapping[str, Any] = field(default_factory=dict)  # see `Counts.more`, as far as it is known
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
