"""Answers that may call functions: whole, and as streams whose pieces clients join to the same calls."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from dinfer.serving.answers import Answer
from dinfer.serving.functions import ToolFields
from dinfer.serving.rows import Event
from dinfer.structure import calls_in
from dinfer.structure.tools import CLOSE, OPEN, head

END = f"}}\n{CLOSE}\n"  # between the arguments of a call and the next call


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
                    yield self._begin(fit[0])
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

    def _begin(self, name: str) -> dict[str, Any]:
        index, self.calls, self._named = self.calls, self.calls + 1, True
        function = {"name": name, "arguments": ""}
        return {
            "tool_calls": [{"index": index, "id": id_of(self.ids, index), "type": "function", "function": function}]
        }


def id_of(ids: str, index: int) -> str:
    """The id of a call."""
    return f"call_{hashlib.sha256(f'{ids} {index}'.encode()).hexdigest()[:24]}"


@dataclass(kw_only=True)
class Calling(Answer):
    """An answer that may call the functions of its request."""

    asked: ToolFields
    readers: list[CallReader] = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        part = "text" if self.asked.choice == "auto" else "head"
        self.readers = [CallReader(f"{self.id} {row}", self.asked.called, part) for row in range(len(self.choices))]

    @property
    def early(self) -> bool:
        """The language may say which function is called."""
        return any(reader.calls for reader in self.readers)

    def opening(self) -> list[dict[str, Any]]:
        role = {"delta": {"role": "assistant", "content": None}}
        rows = [(row, [role, *self._told(row, "")]) for row in range(len(self.choices))]
        return [self._piece(row, body) for row, bodies in rows for body in bodies]

    def _bodies(self, event: Event) -> list[dict[str, Any]]:
        return self._told(event.row, event.text, last=event.finish is not None)

    def _told(self, row: int, text: str, *, last: bool = False) -> list[dict[str, Any]]:
        return [{"delta": delta} for delta in self.readers[row].push(text, last=last)]

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
        return "length" if last.matched is None and self.asked.form is None else last.finish
