"""OpenAI's answer objects, whole and in pieces."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dinfer.serving.rows import Event


@dataclass(slots=True)
class Answer:
    """One response of /v1/chat/completions or /v1/completions, as its rows come in."""

    id: str
    created: int
    model: str
    chat: bool
    prompt_tokens: int
    rows: int
    texts: list[str] = field(default_factory=list)
    ends: dict[int, Event] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.texts = [""] * self.rows

    @property
    def _base(self) -> dict[str, Any]:
        return {"id": self.id, "created": self.created, "model": self.model}

    def take(self, event: Event) -> None:
        self.texts[event.row] += event.text
        if event.finish is not None:
            self.ends[event.row] = event

    def usage(self) -> dict[str, Any]:
        """OpenAI's counts; under `dinfer` forwards (NFE) of all rows and tokens per forward."""
        tokens = sum(end.tokens for end in self.ends.values())
        forwards = sum(end.counts.forwards for end in self.ends.values() if end.counts is not None)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": tokens,
            "total_tokens": self.prompt_tokens + tokens,
            "dinfer": {"forwards": forwards, "tpf": tokens / forwards if forwards else 0.0},
        }

    def whole(self) -> dict[str, Any]:
        choices = []
        for row in range(self.rows):
            text = self.texts[row]
            body = {"message": {"role": "assistant", "content": text, "refusal": None}} if self.chat else {"text": text}
            choices.append({"index": row, **body, "logprobs": None, "finish_reason": self.ends[row].finish})
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self._base, "object": kind, "choices": choices, "usage": self.usage()}

    def opening(self) -> list[dict[str, Any]]:
        """The pieces that begin a stream: who speaks."""
        if not self.chat:
            return []
        return [self._piece(row, {"delta": {"role": "assistant", "content": ""}}, None) for row in range(self.rows)]

    def pieces(self, event: Event) -> list[dict[str, Any]]:
        """What an event adds to a stream."""
        made = []
        if event.text or event.canvas is not None:
            text = {"delta": {"content": event.text}} if self.chat else {"text": event.text}
            piece = self._piece(event.row, text, None)
            made.append(piece if event.canvas is None else piece | {"dinfer": {"canvas": event.canvas}})
        if event.finish is not None:
            made.append(self._piece(event.row, {"delta": {}} if self.chat else {"text": ""}, event.finish))
        return made

    def closing(self) -> dict[str, Any]:
        """The last piece, if usage was asked for."""
        return {**self._base, "object": self._piece_kind, "choices": [], "usage": self.usage()}

    @property
    def _piece_kind(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _piece(self, row: int, body: dict[str, Any], finish: str | None) -> dict[str, Any]:
        choice = {"index": row, **body, "logprobs": None, "finish_reason": finish}
        return {**self._base, "object": self._piece_kind, "choices": [choice]}


def sse(messages: Sequence[dict[str, Any]]) -> str:
    """Messages as server-sent events."""
    return "".join(f"data: {json.dumps(message, ensure_ascii=False)}\n\n" for message in messages)
