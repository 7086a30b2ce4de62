"""What the rows of a request have said so far: thoughts, text, calls, how they ended, and what they cost.

A rendering, one for each API, makes that API's objects of it, whole and in pieces of a stream.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import AsyncIterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic_core import to_json
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from dinfer.core.engine.request import Counts
from dinfer.core.pipeline.tokenizer import Decode
from dinfer.core.provided import provided
from dinfer.core.step.told import TokenLogprob
from dinfer.serving.errors import ApiError, anthropic
from dinfer.serving.rows import Event
from dinfer.structure import Language
from dinfer.structure.abilities.constraints import ForcedCount, InLanguage
from dinfer.structure.tools import CLOSE, OPEN, head

END = f"}}\n{CLOSE}\n"  # between the arguments of a call and the next call


class Part(NamedTuple):
    """What an answer says next. A thought comes before all text, and text before all calls."""

    kind: Literal["thought", "text", "call", "arguments"]
    text: str  # of a call: the name of its function
    call: int = 0  # its number


def beginning(text: str, mark: str) -> int:
    """How many of the last characters of a text may be the beginning of a mark."""
    return max(size for size in range(min(len(mark), len(text) + 1)) if text.endswith(mark[:size]))


@dataclass(slots=True)
class ThoughtReader:
    """Divides a growing text at the marks of a thought. Line feeds beside the marks belong to neither side."""

    marks: tuple[str, str]
    part: Literal["before", "thought", "behind", "text"] = "before"
    length: int = 0  # characters of the text up to the end of its thought
    _held: str = ""  # what is not divided yet
    _told: bool = False  # something of the thought

    def push(self, text: str, *, last: bool) -> tuple[str, str]:
        """The thought and the text that more text adds. `last`: no more comes."""
        self._held += text
        thought, (opening, closing) = "", self.marks
        if self.part == "before":
            begin = self._held.lstrip()
            if begin.startswith(opening):
                self._drop(len(self._held) - len(begin) + len(opening), "thought")
            elif last or not opening.startswith(begin):
                self.part = "text"
        if self.part == "thought":
            if not self._told:
                self._drop(len(self._held) - len(self._held.lstrip("\n")), "thought")
            found = self._held.find(closing)
            ends = found if found >= 0 else len(self._held) - (0 if last else beginning(self._held, closing))
            thought = self._held[:ends] if last and found < 0 else self._held[:ends].rstrip("\n")
            self._told = self._told or bool(thought)
            self._drop(len(thought), "thought")
            if found >= 0:
                self._drop(found - len(thought) + len(closing), "behind")
        if self.part == "behind":
            self._held = self._held.lstrip("\n")
            self.part = "text" if self._held else "behind"
        said = ""
        if self.part == "text":
            said, self._held = self._held, ""
        return thought, said

    def _drop(self, count: int, then: Literal["thought", "behind"]) -> None:
        self.length, self._held, self.part = self.length + count, self._held[count:], then


@dataclass(slots=True)
class CallReader:
    """Makes parts of a growing text that may call functions, each as soon as it is certain."""

    names: Sequence[str]  # of the functions that may be called
    part: str  # what comes next: "text", the "head" of a call, its "arguments", or their "end"
    calls: int = 0  # that have begun
    _held: str = ""  # what is in no part yet
    _named: bool = False  # the call whose head comes next has been told

    def push(self, text: str, *, last: bool) -> list[Part]:
        """The parts that more text makes. `last`: no more comes."""
        self._held += text
        return [*self._text(last), *self._calls()]

    def _text(self, last: bool) -> Iterator[Part]:
        if self.part != "text":
            return
        text, opening, _ = self._held.partition(OPEN)
        if not opening and not last:
            text = text[: len(text) - beginning(text, OPEN)]
        if text:
            yield Part("text", text)
        self._held = self._held[len(text) :]
        self.part = "head" if opening else "text"

    def _calls(self) -> Iterator[Part]:
        while self.part != "text":
            if self.part == "head":
                fit = [name for name in self.names if self._fits(head(name))]
                if len(fit) == 1 and not self._named:
                    yield Part("call", fit[0], self.calls)
                    self.calls, self._named = self.calls + 1, True
                if len(fit) > 1 or not self._drop(head(fit[0]), "arguments"):
                    return
            if self.part == "arguments":  # JSON on one line: the first line feed is behind the brace that ends the call
                arguments, end, _ = self._held.partition("}\n")
                arguments = arguments if end else arguments.removesuffix("}")
                if arguments:
                    yield Part("arguments", arguments, self.calls - 1)
                self._drop(arguments, "end" if end else "arguments")
                self._named = not end
            if self.part != "end" or not self._drop(END, "head"):
                return

    def _fits(self, text: str) -> bool:
        return text.startswith(self._held) or self._held.startswith(text)

    def _drop(self, text: str, then: str) -> bool:
        """Goes on to the next part if the text has come."""
        if found := self._held.startswith(text):
            self._held, self.part = self._held[len(text) :], then
        return found


@dataclass(slots=True)
class Choice:
    """One row of an answer, as far as it is known."""

    thoughts: ThoughtReader | None = None  # None: its text is not divided
    caller: CallReader | None = None  # None: it calls nothing
    text: str = ""  # as the model wrote it
    thought: str = ""
    said: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)  # the function and the arguments of each
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob | None] = field(default_factory=list)
    last: Event | None = None  # the last event that has counts

    def take(self, event: Event) -> list[Part]:
        """Adds an event of the row. Returns what it says."""
        self.text += event.text
        self.ids += event.ids
        self.logprobs += event.logprobs
        if event.counts is not None:
            self.last = event
        parts = [*self._divided(event.text, last=event.finish is not None)]
        for part in parts:
            match part.kind:
                case "thought":
                    self.thought += part.text
                case "text":
                    self.said += part.text
                case "call":
                    self.calls.append((part.text, ""))
                case "arguments":
                    self.calls[-1] = self.calls[-1][0], self.calls[-1][1] + part.text
        return parts

    def _divided(self, text: str, *, last: bool) -> Iterator[Part]:
        if self.thoughts is not None:
            thought, text = self.thoughts.push(text, last=last)
            if thought:
                yield Part("thought", thought)
            if self.thoughts.part != "text" and not last:
                return
        if self.caller is not None:
            yield from self.caller.push(text, last=last)
        elif text:
            yield Part("text", text)


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request has cost, in tokens."""

    prompt: int
    cached: int  # of the prompt
    answer: int
    thought: int  # of the answer
    own: dict[str, Any]  # ours

    def openai(self) -> dict[str, Any]:
        """As chats and completions tell it."""
        return usage_of(self.prompt, self.answer, self.own) | {
            "prompt_tokens_details": {"cached_tokens": self.cached},
            **({"completion_tokens_details": {"reasoning_tokens": self.thought}} if self.thought else {}),
        }


