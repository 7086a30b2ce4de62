"""The host's state of a request that waits or runs."""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from dinfer.core.abilities.reports import Level, Reports, TokenLogprob
from dinfer.core.engine.request import (
    BrokenContract,
    Completion,
    Counts,
    NonFiniteLogits,
    Request,
    StalledRow,
    Update,
    Wants,
)
from dinfer.core.memory import Key
from dinfer.core.recipe.recipe import Recipe
from dinfer.core.step.canvas import ACTIVE, Cursors, Phase
from dinfer.core.step.mixins import Edits, Slides
from dinfer.core.step.shape import Extra

PLACE = Cursors._fields.index("forwards")  # the cursors before this one are a row's place, the others count
PHASES = [*Phase]  # by number
STALL_LIMIT = 256  # steps in a row that change neither tokens, block nor keys


@dataclass(slots=True)
class StepWidth:
    """What a row needs of its next step."""

    width: int  # positions to compute
    narrow: int | None = None  # width of a narrow extra pass, see `CachePolicy.narrow`


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
    asks: tuple[Extra, ...] = ()  # of its steps
    open_before: list[int] = field(default_factory=list)  # for each position, the number of positions to decode before
    prefix_keys: list[Key] = field(default_factory=list)  # of the pages of its prompt that others may share
    published: int = 0  # how many of these pages are published
    awaited: bool = False  # a request waits for these pages
    cached: int = 0  # tokens whose keys were shared at its admission

    # From step to step.
    canvas: list[int] = field(default_factory=list)  # ~token where it is open; known at the end, or if `wants.canvas`
    settled: int = 0  # final positions that updates have reported
    output: int = 0  # tokens of output that updates have reported
    active: list[int] = field(default_factory=list)  # with drafts: the blocks that were active, ~token where open
    offers: list[int] = field(default_factory=list)  # with drafts: see `Reports.draft_NS`
    heard: dict[int, TokenLogprob] = field(default_factory=dict)  # with logprobs: by position
    cursors: Cursors = field(default_factory=Cursors)  # as last read
    before: Cursors = field(default_factory=Cursors)  # before the last step
    idle: int = 0  # steps launched for it since tokens, block or keys last changed
    since: int = 0  # forwards at that time
    tried: int = 0  # candidates of its last step
    drafted: bool = False  # the last step decoded and left the row in its blocks, so there are drafts for the next
    steady: bool = False  # the last step changed only counts
    missed: bool = False  # the last step did not fit it
    slid: bool = False  # its active region has moved without entering a block
    waited: int = 0  # rounds in a row that took others, where rows take steps by turns
    left: int = 0  # open positions of the active blocks
    fastest: int = 0  # the most positions that a step has committed
    positions: int = 0  # computed for it
    figures: Mapping[str, Any] = field(default_factory=dict)  # what abilities tell of it, known at the end
    need: StepWidth = field(default_factory=lambda: StepWidth(0))  # of the next step, cached
    need_at: tuple[int, ...] = ()  # the cursors for which `need` is valid

    @property
    def more(self) -> dict[str, Any]:
        """What abilities need of it, see `dinfer.core.step.state.Entry`."""
        level = Level.LOGPROBS if self.wants.logprobs else Level.DRAFTS if self.wants.drafts else Level.NOTHING
        return self.request.more | ({"reports": int(level)} if level else {})

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
        self.fastest = max(self.fastest, gained)
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

    def read_tokens(self, active_X: Tensor, drafts_X: Tensor, reports: Reports, *, behind: bool) -> None:
        """Takes the tokens of the blocks that were active, and, as far as it wants them, drafts and log-probabilities.

        `behind`: the step may also have written to a new block behind them.
        """
        start, end = self.before.start, self.before.end
        stop = self.request.length if behind else end
        known = active_X[: stop - start].tolist()
        self.canvas[start : start + len(known)] = known
        self.active = known[: end - start]
        if self.wants.drafts:
            self.offers = drafts_X[: end - start].tolist()
        new = not self.steady or self.cursors.committed != self.before.committed
        if self.wants.logprobs and self.slot is not None and new:
            self.heard.update(zip(range(start, stop), reports.logprobs(self.slot, start, stop), strict=True))

    def update(self, recipe: Recipe) -> Update:
        """The update for the caller about the last step, or about the error that ended the row."""
        step, now = self.before, self.cursors
        where = self.index, now.forwards, PHASES[step.phase], (step.start, step.end)
        if self.error is not None:
            return Update(*where, blocks=now.block, error=self.error)
        done = self._completion(recipe) if now.phase == Phase.IDLE else None
        tokens, masked, new, logprobs = None, None, None, None
        if self.wants.snapshots:
            canvas = self.canvas[: self.request.asked]
            tokens, masked = [max(token, ~token) for token in canvas], [token < 0 for token in canvas]
        if self.wants.deltas is not None:
            new = self._settle(recipe) if done is None else done.output[self.output :]
            if self.wants.logprobs:
                decoded = [at for at, masked in enumerate(self.request.masked) if masked]
                logprobs = [self.heard[at] for at in decoded[self.output : self.output + len(new)]]
            self.output += len(new)
        active, offers = (self.active, self.offers) if self.wants.drafts else (None, None)
        return Update(
            *where, tokens, masked, done, now.block, new, logprobs, active, offers, cached=self.cached,
            positions=self.positions, committed=now.committed, more=self.figures,
        )  # fmt: skip

    def _settle(self, recipe: Recipe) -> list[int]:
        """The output that has become final since the last call. Not for a finished row."""
        whole, stop_ids = self.wants.deltas == "block" or isinstance(recipe.decoder, Edits), recipe.model.spec.stop_ids
        end, new, at = self.cursors.start if whole else self.request.asked, list[int](), self.settled
        while at < min(end, self.request.asked) and (token := self.canvas[at]) >= 0:
            if self.open_before[at] < self.open_before[at + 1]:
                if self.request.stops and token in stop_ids:
                    break
                new.append(token)
            at += 1
        self.settled = at
        return new

    def _completion(self, recipe: Recipe) -> Completion:
        spec = recipe.model.spec
        tokens = [token if token >= 0 else spec.eos_id for token in self.canvas[: self.request.asked]]
        output, stopped = self.request.answer(tokens, spec.stop_ids)
        now, seconds = self.cursors, time.perf_counter() - self.began
        prefills = now.forwards + now.hits - now.steps
        counts = Counts(
            now.forwards, prefills, now.refreshes, now.committed, len(output), seconds, self.positions, now.hits,
            self.figures,
        )  # fmt: skip
        return Completion(tokens, output, stopped, counts)
