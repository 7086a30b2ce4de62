"""The host's state of a request that waits or runs."""

import time
from collections import deque
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from dinfer.core.engine.errors import BrokenContract, NonFiniteLogits, StalledRow
from dinfer.core.engine.request import Completion, Counts, Request, Update, Wants
from dinfer.core.recipe.recipe import Recipe
from dinfer.core.step.cursors import ACTIVE, Cursors, Phase
from dinfer.core.step.mixins import Edits, Slides
from dinfer.core.step.shape import Extra
from dinfer.core.step.told import TokenLogprob
from dinfer.core.terms.spec import ModelSpec

PLACE = Cursors._fields.index("forwards")  # the cursors before this one are a row's place, the others count
PHASES = [*Phase]  # by number
STALL_LIMIT = 256  # steps in a row that change neither tokens, block nor keys


@dataclass(slots=True)
class StepWidth:
    """What a row needs of its next step."""

    width: int  # positions to compute
    narrow: int | None = None  # width of a narrow extra pass, see `narrow_width`


@dataclass(slots=True, eq=False)
class Row:
    """A request, waiting or in a slot."""

    index: int  # the request's number in its updates
    request: Request
    inbox: deque[Update]  # takes its updates
    wants: Wants
    slot: int | None = None  # None: it waits
    cancelled: bool = False
    error: Exception | None = None  # why it ended without a completion

    # From its admission on.
    began: float = 0.0
    pages: list[int] = field(default_factory=list)  # its own, and those that it shares
    visible: int = 0  # pages of one branch
    extras: tuple[Extra, ...] = ()  # of its steps
    open_before: list[int] = field(default_factory=list)  # for each position, the number of positions to decode before
    prefix_keys: list[bytes] = field(default_factory=list)  # of the pages of its prompt that others may share
    published: int = 0  # how many of these pages are published
    epoch: int = 0  # of the weights at its admission, see `PageAllocator`
    awaited: bool = False  # a request waits for these pages
    cached: int = 0  # tokens whose keys were shared at its admission

    # From step to step.
    canvas: list[int] = field(default_factory=list)  # ~token where it is open; known at the end, or if `wants.canvas`
    settled: int = 0  # with deltas: output before this position is final
    active: list[int] = field(default_factory=list)  # with drafts: the blocks that were active, ~token where open
    offers: list[int] = field(default_factory=list)  # with drafts: see `Reports.draft_NS`
    fresh: list[int] = field(default_factory=list)  # with deltas: positions of output that no update has reported
    heard: list[TokenLogprob] = field(default_factory=list)  # with logprobs: of the first of these
    cursors: Cursors = field(default_factory=Cursors)  # as last read
    before: Cursors = field(default_factory=Cursors)  # before the last step
    idle: int = 0  # steps launched for it since tokens, block or keys last changed
    since: int = 0  # forwards at that time
    tried: int = 0  # candidates of its last step
    drafted: bool = False  # the last step decoded and left the row in its blocks, so there are drafts for the next
    gained: int = 0  # positions that the last step decoded
    steady: bool = False  # the last step changed only counts
    missed: bool = False  # the last step did not fit it
    slid: bool = False  # its active region has moved without entering a block
    waited: int = 0  # rounds in a row that took others, where rows take steps by turns
    left: int = 0  # open positions of the active blocks
    fastest: int = 0  # the most positions that a step has committed
    positions: int = 0  # computed for it
    told: tuple[Any, ...] = ()  # what abilities tell of it, known at the end
    need: StepWidth = field(default_factory=lambda: StepWidth(0))  # of the next step, cached
    need_at: tuple[int, ...] = ()  # the cursors for which `need` is valid

    def stays(self, cursors: Mapping[int, Sequence[int]]) -> bool:
        """Whether the cursors of its slot leave it where it was, so that it needs the same of its next step."""
        return self.slot is not None and (*cursors[self.slot][:PLACE],) == self.cursors[:PLACE]

    def advance(self, now: Cursors) -> bool:
        """Takes the cursors after a step that named the row. False: the step did not change the row."""
        old, gained = self.cursors, now.committed - self.cursors.committed
        self.idle += 1
        self.missed = now.forwards == old.forwards
        if self.missed:
            return False
        decided = now.steps > old.steps
        self.positions += self.need.width * (1 + self.tried) if decided else now.kept - old.kept
        self.steady = now[:PLACE] == old[:PLACE]
        self.slid |= now.start != old.start and now.block == old.block
        if gained or (not self.steady and (now.block, now.kept) != (old.block, old.kept)):
            self.idle, self.since = 0, now.forwards
        self.drafted = now.steps > old.steps and (self.steady or (now.start, now.end) == (old.start, old.end))
        self.gained, self.fastest = gained, max(self.fastest, gained)
        self.before, self.cursors = old, now
        self.left = self.open_before[now.end] - now.committed
        return True

    def failure(self, recipe: Recipe) -> NonFiniteLogits | StalledRow | BrokenContract | None:
        """The error of a row that cannot continue after its last step; None: it can."""
        if self.slid and not isinstance(recipe.iteration, Slides):
            name = type(recipe.iteration).__name__
            return BrokenContract(
                f"request {self.index}: {name} moved its active region from position {self.before.start} to "
                f"{self.cursors.start} without entering a block, where caches refresh their keys. Count the block as "
                f"left, or derive {name} from dinfer.core.step.mixins.Slides."
            )
        if (self.cursors.phase in ACTIVE and self.idle < STALL_LIMIT) or self.cursors.phase == Phase.IDLE:
            return None
        step, block = self.cursors.forwards, f"block at positions {self.before.start} to {self.before.end - 1}"
        if self.cursors.phase == Phase.FAULT:
            return NonFiniteLogits(
                f"request {self.index}: the model's logits are not finite (NaN or infinite) at denoise step {step}, "
                f"in the {block}. Check the checkpoint, or load the model in a wider dtype."
            )
        decoder, cache = type(recipe.decoder).__name__, type(recipe.cache).__name__
        why = f"decoder {decoder} keeps the row busy" if step > self.since else f"window of {cache} fits no step"
        return StalledRow(
            f"request {self.index}: {STALL_LIMIT} steps without a commit or a new block, at step {step}, in the "
            f"{block}: the {why}."
        )

    def read_tokens(self, active_X: Tensor, drafts_X: Tensor, *, behind: bool) -> None:
        """Takes the tokens of the blocks that were active, and, if it wants them, drafts.

        `behind`: the step may also have written to a new block behind them.
        """
        start, end = self.before.start, self.before.end
        stop = self.request.length if behind else end
        known = active_X[: stop - start].tolist()
        self.canvas[start : start + len(known)] = known
        self.active = known[: end - start]
        if self.wants.drafts:
            self.offers = drafts_X[: end - start].tolist()

    def settle(self, recipe: Recipe) -> None:
        """With deltas: notes the positions of output that have become final, all if the row is finished."""
        spec, request = recipe.model.spec, self.request
        done = self.cursors.phase == Phase.IDLE
        whole = self.wants.deltas == "block" or isinstance(recipe.decoder, Edits)
        end, at = min(self.cursors.start, request.asked) if whole and not done else request.asked, self.settled
        while at < end and (done or self.canvas[at] >= 0):
            open = self.open_before[at] < self.open_before[at + 1]
            stopped = open and request.stops and self._token(at, spec) in spec.stop_ids
            if open and (self.wants.ends or not stopped):
                self.fresh.append(at)
            at = request.asked if stopped else at + 1
        self.settled = at

    def _token(self, at: int, spec: ModelSpec) -> int:
        """What an answer has at a position: EOS where nothing was decoded."""
        return token if (token := self.canvas[at]) >= 0 else spec.eos_id

    def update(self, recipe: Recipe) -> Update:
        """The update for the caller about the last step, or about the error that ended the row."""
        spec, step, now = recipe.model.spec, self.before, self.cursors
        where = self.index, now.forwards, PHASES[step.phase], (step.start, step.end)
        if self.error is not None:
            return Update(*where, blocks=now.block, error=self.error)
        done = self._completion(recipe) if now.phase == Phase.IDLE else None
        tokens, masked, new, logprobs = None, None, None, None
        if self.wants.snapshots:
            canvas = self.canvas[: self.request.asked]
            tokens, masked = [max(token, ~token) for token in canvas], [token < 0 for token in canvas]
        if self.wants.deltas is not None:
            new, logprobs = [self._token(at, spec) for at in self.fresh], self.heard if self.wants.logprobs else None
            self.fresh, self.heard = [], []
        active, offers = (self.active, self.offers) if self.wants.drafts else (None, None)
        return Update(
            *where, tokens, masked, done, now.block, new, logprobs, active, offers, cached=self.cached,
            positions=self.positions, committed=now.committed,
        )  # fmt: skip

    def _completion(self, recipe: Recipe) -> Completion:
        spec = recipe.model.spec
        tokens = [token if token >= 0 else spec.eos_id for token in self.canvas[: self.request.asked]]
        decoded = [masked and token >= 0 for token, masked in zip(self.canvas, self.request.open, strict=True)]
        output, stopped = self.answer(tokens, spec.stop_ids)
        now, seconds = self.cursors, time.perf_counter() - self.began
        prefills = now.forwards + now.hits - now.steps
        counts = Counts(
            now.forwards, prefills, now.refreshes, now.committed, len(output), seconds, self.positions, now.hits,
            self.told,
        )  # fmt: skip
        return Completion(tokens, output, stopped, counts, decoded[: self.request.asked])

    def answer(self, canvas: list[int], stop_ids: Container[int]) -> tuple[list[int], bool]:
        """The generated tokens before the first stop token, and whether a stop token ended them."""
        filled = [token for token, open in zip(canvas, self.request.open, strict=False) if open]
        end = next((i for i, token in enumerate(filled) if token in stop_ids), len(filled))
        stopped = self.request.stops and end < len(filled)
        return filled[:end] if stopped else filled, stopped
