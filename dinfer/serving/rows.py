"""A row of a request as a stream of events: final text, drafts if wanted, and how the row ended."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import torch

from dinfer.abilities.reports import TokenLogprob
from dinfer.engine.request import Completion, Counts, NonFiniteLogits, Request, StalledRow, Update
from dinfer.parallel.leader import RankFailed
from dinfer.serving.drafts import Drafts
from dinfer.serving.errors import ApiError
from dinfer.serving.log import REQUEST_ID
from dinfer.serving.served import Served
from dinfer.serving.text import StoppableText

# Errors that concern no other request.
OF_ONE_REQUEST = (NonFiniteLogits, StalledRow, MemoryError, torch.OutOfMemoryError, TimeoutError)

LOG = logging.getLogger("dinfer.serving")


@dataclass(frozen=True, slots=True)
class Event:
    """News of a row. The last event has `finish` and `counts`. If the client wants usage, each event has `counts`."""

    row: int
    text: str = ""
    canvas: dict[str, Any] | None = None
    logprobs: list[tuple[int, TokenLogprob]] = field(default_factory=list)  # of tokens whose text has been sent
    finish: str | None = None  # "stop" or "length"
    counts: Counts | None = None
    tokens: int = 0  # of the answer, if there are counts
    completion: Completion | None = None  # in the last event, unless a stop string ended the row


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a client wants of each row."""

    stops: Sequence[str] = ()
    drafts: bool = False
    logprobs: bool = False
    usage: bool = False  # the counts so far with every event


async def row_events(
    served: Served, index: int, request: Request, wanted: Wanted, deadline: float
) -> AsyncGenerator[Event]:
    """Runs a row until the deadline, by the event loop's clock. It ends when its caller stops. Raises ApiError."""
    text = StoppableText(served.pipe.decode, wanted.stops)
    canvas = Drafts(served.pieces, request, edits=served.recipe.decoder.edits) if wanted.drafts else None
    told: list[tuple[int, TokenLogprob]] = []  # tokens and log-probabilities; the text of the last may not be sent yet
    sent = 0
    try:
        stream = served.engine.stream(
            request, deltas="commit", drafts=wanted.drafts, logprobs=wanted.logprobs, deadline=deadline
        )
        async with aclosing(stream) as updates:
            async for update in updates:
                done, scored = update.completion, list[tuple[int, TokenLogprob]]()
                piece = text.push(update.new or [], last=done is not None) if update.new or done is not None else ""
                shown = None if canvas is None else canvas.changes(update)
                if update.logprobs is not None and update.new is not None:
                    told += zip(update.new, update.logprobs, strict=True)
                    scored, sent = told[sent : text.tokens], max(sent, text.tokens)
                if done is not None or text.stopped:
                    stopped = text.stopped or (done is not None and done.stopped)
                    counts = partial(update, text.tokens) if done is None else done.counts
                    yield Event(index, piece, shown, scored, "stop" if stopped else "length", counts, text.tokens, done)
                    return
                if piece or shown or scored:
                    tokens = text.taken if wanted.usage else 0
                    so_far = partial(update, tokens) if wanted.usage else None
                    yield Event(index, piece, shown, scored, counts=so_far, tokens=tokens)
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
    if isinstance(error, RankFailed):  # of all rows at once, and the command ends with this error
        return ApiError(503, "the engine has failed: RankFailed", code="engine_failed")
    LOG.error("a row failed", exc_info=error)
    message = f"the request {REQUEST_ID.get()} failed: {type(error).__name__}. The server's log says more."
    return ApiError(500, message, code="row_failed")


def partial(update: Update, tokens: int) -> Counts:
    """The counts of a row that a stop string ended before the engine did."""
    return Counts(update.forwards, 0, 0, tokens, tokens, 0.0)


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
