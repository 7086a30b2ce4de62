"""/v1/infill: text with gaps, which are filled."""

from __future__ import annotations

import asyncio
import time
import uuid
from functools import partial
from itertools import takewhile
from typing import Annotated, Any, Literal, Self

from fastapi import FastAPI
from pydantic import Field, model_validator

from dinfer.serving.answers import cost, structured, usage_of
from dinfer.serving.errors import invalid
from dinfer.serving.fields import MAX_CHOICES, Sampled, Scored, Text
from dinfer.serving.forms import Held, HeldFields
from dinfer.serving.logprobs import Logprobs
from dinfer.serving.rows import Wanted
from dinfer.serving.server import Server
from dinfer.structure.abilities.constraints import InLanguage
from dinfer.structure.infilling import escaped, infill_request, infilled


class InfillRequest(Scored, Sampled, HeldFields):
    """Text with gaps: the model fills in n tokens for `[MASK:n]`."""

    text: Text
    scope: Literal["answer", "gap"] = "answer"  # what a form holds: all text from the first gap on, or each gap
    forms: Annotated[list[HeldFields], Field(min_length=1, max_length=MAX_CHOICES)] | None = None  # each gap's own

    @property
    def each_held(self) -> list[Held]:
        """What all gaps are held to, or each of them. Raises ApiError."""
        own = [form.form(f"forms.{i}.") for i, form in enumerate(self.forms or ())]
        if None in own:
            raise invalid(f"forms.{own.index(None)}", " says no form: give one, such as response_format")
        return [held for held in (*own, self.held) if held is not None]

    @model_validator(mode="after")
    def _something_held(self) -> Self:
        held = self.each_held
        if self.scope == "gap" and not held:
            raise invalid("scope", "='gap' says what a form holds: give one too, such as response_format")
        if self.forms and self.scope != "gap":
            raise invalid("forms", " are of each gap by itself: set scope='gap', or give one form for all text")
        if self.forms and self.held:
            raise invalid("forms", f" and {self.held.field} are both given: a gap is held to one form")
        return self


def add(app: FastAPI, server: Server) -> None:
    @app.post("/v1/infill")
    async def infill(body: InfillRequest) -> dict[str, Any]:
        """Fills the gaps of a text; `[MASK:n]` is a gap of n tokens. `text` of the answer may be sent again."""
        served = server.catalogue.find(body.model, body.dinfer.decoder)
        served.check_size(body.text, "text")
        chosen = served.options(body)
        languages = await served.languages(body)
        try:  # in a thread: a form is followed over the whole text
            made = partial(infill_request, served.pipe, body.text, chosen, languages, body.scope)
            request = await asyncio.to_thread(made)
        except ValueError as error:
            told = str(error).removeprefix("canvas 0: ").replace("canvas 0", "it")
            raise invalid("text", f": {told}") from error
        wanted, prompt = Wanted(logprobs=body.top is not None), request.open.count(False)
        async with server.running(served, [request], body.dinfer, wanted, prompt) as events:
            heard = [event async for event in events]
        (done,) = [event.completion for event in heard if event.completion is not None]
        found = infilled(served.pipe, request, done, logprobs=[one for event in heard for one in event.logprobs if one])
        tokens, scores = sum(map(len, found.gaps)), None
        if body.top is not None:
            shown = Logprobs(served.pieces, body.top)
            pairs = zip(found.gaps, found.logprobs or (), strict=True)
            scores = [shown.of_chat(gap, told) for gap, told in pairs]
        form = None
        if (brought := request.ask(InLanguage)) is not None:
            ends = served.pipe.model.spec.stop_ids if request.open[-1] else ()
            slack = len([*takewhile(ends.__contains__, reversed(found.ids))])
            form = structured(brought.language, [found.counts], [slack])
        return {
            "id": f"infill-{uuid.uuid4().hex}", "object": "infill", "created": int(time.time()), "model": served.name,
            "text": escaped(found.text), "gaps": found.gap_texts, "logprobs": scores,
            "usage": usage_of(len(found.ids) - tokens, tokens, cost(tokens, [found.counts], form)),
        }  # fmt: skip
