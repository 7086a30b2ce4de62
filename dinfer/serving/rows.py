"""One row of a request as a stream of events: certain text, drafts if asked for, and how it ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from dinfer.engine.request import Counts, NonFiniteLogits, Request, StalledRow, Update
from dinfer.serving.drafts import Drafts
from dinfer.serving.errors import ApiError
from dinfer.serving.served import Served
from dinfer.serving.text import TextStream


@dataclass(frozen=True, slots=True)
class Event:
    """What has become certain of a row. The last event of a row has `finish` and `counts`."""

    row: int
    text: str = ""
    canvas: dict[str, Any] | None = None
    finish: str | None = None  # "stop" or "length"
    counts: Counts | None = None
    tokens: int = 0  # of the answer, in the last event


async def row_events(
    served: Served, index: int, request: Request, stops: list[str], drafts: bool
) -> AsyncIterator[Event]:
    """Runs a row. Whoever leaves off cancels it. Raises ApiError."""
    edits, stop_ids = served.pipe.recipe.decoder.edits, served.pipe.model.spec.stop_ids
    stream, sent = TextStream(served.pipe.decode, stops), 0
    canvas = Drafts(served.pipe, len(request.prompt)) if drafts else None
    try:
        async with aclosing(served.engine.stream(request, snapshots=True)) as updates:
            async for update in updates:
                done = update.completion
                ids = done.output if done is not None else decided(update, request, stop_ids, edits)
                text = stream.push(ids[sent:])
                sent = max(sent, len(ids))
                if done is not None and not stream.stopped:
                    text += stream.finish()
                shown = canvas.changes(update) if canvas is not None else None
                if done is not None or stream.stopped:
                    stopped = stream.stopped or (done is not None and done.stopped)
                    counts = done.counts if done is not None else partial(update, stream.tokens)
                    yield Event(index, text, shown, "stop" if stopped else "length", counts, stream.tokens)
                    return
                if text or shown:
                    yield Event(index, text, shown)
    except (NonFiniteLogits, StalledRow) as error:
        raise ApiError(500, f"the request failed: {error}", code="row_failed") from error
    except MemoryError as error:
        raise ApiError(503, f"the server is out of memory: {error}", code="out_of_memory", retry_after=5) from error


def decided(update: Update, request: Request, stop_ids: tuple[int, ...], edits: bool) -> list[int]:
    """The generated tokens that will not change: before the first mask, or before the active blocks of a decoder that
    edits; and before the first stop token."""
    tokens, masked, first = update.tokens or [], update.masked or [], len(request.prompt)
    end = min(update.region[0], request.asked) if edits else request.asked
    ids: list[int] = []
    for position in range(first, end):
        if masked[position] or tokens[position] in stop_ids:
            break
        ids.append(tokens[position])
    return ids


def partial(update: Update, tokens: int) -> Counts:
    """The counts of a row that a stop string ended before the engine did."""
    return Counts(update.forwards, 0, 0, tokens, tokens, 0.0)


async def merged(streams: list[AsyncIterator[Event]]) -> AsyncIterator[Event]:
    """The events of all rows as they come. An error of one ends them all: they are one client's request."""
    queue: asyncio.Queue[Event | asyncio.Task[None]] = asyncio.Queue()

    async def drain(stream: AsyncIterator[Event]) -> None:
        async with aclosing(stream) as events:  # type: ignore[type-var]
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
