"""/v1/edit/completions: the region of a file that an editor asks to write anew, as Mercury's next edit has it.

A mechanism: the region is a gap between the text above it and the text below it. No model here was trained on this.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, NamedTuple

from fastapi import FastAPI, Response
from pydantic import Field

from dinfer.serving.answers import Part
from dinfer.serving.apis.completions import Completion, GapOwn
from dinfer.serving.errors import invalid, spelled
from dinfer.serving.fields import Generation, Text
from dinfer.serving.forms import Strict
from dinfer.serving.generating import generated
from dinfer.serving.rows import Event
from dinfer.serving.server import Server

PARTS = "recently_viewed_code_snippets", "current_file_content", "edit_diff_history"
SNIPPET = re.compile(r"<\|/?recently_viewed_code_snippet\|>\n?")
CURSOR = "<|cursor|>"
LEAST_GAP = 16
FENCE = "```"


class EditTurn(Strict):
    role: Literal["user"]
    content: Text


class EditRequest(Generation):
    source = "messages"

    messages: Annotated[list[EditTurn], Field(min_length=1, max_length=1)]
    dinfer: GapOwn = GapOwn()


class Region(NamedTuple):
    """What is written anew, and what stands around it."""

    before: str  # snippets, diffs, and the file above
    text: str
    behind: str  # the file below

    @classmethod
    def of(cls, prompt: str) -> Region:
        """Raises ApiError unless the prompt has a file with one region."""
        where = "messages.0.content"
        snippets, file, diffs = (_between(prompt, name) for name in PARTS)
        regions = (
            [] if file is None else re.split(r"<\|code_to_edit\|>\n?(.*?)\n?<\|/code_to_edit\|>", file, flags=re.S)
        )
        if len(regions) != 3:
            raise invalid(
                where, " must have <|current_file_content|> ... <|/current_file_content|>, and in it one region: "
                "<|code_to_edit|> ... <|/code_to_edit|>",
            )  # fmt: skip
        above, text, below = (part.replace(CURSOR, "") for part in regions)
        context = [SNIPPET.sub("", snippets or "").strip("\n"), (diffs or "").strip("\n")]
        return cls("".join(f"{one}\n\n" for one in context if one) + above.lstrip("\n"), text, below)


def _between(prompt: str, name: str) -> str | None:
    found = re.search(rf"<\|{name}\|>(.*?)<\|/{name}\|>", prompt, re.DOTALL)
    return None if found is None else found[1]


class Edit(Completion):
    """Mercury's objects: those of a chat, the text between fences."""

    prefix, object, chunk = "edit", "chat.completion", "chat.completion.chunk"
    empty: dict[str, Any] = {"delta": {}}

    def said(self, row: int) -> dict[str, Any]:
        text = f"{FENCE}\n{self.answer.choices[row].text}\n{FENCE}"
        return {"message": {"role": "assistant", "content": text}}

    def body(self, row: int, part: Part) -> dict[str, Any] | None:
        return {"delta": {"content": part.text}} if part.text else None

    def opening(self) -> list[dict[str, Any]]:
        rows = range(len(self.answer.choices))
        return [self.piece(row, {"delta": {"role": "assistant", "content": f"{FENCE}\n"}}) for row in rows]

    def pieces(self, event: Event) -> list[dict[str, Any]]:
        made = super().pieces(event)
        if event.finish is not None:
            delta = made[-1]["choices"][0]["delta"]
            made[-1]["choices"][0]["delta"] = delta | {"content": f"{delta.get('content', '')}\n{FENCE}"}
        return made


def add(app: FastAPI, server: Server) -> None:
    @app.post("/v1/edit/completions")
    async def edit(body: EditRequest) -> Response:
        """Writes the region of a file anew, from what stands around it. No model here was trained for it."""
        served = server.catalogue.find(body.model, body.dinfer.decoder)
        with spelled({"(prompt|suffix|text)": "messages.0.content"}):
            before, text, behind = Region.of(body.messages[0].content)
            served.check_size(before + text + behind, "prompt")
            size = len(served.pipe.encode(text, chat=False, add_special_tokens=False))
            gap = max(size + size // 4, LEAST_GAP)
            gap = body.dinfer.gap or min(gap, body.max_tokens or gap)
            given, rows = await served.gap_rows(before, behind, body, gap)
        return await generated(server, served, body, [given], Edit, None, rows=rows)
