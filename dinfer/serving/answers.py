"""OpenAI's answer objects, whole and in pieces of a stream, with log-probabilities."""

from collections.abc import AsyncIterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dinfer.abilities.reports import TokenLogprob
from dinfer.analysis.trace.record import Pieces
from dinfer.serving.rows import Event

LEAST = -9999.0  # stands for minus infinity, which JSON lacks
Scored = Sequence[tuple[int, TokenLogprob]]


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Makes the objects of a chat or a completion. `top`: alternatives of each token."""

    pieces: Pieces
    top: int
    chat: bool

    def of(self, scored: Scored, offset: int) -> dict[str, Any]:
        """`offset`: characters of the answer before the first of these tokens."""
        return self._chat(scored) if self.chat else self._completion(scored, offset)

    def _chat(self, scored: Scored) -> dict[str, Any]:
        content = []
        for token, told in scored:
            top = [self._entry(other, logprob) for other, logprob in told.top[: self.top]]
            content.append(self._entry(token, told.logprob) | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def _completion(self, scored: Scored, offset: int) -> dict[str, Any]:
        tokens = [self.pieces.of(token) for token, _ in scored]
        offsets = [offset + sum(map(len, tokens[:i])) for i in range(len(tokens))]
        top = [{self.pieces.of(t): max(p, LEAST) for t, p in told.top[: self.top]} for _, told in scored]
        return {
            "tokens": tokens,
            "token_logprobs": [max(told.logprob, LEAST) for _, told in scored],
            "top_logprobs": top if self.top else None,
            "text_offset": offsets,
        }

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.pieces.of(token)
        whole = "\N{REPLACEMENT CHARACTER}" not in text  # otherwise the token is a part of a character
        return {"token": text, "logprob": max(logprob, LEAST), "bytes": list(text.encode()) if whole else None}


@dataclass(slots=True)
class _Choice:
    """One row of an answer, as far as it is known."""

    text: str = ""
    scored: list[tuple[int, TokenLogprob]] = field(default_factory=list)
    last: Event | None = None  # the last event that has counts


@dataclass(slots=True)
class Answer:
    """One response of /v1/chat/completions or /v1/completions. It grows with each event of its rows."""

    id: str
    created: int
    model: str
    chat: bool
    prompt_tokens: int
    rows: int
    logprobs: Logprobs | None = None  # None: the client wants none
    running_usage: bool = False  # every piece of a stream carries the usage so far
    choices: list[_Choice] = field(init=False)

    def __post_init__(self) -> None:
        self.choices = [_Choice() for _ in range(self.rows)]

    def take(self, event: Event) -> None:
        """Adds an event to the whole answer."""
        choice = self.choices[event.row]
        choice.text += event.text
        choice.scored += event.logprobs
        if event.counts is not None:
            choice.last = event

    def usage(self) -> dict[str, Any]:
        """OpenAI's counts, and under `dinfer` the forwards (NFE) of all rows and the tokens per forward."""
        told = [choice.last for choice in self.choices if choice.last is not None]
        tokens = sum(last.tokens for last in told)
        forwards = sum(last.counts.forwards for last in told if last.counts is not None)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": tokens,
            "total_tokens": self.prompt_tokens + tokens,
            "dinfer": {"forwards": forwards, "tpf": tokens / forwards if forwards else 0.0},
        }

    def whole(self) -> dict[str, Any]:
        made = []
        for row, choice in enumerate(self.choices):
            message = {"role": "assistant", "content": choice.text, "refusal": None}
            body = {"message": message} if self.chat else {"text": choice.text}
            scores = None if self.logprobs is None else self.logprobs.of(choice.scored, 0)
            finish = None if choice.last is None else choice.last.finish
            made.append({"index": row, **body, "logprobs": scores, "finish_reason": finish})
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self._head(kind), "choices": made, "usage": self.usage()}

    def opening(self) -> list[dict[str, Any]]:
        """The first pieces of a chat's stream, which name the role."""
        if not self.chat:
            return []
        return [self._piece(row, {"delta": {"role": "assistant", "content": ""}}) for row in range(self.rows)]

    def pieces(self, event: Event) -> list[dict[str, Any]]:
        """Adds an event to the answer, and returns its pieces of the stream."""
        made, offset = [], len(self.choices[event.row].text)
        self.take(event)
        if event.text or event.logprobs or event.canvas is not None:
            body = {"delta": {"content": event.text}} if self.chat else {"text": event.text}
            scores = self.logprobs.of(event.logprobs, offset) if self.logprobs and event.logprobs else None
            piece = self._piece(event.row, body, scores)
            made.append(piece if event.canvas is None else piece | {"dinfer": {"canvas": event.canvas}})
        if event.finish is not None:
            made.append(self._piece(event.row, {"delta": {}} if self.chat else {"text": ""}, finish=event.finish))
        return [piece | {"usage": self.usage()} for piece in made] if self.running_usage else made

    def closing(self) -> dict[str, Any]:
        """The last piece, if usage was asked for."""
        return {**self._head(self._piece_kind), "choices": [], "usage": self.usage()}

    @property
    def _piece_kind(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _piece(
        self, row: int, body: dict[str, Any], logprobs: dict[str, Any] | None = None, finish: str | None = None
    ) -> dict[str, Any]:
        choice = {"index": row, **body, "logprobs": logprobs, "finish_reason": finish}
        return {**self._head(self._piece_kind), "choices": [choice]}


class Stream(Response):
    """Server-sent events. Unlike Starlette's response it needs no task: `Guard` sees clients leave."""

    def __init__(self, pieces: AsyncIterable[bytes]) -> None:
        # A proxy must not hold back pieces.
        super().__init__(
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"}, media_type="text/event-stream"
        )
        del self.headers["content-length"]
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for piece in self._pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def sse(messages: Sequence[dict[str, Any]]) -> bytes:
    """Messages as server-sent events."""
    return b"".join(b"data: %s\n\n" % to_json(message) for message in messages)
