"""What goes into the engine and what comes out. Token ids only; the engine knows nothing of text."""

from collections.abc import Container
from dataclasses import dataclass, field, replace
from typing import Literal

from dinfer.core.canvas import Phase
from dinfer.core.told import LEVELS, TokenLogprob

Deltas = Literal["commit", "block"]
"""When output is told: as soon as it is decided, or with its block. Decoders that edit decide with the block."""


class NonFiniteLogits(RuntimeError):
    """The model produced NaN or infinite logits for a request."""


class StalledRow(RuntimeError):
    """Step after step, a request committed no token and left no block."""


@dataclass(frozen=True, slots=True)
class Request:
    """One row of work: `new_tokens` positions behind a prompt, or, with `gaps`, positions anywhere in it."""

    prompt: list[int]
    new_tokens: int
    options: list[float] = field(default_factory=list)  # as `Recipe.resolve` returns them; defaults at the end left out
    gaps: list[bool] | None = None  # which positions of `prompt` are to be filled in; None: none
    stops: bool = True  # a generated stop token ends it, if the iteration says so
    spare: int = 0  # positions behind all these that are decoded with them and left out of the answer

    @property
    def asked(self) -> int:
        """Positions without the spare ones."""
        return len(self.prompt) + self.new_tokens

    @property
    def length(self) -> int:
        return self.asked + self.spare

    @property
    def masked(self) -> list[bool]:
        """Which positions are to be decoded."""
        return (self.gaps or [False] * len(self.prompt)) + [True] * (self.new_tokens + self.spare)

    def check(self, vocab: int) -> None:
        """Raises ValueError for a request that no engine can run, and names the field."""
        each: type
        for name, value, each in (("prompt", self.prompt, int), ("gaps", self.gaps, bool)):
            if value is None and name == "gaps":
                continue
            if type(value) is not list or not all(type(item) is each for item in value):
                what = "token ids (integers)" if each is int else "true or false for each token of the prompt"
                raise ValueError(f"a request's {name} must be a list of {what}, not {value!r:.80}")
        for name, count in (("new_tokens", self.new_tokens), ("spare", self.spare)):
            if type(count) is not int or count < 0:
                raise ValueError(f"a request's {name}={count!r:.80} must be an integer, 0 or more")
        if type(self.stops) is not bool:
            raise ValueError(f"a request's stops={self.stops!r:.80} must be true or false")
        if not self.prompt:
            raise ValueError("a request's prompt is empty: give at least one token")
        if self.gaps is not None and len(self.gaps) != len(self.prompt):
            raise ValueError(
                f"a request's gaps has {len(self.gaps)} values for a prompt of {len(self.prompt)} tokens: give one for "
                "each"
            )
        if not self.new_tokens and not any(self.gaps or ()):
            raise ValueError("a request has nothing to decode: give new_tokens, or gaps with an open position")
        given = (token for token, masked in zip(self.prompt, self.masked, strict=False) if not masked)
        if (outside := next((token for token in given if not 0 <= token < vocab), None)) is not None:
            raise ValueError(f"a request's prompt holds token {outside}, which is not in the vocabulary of {vocab}")

    def answer(self, canvas: list[int], stop_ids: Container[int]) -> tuple[list[int], bool]:
        """The generated tokens before the first stop token, and whether there is one."""
        gaps = self.gaps or []
        filled = [token for token, masked in zip(canvas, gaps, strict=False) if masked] + canvas[len(self.prompt) :]
        end = next((i for i, token in enumerate(filled) if token in stop_ids), len(filled))
        stopped = self.stops and end < len(filled)
        return filled[:end] if stopped else filled, stopped

    @property
    def start(self) -> int:
        """The first position that is to be decoded."""
        return self.gaps.index(True) if self.gaps and True in self.gaps else len(self.prompt)


def whole(request: Request) -> Request:
    """The request with its spare positions in the answer, for callers that look at the canvas."""
    return replace(request, new_tokens=request.new_tokens + request.spare, spare=0)


@dataclass(frozen=True, slots=True)
class Counts:
    """The cost and the yield of a request. Prompt, padding and all tokens from the first stop token on do not count."""

    forwards: int  # NFE: forwards this request took part in
    prefills: int  # of these, passes that only computed keys: of the prompt, or of a finished block
    refreshes: int  # of all, passes over the whole canvas whose keys and values were kept
    committed: int  # masked positions decoded, stop tokens included
    tokens: int  # generated tokens before the first stop token
    seconds: float  # wall time from admission to the last step
    hits: int = 0  # denoise steps that took no forward, see `dinfer.core.speculation`

    @property
    def tpf(self) -> float:
        """Tokens per forward."""
        return self.tokens / self.forwards


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request."""

    canvas: list[int]  # prompt and generation; positions that an early stop left undecoded hold the eos id
    output: list[int]  # generated tokens before the first stop token; of a request with gaps, all that fills them
    stopped: bool  # a stop token was generated; else max_new_tokens ran out
    counts: Counts


@dataclass(slots=True)  # one is made for every row of every step, and a frozen one takes five times as long
class Update:
    """One request after one step."""

    index: int  # which request
    forwards: int
    phase: Phase  # what the step was: a pass over the prompt, over the whole canvas or over a window
    region: tuple[int, int]  # active positions of the step
    tokens: list[int] | None = None  # the canvas after the step, if asked for
    masked: list[bool] | None = None  # what is still to be decoded, likewise
    completion: Completion | None = None  # after the last step
    blocks: int = 0  # finished so far
    new: list[int] | None = None  # if asked for: output that no later step changes, beyond that of earlier updates
    logprobs: list[TokenLogprob] | None = None  # of `new`, if asked for
    active: list[int] | None = None  # if drafts are asked for: tokens of `region`, ~token where it is open
    offers: list[int] | None = None  # likewise: what was proposed or written there, see `Update.drafts`
    error: Exception | None = None  # why the request ended without a completion: NonFiniteLogits, StalledRow, any

    @property
    def drafts(self) -> list[tuple[int, float, bool]]:
        """For each position of `region`: the token that stands there or was proposed last (-1: none was), its
        probability then, and whether it stands there. Empty unless drafts are asked for."""
        pairs = zip(self.active or [], self.offers or [], strict=True)
        return [
            (offer // LEVELS if token < 0 else token, max(offer, 0) % LEVELS / (LEVELS - 1), token >= 0)
            for token, offer in pairs
        ]

    @property
    def full(self) -> bool:
        """The step was a pass over the whole canvas."""
        return self.phase == Phase.FULL
