"""OpenAI's answer objects, whole and in pieces of a stream, with log-probabilities and calls of functions."""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import AsyncIterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pydantic_core import to_json
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from dinfer.core.abilities.reports import TokenLogprob
from dinfer.core.engine.request import Counts
from dinfer.lab.trace.record import Pieces
from dinfer.serving.protocol import ChatRequest, Generation, StreamOptions
from dinfer.serving.rows import Event
from dinfer.structure import Language, calls_in
from dinfer.structure.abilities.constraints import InLanguage
from dinfer.structure.tools import CLOSE, OPEN, head

# What the log-probabilities of a prompt are.
OF_PROMPT = "left to right, others masked: one of the orders that the likelihood bound averages"
LEAST = -9999.0  # stands for minus infinity, which JSON lacks
END = f"}}\n{CLOSE}\n"  # between the arguments of a call and the next call


def usage_of(
    prompt: int, tokens: int, counts: Sequence[Counts], form: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """OpenAI's counts of tokens, and under `dinfer` what rows cost: forwards (NFE) and positions, also for each token.

    With runtime.load=adaptive also the recipe that they got. `form`: what `structured` tells.
    """
    forwards, positions, committed = (
        sum(getattr(one, name) for one in counts) for name in ("forwards", "positions", "committed")
    )
    recipes = [*dict.fromkeys(one.recipe for one in counts if one.recipe)]
    own = {
        "forwards": forwards, "tpf": tokens / max(forwards, 1), "positions": positions,
        "positions_per_committed": positions / max(committed, 1),
        **({"recipe": "; ".join(recipes)} if recipes else {}), **({"structure": form} if form else {}),
    }  # fmt: skip
    return {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens, "dinfer": own}


def structured(language: Language, done: Sequence[Counts], slack: Sequence[int]) -> dict[str, Any]:
    """What usage tells of a constraint. `forced`: tokens that nothing else could stand for. `slack`, of each row: the
    positions behind its answer. If the least is 0, the canvas may have cut an answer short."""
    told = {"forced": sum(counts.more["forced"] for counts in done), "slack": min(slack)} if done else {}
    return {"states": language.states, "depth": language.depth, "exact": language.exact} | told


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Makes the objects of a chat or a completion. `top`: alternatives of each token."""

    pieces: Pieces
    top: int
    chat: bool
    by_number: bool = False  # tokens are called token_id:NUMBER

    def of(self, ids: Sequence[int], told: Sequence[TokenLogprob | None], offset: int) -> dict[str, Any]:
        """`told` is None for a token of unknown probability. `offset`: characters of the answer before these tokens."""
        return self._chat(ids, told) if self.chat else self._completion(ids, told, offset)

    def _chat(self, ids: Sequence[int], told: Sequence[TokenLogprob | None]) -> dict[str, Any]:
        content = []
        for token, (logprob, best) in zip(ids, (one for one in told if one is not None), strict=True):
            top = [self._entry(*other) for other in best[: self.top]]
            content.append(self._entry(token, logprob) | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def _completion(self, ids: Sequence[int], told: Sequence[TokenLogprob | None], offset: int) -> dict[str, Any]:
        lengths = [len(self.pieces.of(token)) for token in ids]
        chosen = [None if one is None else max(one.logprob, LEAST) for one in told]
        top = [
            one and {self._name(t): max(p, LEAST) for t, p in [(token, one.logprob), *one.top[: self.top]]}
            for token, one in zip(ids, told, strict=True)
        ]
        return {
            "tokens": [self._name(token) for token in ids],
            "token_logprobs": chosen,
            "top_logprobs": top,
            "text_offset": [offset + sum(lengths[:i]) for i in range(len(ids))],
        }

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self.by_number else self.pieces.of(token)

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.pieces.of(token)
        whole = "\N{REPLACEMENT CHARACTER}" not in text  # otherwise the token is a part of a character
        return {
            "token": self._name(token), "logprob": max(logprob, LEAST), "bytes": list(text.encode()) if whole else None,
        }  # fmt: skip


def prompt_logprobs(
    pieces: Pieces, ids: Sequence[int], told: Sequence[TokenLogprob | None], top: int
) -> list[dict[str, Any] | None]:
    """vLLM's objects of a prompt: by token id the `top` best of each position, and the prompt's own token."""
    made: list[dict[str, Any] | None] = []
    for token, one in zip(ids, told, strict=True):
        if one is None:
            made.append(None)
            continue
        found: dict[int, tuple[float, int | None]] = {token: (one.logprob, None)}  # unless it is among the best
        found |= {other: (p, rank) for rank, (other, p) in enumerate(one.top, 1) if rank <= top or other == token}
        made.append({
            str(other): {"logprob": max(logprob, LEAST), "rank": rank, "decoded_token": pieces.of(other)}
            for other, (logprob, rank) in found.items()
        })  # fmt: skip
    return made


@dataclass(slots=True)
class _Choice:
    """One row of an answer, as far as it is known."""

    text: str
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob | None] = field(default_factory=list)
    last: Event | None = None  # the last event that has counts


@dataclass(kw_only=True)
class Answer:
    """One response of /v1/chat/completions or /v1/completions. It grows with each event of its rows."""

    blank: ClassVar[str | None] = ""  # the content of a message that has none yet
    asked: Generation
    model: str
    prompts: list[list[int]]
    logprobs: Logprobs | None = None  # None: the client wants none
    echoes: Sequence[Event] = ()  # what each choice begins with
    scores: Sequence[list[Any]] = ()  # `prompt_logprobs` of each prompt, if the client wants them
    held: InLanguage | None = None  # what each choice is held to

    def __post_init__(self) -> None:
        self.chat = isinstance(self.asked, ChatRequest)
        self.id = f"{'chatcmpl' if self.chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.choices = [_Choice("") for _ in range(self.asked.n * len(self.prompts))]
        streamed = self.asked.stream_options or StreamOptions()
        self.last_usage = streamed.include_usage  # a stream ends with the usage
        self.running_usage = streamed.include_usage and streamed.continuous_usage_stats  # every piece has it

    def take(self, event: Event) -> None:
        """Adds an event to the whole answer."""
        choice = self.choices[event.row]
        choice.text += event.text
        choice.ids += event.ids
        choice.logprobs += event.logprobs
        if event.counts is not None:
            choice.last = event

    def usage(self) -> dict[str, Any]:
        """As `usage_of`."""
        told = [choice.last for choice in self.choices if choice.last is not None]
        tokens, counts = sum(last.tokens for last in told), [last.counts for last in told if last.counts is not None]
        ended = [(r, one.last.completion) for r, one in enumerate(self.choices) if one.last and one.last.completion]
        slack = [len(done.canvas) - len(self.prompts[row // self.asked.n]) - len(done.output) for row, done in ended]
        counted = [done.counts for _, done in ended]
        form = None if self.held is None else structured(self.held.language, counted, slack)
        cached = sum(choice.last.cached for choice in self.choices[:: self.asked.n] if choice.last)
        usage = usage_of(sum(map(len, self.prompts)), tokens, counts, form)
        return usage | {"prompt_tokens_details": {"cached_tokens": cached}}

    def whole(self) -> dict[str, Any]:
        made = []
        for row, choice in enumerate(self.choices):
            message = {"role": "assistant", **self._message(row), "refusal": None}
            scores = None if self.logprobs is None else self.logprobs.of(choice.ids, choice.logprobs, 0)
            said = {"message": message} if self.chat else {"text": choice.text}
            one = {"index": row, **said, "logprobs": scores} | ({} if self.chat else self._scores(row // self.asked.n))
            made.append(one | self._end(row, choice.last) | self._ids(row, 0))
        prompt = self._scores(0) if self.chat else {}
        prompt |= {"prompt_token_ids": self.prompts[0]} if self.asked.return_token_ids and self.chat else {}
        return {**self._head(), "choices": made, "usage": self.usage(), **prompt}

    def _scores(self, prompt: int) -> dict[str, Any]:
        """vLLM's field."""
        return {"prompt_logprobs": self.scores[prompt] if self.scores else None}

    def _message(self, row: int) -> dict[str, Any]:
        """What the model says in a chat."""
        return {"content": self.choices[row].text}

    def _bodies(self, event: Event) -> list[dict[str, Any]]:
        """What the text of an event adds to its choice."""
        return [{"delta": {"content": event.text}} if self.chat else {"text": event.text}] if event.text else []

    def _finish(self, row: int, last: Event) -> str | None:
        """OpenAI's reason for the end of a choice."""
        return last.finish

    @property
    def early(self) -> bool:
        """Whether the first pieces of a stream are sent before the first step, since they tell of the answer."""
        return False

    def opening(self) -> list[dict[str, Any]]:
        """The first pieces of a stream: the role in a chat, what is certain already, and what is echoed."""
        role = {"delta": {"role": "assistant", "content": self.blank}}
        rows = range(len(self.choices)) if self.chat else ()
        begun = [self._piece(row, body) for row in rows for body in (role, *self._bodies(Event(row)))]
        return [*begun, *(piece for echo in self.echoes for piece in self.pieces(echo))]

    def pieces(self, event: Event) -> list[dict[str, Any]]:
        """Adds an event to the answer, and returns its pieces of the stream."""
        made: list[dict[str, Any]] = []
        choice, bodies = self.choices[event.row], self._bodies(event)
        offset, since = len(choice.text), len(choice.ids)
        self.take(event)
        if bodies or event.ids or event.canvas is not None or event.finish is not None:
            body, *more = bodies or [{"delta": {}} if self.chat else {"text": ""}]
            scores = self.logprobs.of(event.ids, event.logprobs, offset) if self.logprobs and event.ids else None
            piece = self._piece(event.row, body | self._ids(event.row, since), scores)
            made.append(piece if event.canvas is None else piece | {"dinfer": {"canvas": event.canvas}})
            made += [self._piece(event.row, body) for body in more]
        if event.finish is not None:
            made[-1]["choices"][0] |= self._end(event.row, event)
        return made

    def closing(self) -> list[dict[str, Any]]:
        """The last piece, if usage was asked for."""
        return [{**self._head(".chunk"), "choices": [], "usage": self.usage()}] if self.last_usage else []

    def _head(self, part: str = "") -> dict[str, Any]:
        kind = f"chat.completion{part}" if self.chat else "text_completion"
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        scored = {"echo": any(echo.logprobs for echo in self.echoes), "prompt_logprobs": self.scores}
        told = {field: OF_PROMPT for field, given in scored.items() if given}
        return head | ({"dinfer": told} if told else {})

    def _piece(self, row: int, body: dict[str, Any], logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
        choice = {"index": row, **body, "logprobs": logprobs, **self._end(row, None)}
        usage = {"usage": self.usage() if self.running_usage else None} if self.last_usage else {}
        return {**self._head(".chunk"), "choices": [choice], **usage}

    def _end(self, row: int, last: Event | None) -> dict[str, Any]:
        """How a choice ended: OpenAI's field, and SGLang's."""
        found = None if last is None else self._finish(row, last)
        return {"finish_reason": found} | ({} if last is None else {"matched_stop": last.matched})

    def _ids(self, row: int, since: int) -> dict[str, Any]:
        """vLLM's fields, from a token of the choice on; what is echoed is the prompt's."""
        if not self.asked.return_token_ids:
            return {}
        echoed = len(self.echoes[row].ids) if self.echoes else 0
        ids = {"token_ids": self.choices[row].ids[max(since, echoed) :]}
        return ids | ({} if since else {"prompt_token_ids": self.prompts[row // self.asked.n]})


class Stream(StreamingResponse):
    """Server-sent events. Unlike Starlette's response it needs no task: `Guard` sees clients leave."""

    def __init__(self, pieces: AsyncIterable[bytes]) -> None:
        # A proxy must not hold back pieces.
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(pieces, headers=headers, media_type="text/event-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.stream_response(send)


def sse(messages: Sequence[dict[str, Any]]) -> bytes:
    """Messages as server-sent events."""
    return b"".join(b"data: %s\n\n" % to_json(message) for message in messages)


@dataclass(slots=True)
class CallReader:
    """Makes OpenAI's deltas of the growing text of an answer, each as soon as it is certain."""

    ids: str  # what the ids of its calls are made of
    names: Sequence[str]  # of the functions that may be called
    part: str  # what comes next: "text", the "head" of a call, its "arguments", or their "end"
    calls: int = 0  # that have begun
    _held: str = ""  # what is in no delta yet
    _named: bool = False  # the call whose head comes next is in a delta

    def push(self, text: str, *, last: bool) -> list[dict[str, Any]]:
        """The deltas that more text makes. `last`: no more comes."""
        self._held += text
        return [*self._text(last), *self._calls()]

    def _text(self, last: bool) -> Iterator[dict[str, Any]]:
        if self.part != "text":
            return
        text, opening, _ = self._held.partition(OPEN)
        if not opening and not last:  # the end may be the beginning of a call
            text = text[: len(text) - max(size for size in range(len(OPEN)) if text.endswith(OPEN[:size]))]
        if text:
            yield {"content": text}
        self._held = self._held[len(text) :]
        self.part = "head" if opening else "text"

    def _calls(self) -> Iterator[dict[str, Any]]:
        while self.part != "text":
            if self.part == "head":
                fit = [name for name in self.names if self._fits(head(name))]
                if len(fit) == 1 and not self._named:
                    function, call = {"name": fit[0], "arguments": ""}, id_of(self.ids, self.calls)
                    yield {"tool_calls": [{"index": self.calls, "id": call, "type": "function", "function": function}]}
                    self.calls, self._named = self.calls + 1, True
                if len(fit) > 1 or not self._drop(head(fit[0]), "arguments"):
                    return
            if self.part == "arguments":  # JSON on one line: the first line feed is behind the brace that ends the call
                arguments, end, _ = self._held.partition("}\n")
                arguments = arguments if end else arguments.removesuffix("}")
                if arguments:
                    yield {"tool_calls": [{"index": self.calls - 1, "function": {"arguments": arguments}}]}
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


def id_of(ids: str, index: int) -> str:
    """The id of a call."""
    return f"call_{hashlib.sha256(f'{ids} {index}'.encode()).hexdigest()[:24]}"


@dataclass(kw_only=True)
class Calling(Answer):
    """An answer that may call the functions of its request."""

    blank: ClassVar[str | None] = None
    asked: ChatRequest

    def __post_init__(self) -> None:
        super().__post_init__()
        part = "text" if self.asked.choice == "auto" else "head"
        names = [*self.asked.functions] if self.asked.named is None else [self.asked.named]
        self.readers = [CallReader(f"{self.id} {row}", names, part) for row in range(len(self.choices))]

    @property
    def early(self) -> bool:
        """The language may say which function is called."""
        return any(reader.calls for reader in self.readers)

    def _bodies(self, event: Event) -> list[dict[str, Any]]:
        deltas = self.readers[event.row].push(event.text, last=event.finish is not None)
        return [{"delta": delta} for delta in deltas]

    def _message(self, row: int) -> dict[str, Any]:
        text, calls = calls_in(self.choices[row].text)
        made = [
            {
                "id": id_of(f"{self.id} {row}", i), "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for i, call in enumerate(calls)
        ]  # fmt: skip
        return {"content": text or None} | ({"tool_calls": made} if made else {})

    def _finish(self, row: int, last: Event) -> str | None:
        if OPEN in self.choices[row].text:
            return "stop" if self.asked.named else "tool_calls"
        # Any text may end anywhere: without a stop token, the canvas has cut it.
        return "length" if last.matched is None and self.asked.form() is None else last.finish
