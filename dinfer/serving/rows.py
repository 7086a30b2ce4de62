"""A row of a request as a stream of events: final text, drafts if wanted, and how the row ended."""

import asyncio
import logging
from bisect import bisect_left
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from dinfer.core.engine.errors import BrokenContract, NonFiniteLogits, RankFailed, RequestAborted, StalledRow
from dinfer.core.engine.request import Completion, Counts, Request, Update, Wants
from dinfer.core.pipeline.tokenizer import Decode, GrowingText
from dinfer.core.provided import provided
from dinfer.core.step.mixins import Edits
from dinfer.core.step.told import FORCED, LEVELS, SURE, TokenLogprob
from dinfer.lab.trace.record import Pieces
from dinfer.serving.errors import ApiError, at_field
from dinfer.serving.guard import REQUEST_ID
from dinfer.serving.served import Served
from dinfer.structure.abilities.constraints import InLanguage
from dinfer.structure.automaton import Automaton
from dinfer.structure.limits import Budget, Limits
from dinfer.structure.regex import first_match

Ending = tuple[str, Automaton]
"""An expression, and the texts that end with a match of it."""
ENDINGS = Limits(seconds=1.0, states=2048)  # of each


async def endings_of(field: str, patterns: Sequence[str]) -> list[Ending]:
    """Compiles them, in a thread. Raises ApiError."""
    with at_field(field):
        return [(one, await asyncio.to_thread(first_match, one, Budget(ENDINGS))) for one in patterns]


class Match:
    """Finds where a growing text first matches an expression."""

    def __init__(self, ending: Ending) -> None:
        self.pattern, self._automaton = ending
        self._state = 0  # -1: it cannot match any more

    def push(self, piece: str) -> int | None:
        """Takes the next piece. The characters of it up to the end of the first match; None: there is none yet."""
        for end, character in enumerate(piece, 1):
            if self._state < 0:
                break
            self._state = self._automaton.run(character.encode(errors="replace"), self._state)
            if self._state >= 0 and self._automaton.final[self._state]:
                return end
        return None


class StoppableText:
    """The text of a growing list of tokens, in pieces. It ends before the first complete stop string.

    It holds back a possible beginning of a stop string until the next tokens decide.
    """

    def __init__(
        self, decode: Decode, stops: Sequence[str] = (), *, keep: bool = False, endings: Sequence[Ending] = (),
        least: int = 0,
    ) -> None:  # fmt: skip
        """`keep`: the text ends behind the stop string, not before it. With the match of an ending it ends always.

        `least`: tokens behind whose text stop strings and endings are looked for.
        """
        self._decode, self._stops, self._keep, self._least = decode, tuple(stops), keep, least
        self._endings = [Match(ending) for ending in endings]
        self._grown, self._held = GrowingText(decode), ""
        self.ids: list[int] = []  # the tokens so far
        self._length = 0  # characters returned so far
        self._read = 0  # and those up to the end of what ended the text
        self.matched: str | None = None  # the stop string or the expression that ended the text

    @property
    def stopped(self) -> bool:
        return self.matched is not None

    def push(self, ids: Sequence[int], *, last: bool = False) -> str:
        """Takes the next tokens and returns the text that is now final. `last`: no others come."""
        if self.stopped:
            return ""
        if early := ids[: max(self._least - len(self.ids), 0)]:
            rest = ids[len(early) :]
            self.ids += early
            piece = self._grown.push(early, last=last and not rest)
            self._length += len(piece)
            return piece + self.push(rest, last=last) if rest else piece
        self.ids += ids
        piece = self._held + self._grown.push(ids, last=last)
        if self._stops:
            piece = self._cut(piece, last)
        if ends := [(end, match.pattern) for match in self._endings if (end := match.push(piece)) is not None]:
            end, self.matched = min(ends)
            piece, self._read = piece[:end], self._length + end
        self._length += len(piece)
        return piece

    @property
    def tokens(self) -> int:
        """How many tokens the returned text takes, without those of a stop string."""
        if not (self.stopped or self._held or self._grown.pending):
            return len(self.ids)
        return self._count(self._length)

    @property
    def read(self) -> int:
        """How many tokens the returned text takes, with those of what ended it."""
        return self._count(self._read) if self.stopped else self.tokens

    def _count(self, characters: int) -> int:
        lengths = range(len(self.ids) + 1)
        return bisect_left(lengths, characters, key=lambda count: len(self._decode(self.ids[:count])))

    def _cut(self, text: str, last: bool) -> str:
        """The text before a stop string. Holds back the beginning of a possible one."""
        seen = text + self._grown.pending
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := seen.find(stop)) >= 0]
        if found:
            end, at, self.matched = min(found)
            self._read = self._length + end
            return seen[: end if self._keep else at]
        starts = range(max(len(text) - max(map(len, self._stops)) + 1, 0), len(text))
        begins = (at for at in starts if any(stop.startswith(text[at:]) for stop in self._stops))
        end = len(text) if last else next(begins, len(text))
        self._held = text[end:]
        return text[:end]


