"""The canvas of a row for those who want to see drafts: what changed since the event before.

Protocol, version 1 (docs/serving.md): the first event of a row has `length`, the positions of its answer. Each has
`region`, the active positions [start, end), and `changes`, a list of [position, text, state]. Positions count from the
first of the answer. States: "masked" (text is empty), "draft" (it may still change) and "final" (it will not).
"""

from __future__ import annotations

from typing import Any

from dinfer.engine.request import Update
from dinfer.pipeline import Pipeline

VERSION = 1


class Drafts:
    """What a client knows of a row's canvas."""

    def __init__(self, pipe: Pipeline, prompt: int) -> None:
        self._pipe, self._prompt = pipe, prompt
        self._known: dict[int, tuple[int, str]] = {}
        self._pieces: dict[int, str] = {}
        self._began = False

    def changes(self, update: Update) -> dict[str, Any] | None:
        """The message for an update with a snapshot; None: nothing changed."""
        tokens, masked = self._canvas(update)
        if tokens is None:
            return None
        edits, first = self._pipe.recipe.decoder.edits, self._prompt
        done = update.completion is not None
        start, end = (max(position - first, 0) for position in update.region)
        changed = []
        for position in range(len(tokens) - first):
            token = tokens[first + position]
            editable = edits and not done and position >= start
            state = "masked" if masked[first + position] else "draft" if editable else "final"
            if self._known.get(position, (-1, "masked")) != (token, state) and (state != "masked" or self._began):
                changed.append([position, "" if state == "masked" else self._piece(token), state])
            self._known[position] = (token, state) if state != "masked" else (-1, "masked")
        message: dict[str, Any] = {"v": VERSION, "region": [start, end], "changes": changed}
        if not self._began:
            self._began = True
            return message | {"length": len(tokens) - first}
        return message if changed else None

    def _canvas(self, update: Update) -> tuple[list[int] | None, list[bool]]:
        if update.completion is not None:
            canvas = update.completion.canvas
            return canvas, [False] * len(canvas)
        return update.tokens, update.masked or []

    def _piece(self, token: int) -> str:
        if token not in self._pieces:
            self._pieces[token] = self._pipe.decode([token])
        return self._pieces[token]
