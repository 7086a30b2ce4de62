"""/v1/completions: texts or token ids that are continued, as OpenAI's API does."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Self

from fastapi import FastAPI, Response
from pydantic import Field, model_validator

from dinfer.core.engine.request import Counts
from dinfer.serving.answers import Answer, Part, Rendering
from dinfer.serving.errors import ApiError, invalid, refused
from dinfer.serving.fields import Generation, Own, Stop, StreamOptions, Text
from dinfer.serving.generating import Shown, encoded, generated, scored
from dinfer.serving.logprobs import OF_PROMPT
from dinfer.serving.rows import Event
from dinfer.serving.served import Served
from dinfer.serving.server import Server

NO_SUFFIX = "<|endoftext|>"  # what an editor sends for none


class GapOwn(Own):
    gap: Annotated[int, Field(ge=1)] | None = None  # positions between prompt and suffix; null: as many as may be


class CompletionRequest(Generation):
    source = "prompt"
    aliases: ClassVar = {"random_seed": "seed", "max_completion_tokens": "max_tokens"}

    prompt: Text | Annotated[list[Text], Field(min_length=1)] | list[int] | list[list[int]]
    suffix: Text | None = None  # the text behind the answer
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] = []  # editors add their own to the user's
    dinfer: GapOwn = GapOwn()
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None

    @model_validator(mode="after")
    def _something(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise invalid("max_tokens", "=0 needs echo=true, which scores the prompt")
        return self

    @model_validator(mode="after")
    def _one_gap(self) -> Self:
        if self.suffix == NO_SUFFIX:
            self.suffix = None
        if self.suffix is None and self.dinfer.gap is not None:
            raise refused("dinfer.gap", self.dinfer.gap, "is the length of the answer before a suffix: give one")
        if self.suffix is not None and not isinstance(self.prompt, str):
            raise invalid("suffix", " needs a prompt that is one text")
        others = self.model_dump(include={"echo", "prompt_logprobs", "truncate_prompt_tokens"}, exclude_defaults=True)
        for field in others if self.suffix is not None else ():
            raise refused(field, others[field], "is not supported beside a suffix")
        if self.suffix is not None and self.dinfer.drafts:
            raise refused("dinfer.drafts", True, "is not supported beside a suffix")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str) or not self.prompt or isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return list(self.prompt)


class Completion(Rendering):
    """OpenAI's objects of a completion, and what those of a chat share with them."""

    prefix, object, chunk = "cmpl", "text_completion", "text_completion"
    done = b"data: [DONE]\n\n"
    empty: dict[str, Any] = {"text": ""}  # of a piece without text
    no_ids: dict[str, Any] = {"prompt_token_ids": None}  # vLLM's field, where none are wanted

    def __init__(self, answer: Answer, asked: Generation, shown: Shown) -> None:
        super().__init__(answer)
        self.asked, self.shown = asked, shown
        self.id, self.created = f"{self.prefix}-{uuid.uuid4().hex}", int(time.time())
        streamed = asked.stream_options or StreamOptions()
        self.last_usage = streamed.include_usage  # a stream ends with the usage
        self.running_usage = streamed.include_usage and streamed.continuous_usage_stats  # every piece has it

    def whole(self) -> dict[str, Any]:
        made = []
        for row, choice in enumerate(self.answer.choices):
            one = {"index": row, **self.said(row), "logprobs": self.scores(choice.ids, choice.logprobs, 0)}
            made.append(one | self._end(row, choice.last) | self._ids(row, 0))
        return {**self._head(self.object), "choices": made, "usage": self.answer.usage().openai()}

    def said(self, row: int) -> dict[str, Any]:
        """What a choice says."""
        return {"text": self.answer.choices[row].text, **self.of_prompt(row // self.asked.n)}

    def of_prompt(self, prompt: int) -> dict[str, Any]:
        """vLLM's field."""
        return {"prompt_logprobs": self.shown.prompts[prompt] if self.shown.prompts else None}

    def scores(self, ids: Sequence[int], told: Any, offset: int) -> dict[str, Any] | None:
        """Log-probabilities, if the client wants any."""
        shown = self.shown.logprobs
        return None if shown is None else shown.of_completion(ids, told, offset)

    def body(self, row: int, part: Part) -> dict[str, Any] | None:
        """What a part of the answer adds to its choice in a stream."""
        return {"text": part.text} if part.text else None

    def finish(self, row: int) -> str | None:
        """OpenAI's reason for the end of a choice."""
        return self.answer.finish(row)

    def opening(self) -> list[dict[str, Any]]:
        return [piece for echo in self.answer.echoes for piece in self.pieces(echo)]

    def pieces(self, event: Event) -> list[dict[str, Any]]:
        choice, row = self.answer.choices[event.row], event.row
        offset, since = len(choice.text), len(choice.ids)
        told = [body for part in self.answer.take(event) if (body := self.body(row, part)) is not None]
        ids = event.ids if self.shown.ids else []
        made: list[dict[str, Any]] = []
        if told or ids or event.canvas is not None or event.finish is not None:
            body, *more = told or [self.empty]
            scores = self.scores(event.ids, event.logprobs, offset) if event.ids else None
            piece = self.piece(row, body | self._ids(row, since), scores)
            made.append(piece if event.canvas is None else piece | {"dinfer": {"canvas": event.canvas}})
            made += [self.piece(row, body) for body in more]
        if event.finish is not None:
            made[-1]["choices"][0] |= self._end(row, event)
        return made

    def closing(self) -> list[dict[str, Any]]:
        """The usage, if it was asked for."""
        last = {**self._head(self.chunk), "choices": [], "usage": self.answer.usage().openai()}
        return [last] if self.last_usage else []

    def failed(self, error: ApiError, request_id: str | None) -> list[dict[str, Any]]:
        return [error.body() | {"request_id": request_id}]

    def piece(self, row: int, body: dict[str, Any], logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
        choice = {"index": row, **body, "logprobs": logprobs, **self._end(row, None)}
        usage = {"usage": self.answer.usage().openai() if self.running_usage else None} if self.last_usage else {}
        return {**self._head(self.chunk), "choices": [choice], **usage}

    def _head(self, kind: str) -> dict[str, Any]:
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.answer.model}
        scored = {"echo": any(echo.logprobs for echo in self.answer.echoes), "prompt_logprobs": self.shown.prompts}
        told = {field: OF_PROMPT for field, given in scored.items() if given}
        return head | ({"dinfer": told} if told else {})

    def _end(self, row: int, last: Event | None) -> dict[str, Any]:
        """How a choice ended: OpenAI's field, and SGLang's."""
        found = None if last is None else self.finish(row)
        return {"finish_reason": found} | ({} if last is None else {"matched_stop": last.matched})

    def _ids(self, row: int, since: int) -> dict[str, Any]:
        """vLLM's fields, from a token of the choice on; what is echoed is the prompt's."""
        if not self.asked.return_token_ids:
            return self.no_ids
        echoed = len(self.answer.echoes[row].ids) if self.answer.echoes else 0
        ids = {"token_ids": self.answer.choices[row].ids[max(since, echoed) :]}
        return ids | ({} if since else {"prompt_token_ids": self.answer.prompts[row // self.asked.n]})


class FilledIn(Completion):
    """Mercury's clients read `text`, Mistral's a message."""

    empty = {"text": "", "delta": {}}

    def said(self, row: int) -> dict[str, Any]:
        told = super().said(row)
        return told | {"message": {"role": "assistant", "content": told["text"]}}

    def body(self, row: int, part: Part) -> dict[str, Any] | None:
        return (told := super().body(row, part)) and told | {"delta": {"role": "assistant", "content": part.text}}


def add(app: FastAPI, server: Server) -> None:
    @app.post("/v1/fim/completions")
    async def fill_in(body: CompletionRequest) -> Response:
        """Continues texts or token ids, or fills in before a suffix, as Mercury and Mistral do."""
        return await completions(body, FilledIn)

    @app.post("/v1/completions")
    async def complete(body: CompletionRequest) -> Response:
        """Continues texts or token ids, or fills in before a suffix, whole or as server-sent events, as OpenAI does."""
        return await completions(body, Completion)

    async def completions(body: CompletionRequest, kind: type[Completion]) -> Response:
        served = server.catalogue.find(body.model, body.dinfer.decoder)
        if body.suffix is not None:
            given, rows = await served.gap_rows(str(body.prompt), body.suffix, body, body.dinfer.gap)
            return await generated(server, served, body, [given], kind, body.logprobs, rows=rows)
        server.admission.check(len(body.prompts) * body.n)  # before any of them is encoded
        prompts = [await encoded(server, served, p, "prompt") if isinstance(p, str) else p for p in body.prompts]
        echoes = await echoed(server, served, body, prompts) if body.echo else []
        return await generated(server, served, body, prompts, kind, body.logprobs, echoes)


async def echoed(server: Server, served: Served, body: CompletionRequest, prompts: list[list[int]]) -> list[Event]:
    """What each choice begins with: its prompt, with log-probabilities if they are asked for. Raises ApiError."""
    alone, top, made = body.max_tokens == 0, body.logprobs, list[Event]()
    if body.truncate_prompt_tokens is not None:
        raise refused("truncate_prompt_tokens", body.truncate_prompt_tokens, "contradicts echo=true")
    for ids, given in zip(prompts, body.prompts, strict=True):
        if not ids:
            raise invalid("prompt", " is empty")
        served.check_length(len(ids), "prompt")
        served.check_tokens("prompt", ids)
        text = given if isinstance(given, str) else served.pipe.decode(given)
        told = [] if top is None else await scored(server, served, ids, top, "echo")
        scores = [one and one[0] for one in told]
        counts = Counts(len(scores), 0, 0, 0, 0, 0.0) if alone else None
        for _ in range(body.n):
            made.append(
                Event(len(made), text, ids=ids, logprobs=scores, counts=counts, finish="length" if alone else None)
            )
    return made