VERSION = 1
# A draft of a masked position; a token that may still be edited; one that stays; one that a form left no choice of.
OPEN, COMMITTED, FINAL, ONLY = range(4)
BUCKETS = 10  # tenths of confidence, rounded down


class Drafts:
    """The canvas of a row as its client knows it."""

    def __init__(self, pieces: Pieces, request: Request, *, edits: bool) -> None:
        """`edits`: the decoder may change what it committed in the active blocks."""
        self._pieces, self._standing = pieces, COMMITTED if edits else FINAL
        self._first, self._asked = request.start, request.asked
        # Token, bucket and state of each position; None: masked.
        self._known: list[tuple[int, int, int] | None] = [None] * (self._asked - self._first)
        self._left = 0  # blocks before this position are finished
        self._began = False

    def changes(self, update: Update) -> dict[str, Any] | None:
        """The message about an update with drafts; None if nothing has changed."""
        changed: list[list[Any]] = []
        start, end = self._take(update, changed)
        message: dict[str, Any] = {"v": VERSION, "region": [start, max(start, end)], "changes": changed}
        if not self._began:
            self._began = True
            return message | {"length": len(self._known)}
        return message if changed else None

    def _take(self, update: Update, changed: list[list[Any]]) -> tuple[int, int]:
        """Notes the changes, and returns the active positions `[start, end)`."""
        skip = max(self._first - update.region[0], 0)
        start, end = update.region[0] + skip - self._first, min(update.region[1], self._asked) - self._first
        for position in range(self._left, min(start, len(self._known))):
            if (known := self._known[position]) is not None and known[2] < FINAL:
                self._note(position, (*known[:2], FINAL), changed)
        self._left = max(self._left, start)
        active, offers = (update.active or [])[skip:], (update.offers or [])[skip:]
        for position, token, offer in zip(range(start, end), active, offers, strict=False):
            state = ONLY if offer >= 0 and offer % LEVELS == FORCED else self._standing
            if token < 0:
                if offer < 0:
                    continue
                token, state = offer // LEVELS, OPEN
            entry = token, min(offer % LEVELS, SURE) * BUCKETS // SURE, state
            if self._known[position] != entry:
                self._note(position, entry, changed)
        if update.completion is not None:
            for position, token in enumerate(update.completion.canvas[self._first : self._asked]):
                known = self._known[position]
                bucket = BUCKETS if known is None else known[1]
                if known not in ((token, bucket, FINAL), (token, bucket, ONLY)):
                    self._note(position, (token, bucket, FINAL), changed)
        return start, end

    def _note(self, position: int, entry: tuple[int, int, int], changed: list[list[Any]]) -> None:
        self._known[position] = entry
        changed.append([position, self._pieces.of(entry[0]), entry[1], entry[2]])


# Errors that concern no other request.
OF_ONE_REQUEST = (
    NonFiniteLogits, StalledRow, BrokenContract, MemoryError, torch.OutOfMemoryError, TimeoutError, RequestAborted,
)  # fmt: skip

LOG = logging.getLogger("dinfer.serving")


