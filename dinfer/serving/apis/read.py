"""/v1/read: how probable each option is in the slots of an answer."""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import asdict
from typing import Annotated, Any, Literal, Self

from fastapi import FastAPI
from pydantic import Field, model_validator

from dinfer.serving.answers import cost, usage_of
from dinfer.serving.errors import ApiError, invalid, refused
from dinfer.serving.fields import MAX_CHOICES, READS, SEEDS, Conversation, Neutral, Own, Text
from dinfer.serving.forms import Strict
from dinfer.serving.generating import encoded
from dinfer.serving.server import Server
from dinfer.structure.abilities.reading import STEPS


class ReadFields(Strict):
    """vLLM's names for reads, as far as they mean the same."""

    diffusion_max_steps: Annotated[int, Field(ge=1, le=STEPS)] | None = None
    diffusion_read_only: Literal[True] | None = None  # a read writes nothing
    diffusion_constrained: bool | None = None  # probabilities are of the options alone either way

    @model_validator(mode="before")
    @classmethod
    def _ours(cls, data: Any) -> Any:
        for field in ("diffusion_seed_canvas", "diffusion_pinned"):
            if isinstance(data, dict) and data.get(field) is not None:
                raise refused(f"vllm_xargs.{field}", data[field], f"is not supported. {READS}")
        return data


class ReadRequest(Neutral, Conversation):
    """A conversation, and an answer with slots, of which the model says how probable their options are."""

    answer: Text | None = None  # null: one slot alone
    choice: list[Text] | None = None  # the options of a single slot
    slots: dict[str, list[Text]] | None = None  # those of each slot by name
    steps: Annotated[int, Field(ge=1, le=STEPS)] | None = None  # null: 1
    vllm_xargs: ReadFields = ReadFields()
    seeds: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    seed: Annotated[int, Field(ge=0, lt=SEEDS - MAX_CHOICES)] = 0
    user: str | None = None
    dinfer: Own = Own()

    @property
    def denoised(self) -> int:
        """The denoise steps of each block. Raises ApiError."""
        told = [count for count in (self.steps, self.vllm_xargs.diffusion_max_steps) if count is not None]
        if len({*told}) > 1:
            raise invalid("steps", f"={told[0]} and vllm_xargs.diffusion_max_steps={told[1]} contradict each other")
        return told[0] if told else 1

    @model_validator(mode="after")
    def _nothing_drawn(self) -> Self:
        if told := self.dinfer.model_dump(exclude={"decoder", "deadline"}, exclude_defaults=True):
            raise refused(f"dinfer.{min(told)}", told[min(told)], "has no effect here: nothing is drawn.")
        return self


def add(app: FastAPI, server: Server) -> None:
    @app.post("/v1/read")
    async def read(body: ReadRequest) -> dict[str, Any]:
        """How probable each option is in its slot of an answer whose other text stands already: `[SLOT:name]`."""
        served = server.catalogue.find(body.model, body.dinfer.decoder)
        prompt = await encoded(server, served, body.conversation, "messages", **body.ending)
        texts = [text for options in (body.slots or {"": body.choice or []}).values() for text in options]
        served.check_size("".join([body.answer or "", *texts]), "answer")
        try:  # in a thread: the first read with options of several tokens looks at the whole vocabulary
            layout = await asyncio.to_thread(served.pipe.layout, body.answer, body.slots, body.choice)
            rows = layout.requests(served.pipe.engine, prompt, body.denoised, body.seeds, body.seed)
            found = layout.reading(prompt, await server.completions(served, rows, body.dinfer, len(prompt)))
        except ValueError as error:
            raise ApiError(400, f"{error}", code="invalid_value") from error
        tokens = sum(counts.tokens for counts in found.counts)
        return {
            "id": f"read-{uuid.uuid4().hex}", "object": "read", "created": int(time.time()), "model": served.name,
            "text": found.text, "slots": {name: asdict(slot) for name, slot in found.slots.items()},
            "usage": usage_of(len(prompt), tokens, cost(tokens, found.counts)),
        }  # fmt: skip