@dataclass(kw_only=True)
class Answer:
    """The answer to one request. It grows with each event of its rows."""

    model: str
    prompts: list[list[int]]
    choices: list[Choice]  # as many of each prompt
    decode: Decode
    echoes: Sequence[Event] = ()  # what each choice begins with
    held: InLanguage | None = None  # what each choice is held to
    free: bool = False  # it may call functions, and text beside the calls is held to nothing
    canvas: int = 0  # positions of each

    @property
    def each(self) -> int:
        """Choices of each prompt."""
        return len(self.choices) // len(self.prompts)

    def take(self, event: Event) -> list[Part]:
        """Adds an event. Returns what it says."""
        return self.choices[event.row].take(event)

    def finish(self, row: int) -> Literal["calls", "stop", "length", "abort"] | None:
        """Why a choice has ended; None: it has not."""
        choice = self.choices[row]
        if (last := choice.last) is None or last.finish is None:
            return None
        if last.finish == "abort":
            return "abort"
        if choice.calls:
            return "calls"
        # Any text beside tools may end anywhere: without a stop token, the canvas has cut it.
        cut = self.free and last.matched is None
        return "length" if cut or last.finish == "length" else "stop"

    def usage(self) -> Usage:
        """What it has cost so far."""
        told = [choice.last for choice in self.choices if choice.last is not None]
        tokens, counts = sum(last.tokens for last in told), [last.counts for last in told if last.counts is not None]
        ended = [(r, one.last.completion) for r, one in enumerate(self.choices) if one.last and one.last.completion]
        slack = [len(done.canvas) - len(self.prompts[row // self.each]) - len(done.output) for row, done in ended]
        form = None if self.held is None else structured(self.held.language, [done.counts for _, done in ended], slack)
        cached = sum(choice.last.cached for choice in self.choices[:: self.each] if choice.last)
        thought = sum(self._thought_tokens(choice) for choice in self.choices)
        return Usage(sum(map(len, self.prompts)), cached, tokens, thought, cost(tokens, counts, form))

    def _thought_tokens(self, choice: Choice) -> int:
        if choice.thoughts is None or not choice.thoughts.length:
            return 0
        counts = range(len(choice.ids) + 1)
        return bisect_left(counts, choice.thoughts.length, key=lambda count: len(self.decode(choice.ids[:count])))


def cost(tokens: int, counts: Sequence[Counts], form: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What usage tells under `dinfer`: forwards (NFE) and positions, also for each token of the answer.

    `form`: what `structured` tells. After an update of the weights also their version.
    """
    forwards, positions, committed = (
        sum(getattr(one, name) for one in counts) for name in ("forwards", "positions", "committed")
    )
    version_of = provided("version_of") or (lambda one: None)
    versions = [version for one in counts if (version := version_of(one)) is not None]
    return {
        "forwards": forwards, "tpf": tokens / max(forwards, 1), "positions": positions,
        "positions_per_committed": positions / max(committed, 1),
        **({"structure": form} if form else {}), **({"weight_version": max(versions)} if versions else {}),
    }  # fmt: skip


def usage_of(prompt: int, tokens: int, own: Mapping[str, Any]) -> dict[str, Any]:
    """OpenAI's counts of tokens, and ours."""
    return {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens, "dinfer": own}


def structured(language: Language, done: Sequence[Counts], slack: Sequence[int]) -> dict[str, Any]:
    """What usage tells of a constraint. `forced`: tokens that nothing else could stand for. `slack`, of each row: the
    positions behind its answer. If the least is 0, the canvas may have cut an answer short."""
    forced = [told.tokens for one in done if (told := one.tells(ForcedCount)) is not None]
    counted = {"forced": sum(forced), "slack": min(slack)} if done else {}
    return {"states": language.states, "depth": language.depth, "exact": language.exact} | counted


def id_of(prefix: str, *of: object) -> str:
    """An id that is the same whenever it is told, such as that of a call."""
    return f"{prefix}_{hashlib.sha256(' '.join(map(str, of)).encode()).hexdigest()[:24]}"


class Rendering(ABC):
    """An answer as the objects of one API."""

    named: ClassVar[bool] = False  # the events of its streams have their `type` as a name
    done: ClassVar[bytes] = b""  # behind the last of them

    def __init__(self, answer: Answer) -> None:
        self.answer = answer

    @property
    def early(self) -> bool:
        """Whether the first pieces of a stream are sent before the first step, since they tell of the answer."""
        return any(choice.calls for choice in self.answer.choices)

    @abstractmethod
    def whole(self) -> dict[str, Any]: ...

    @abstractmethod
    def opening(self) -> list[dict[str, Any]]:
        """The first pieces of a stream: what is certain already, and what is echoed."""

    @abstractmethod
    def pieces(self, event: Event) -> list[dict[str, Any]]:
        """Adds an event to the answer, and returns its pieces of the stream."""

    @abstractmethod
    def closing(self) -> list[dict[str, Any]]:
        """The last pieces."""

    @abstractmethod
    def failed(self, error: ApiError, request_id: str | None) -> list[dict[str, Any]]:
        """The last pieces of a stream that an error ends."""

    def sent(self, pieces: Sequence[dict[str, Any]]) -> bytes:
        """Pieces as server-sent events."""
        names = [b"event: %s\n" % piece["type"].encode() if self.named else b"" for piece in pieces]
        return b"".join(name + sse([piece]) for name, piece in zip(names, pieces, strict=True))


class Blocks(Rendering):
    """Objects of an API whose answers are one block after the other: a thought, a text, and each call."""

    named = True

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer)
        self.choice = answer.choices[0]
        self.block: Part | None = None  # the part that began the block which is being sent
        self.index = -1  # of the last block

    def pieces(self, event: Event) -> list[dict[str, Any]]:
        made = [piece for part in self.answer.take(event) for piece in self.part(part)]
        if event.canvas is not None:
            made = made or self.silent()
            made[-1] |= {"dinfer": {"canvas": event.canvas}}
        return made

    def part(self, part: Part) -> Iterator[dict[str, Any]]:
        """The events of a part of the answer, which begins a block or adds to one."""
        kind = "call" if part.kind == "arguments" else part.kind
        if self.block is None or part.kind == "call" or kind != self.block.kind:
            yield from self.end()
            self.block, self.index = part, self.index + 1
            yield from self.begun(part)
        if part.kind != "call":
            yield from self.added(part)

    def end(self) -> Iterator[dict[str, Any]]:
        """The events at the end of the block that is being sent, if there is one."""
        if self.block is not None:
            yield from self.ended(self.block)
        self.block = None

    @abstractmethod
    def begun(self, part: Part) -> Iterator[dict[str, Any]]:
        """The events that begin a block."""

    @abstractmethod
    def added(self, part: Part) -> Iterator[dict[str, Any]]:
        """The events that add text to it."""

    @abstractmethod
    def ended(self, part: Part) -> Iterator[dict[str, Any]]:
        """The events that end it. `part`: what began it."""

    @abstractmethod
    def silent(self) -> list[dict[str, Any]]:
        """An event that says nothing of the answer, and carries a canvas."""


class Stream(StreamingResponse):
    """Server-sent events. Unlike Starlette's response it needs no task: `Guard` sees clients leave."""

    def __init__(self, pieces: AsyncIterable[bytes]) -> None:
        # A proxy must not hold back pieces.
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(pieces, headers=headers, media_type="text/event-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.stream_response(send)


def cut_off(error: ApiError, path: str, request_id: str | None) -> bytes:
    """The last event of a stream that ends within, as the API of its path has it."""
    if path == "/v1/messages":
        return b"event: error\n" + sse([anthropic(error, request_id)])
    told = error.body()
    if path == "/v1/responses":
        kept = {key: told["error"][key] for key in ("code", "message", "param")}
        return b"event: error\n" + sse([{"type": "error", **kept, "sequence_number": 0}])
    return sse([told | {"request_id": request_id}])


def sse(messages: Sequence[dict[str, Any]]) -> bytes:
    """Messages as server-sent events."""
    return b"".join(b"data: %s\n\n" % to_json(message) for message in messages)