@dataclass(frozen=True, slots=True)
class Event:
    """News of a row. The last event has `finish` and `counts`. If the client wants usage, each event has `counts`."""

    row: int
    text: str = ""
    canvas: dict[str, Any] | None = None
    ids: list[int] = field(default_factory=list)  # sent, as text or as the end, if they are wanted
    logprobs: Sequence[TokenLogprob | None] = ()  # of `ids`; None: unknown
    finish: str | None = None  # "stop", "length" or "abort"
    matched: str | int | None = None  # the stop string or the stop token that ended the row
    counts: Counts | None = None
    tokens: int = 0  # of the answer, if there are counts
    cached: int = 0  # of the prompt, whose keys were there
    completion: Completion | None = None  # in the last event, unless a stop string ended the row


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a client wants of each row."""

    stops: Sequence[str] = ()
    stop_ids: Collection[int] = ()  # tokens that end the answer, beside the model's own
    endings: Sequence[Ending] = ()  # with whose match it ends
    keep_stop: bool = False  # the answer holds what ended it
    least: int = 0  # tokens before which nothing of these ends it
    drafts: bool = False
    logprobs: bool = False
    named: tuple[int, ...] = ()  # of which log-probabilities are told first
    ids: bool = False
    ends: bool = False  # with ids: also of what ended the answer, a stop token or a stop string
    usage: bool = False  # the counts so far with every event


async def row_events(
    served: Served, index: int, request: Request, wanted: Wanted, deadline: float
) -> AsyncGenerator[Event]:
    """Runs a row until the deadline, by the event loop's clock. It ends when its caller stops. Raises ApiError."""
    least = wanted.least
    text = StoppableText(served.pipe.decode, wanted.stops, keep=wanted.keep_stop, endings=wanted.endings, least=least)
    canvas = Drafts(served.pieces, request, edits=isinstance(served.recipe.decoder, Edits)) if wanted.drafts else None
    logprobs = list[TokenLogprob]()  # of all tokens; the text of the last may not be sent yet
    closing = list[int]()  # the stop token
    sent, was_aborted = 0, provided("was_aborted") or (lambda counts: False)
    try:
        wants = Wants(
            deltas="commit", drafts=wanted.drafts, logprobs=wanted.logprobs, tokens=wanted.named, ends=wanted.ends
        )  # fmt: skip
        stream = served.engine.stream(request, wants, deadline=deadline)
        async with aclosing(stream) as updates:
            async for update in updates:
                new, done = update.new or [], update.completion
                matched: str | int | None = None
                logprobs += update.logprobs or []
                if wanted.ends and request.stops and new and new[-1] in served.pipe.model.spec.stop_ids:
                    new, closing = new[:-1], new[-1:]
                ends = (i for i in range(max(least - len(text.ids), 0), len(new)) if new[i] in wanted.stop_ids)
                if (at := next(ends, None)) is not None:
                    matched, kept = new[at], at + wanted.keep_stop
                    new, closing = new[:kept], new[kept : at + 1] if wanted.ends else []
                ended = done is not None or matched is not None
                piece = text.push(new, last=ended) if new or ended else ""
                shown = None if canvas is None else canvas.changes(update)
                told = slice(0)
                if wanted.ids or wanted.logprobs:
                    until = text.tokens
                    if wanted.ends and (ended or text.stopped):
                        until = text.read if text.stopped else len(text.ids) + len(closing)
                    told, sent = slice(sent, until), max(sent, until)
                news = Event(index, piece, shown, [*text.ids, *closing][told], logprobs[told], cached=update.cached)
                if ended or text.stopped:
                    counts = partial(update, text.tokens) if done is None else done.counts
                    if matched is None and done is not None and done.stopped:
                        matched = done.canvas[request.start + len(done.output)]
                    matched = text.matched or matched
                    held = request.ask(InLanguage) is not None  # an answer that is held to a form ends
                    finish = "stop" if held or matched is not None else "length"
                    if done is not None and not text.stopped and was_aborted(done.counts):
                        finish, matched = "abort", None
                    yield replace(
                        news, finish=finish, matched=matched, counts=counts, tokens=text.tokens, completion=done
                    )
                    return
                if piece or shown or news.ids:
                    tokens = len(text.ids) if wanted.usage else 0
                    yield replace(news, counts=partial(update, tokens) if wanted.usage else None, tokens=tokens)
    except Exception as error:
        if not isinstance(error, OF_ONE_REQUEST):
            await served.engine.probe()
        raise failure(error) from error


def failure(error: Exception) -> ApiError:
    """The client's error for one that ended a row. The log has its traceback."""
    if isinstance(error, TimeoutError):
        return ApiError(504, "the request took longer than its deadline allows", code="deadline")
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        LOG.error("a row had to end: %s", error)
        return ApiError(
            503, "the server has no memory left for this request: try again later, or ask for less",
            code="out_of_memory", retry_after=5,
        )  # fmt: skip
    if isinstance(error, RequestAborted):
        return ApiError(503, str(error), code="aborted", retry_after=1)
    if isinstance(error, RankFailed):  # of all rows at once, and the command ends with this error
        return ApiError(503, "the engine has failed: RankFailed", code="engine_failed")
    LOG.error("a row failed", exc_info=error)
    message = f"the request {REQUEST_ID.get()} failed: {type(error).__name__}. The server's log says more."
    return ApiError(500, message, code="row_failed")


def partial(update: Update, tokens: int) -> Counts:
    """The counts of a row that a stop string ended before the engine did."""
    return Counts(update.forwards, 0, 0, update.committed, tokens, 0.0, update.positions)


async def merged(streams: Sequence[AsyncGenerator[Event]]) -> AsyncGenerator[Event]:
    """The events of all rows as they come. An error of one row ends all, since they are one request."""
    queue: asyncio.Queue[Event | asyncio.Task[None]] = asyncio.Queue()

    async def drain(stream: AsyncGenerator[Event]) -> None:
        async with aclosing(stream) as events:
            async for event in events:
                queue.put_nowait(event)

    tasks = [asyncio.create_task(drain(stream)) for stream in streams]
    for task in tasks:
        task.add_done_callback(queue.put_nowait)
    try:
        left = len(tasks)
        while left:
            item = await queue.get()
            if isinstance(item, Event):
                yield item
            else:
                item.result()  # raises what ended the row
                left -= 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
