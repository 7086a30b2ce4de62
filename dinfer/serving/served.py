"""The models that a server offers: a name, a pipeline, and what a request of a client becomes in it."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dinfer.core.registry import DECODERS, options_of
from dinfer.engine.async_engine import AsyncEngine
from dinfer.engine.request import Request
from dinfer.pipeline import Pipeline
from dinfer.serving.errors import ApiError, refused

OWN = ("drafts", "decoder")  # keys under `dinfer` that are no options of a component
SEEDS = 2**53


@dataclass
class Served:
    """A recipe over a model, under the name by which clients ask for it."""

    name: str
    pipe: Pipeline
    max_new_tokens: int  # of a request that says nothing
    created: int
    engine: AsyncEngine = field(init=False)

    def __post_init__(self) -> None:
        self.engine = AsyncEngine(self.pipe.engine)

    @property
    def max_length(self) -> int:
        """Positions of the longest canvas that this server takes."""
        limit = self.pipe.engine.runtime.max_length
        return min(self.pipe.model.spec.max_length, limit or self.pipe.model.spec.max_length)

    def options(self, asked: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
        """Per-request options: `asked` are OpenAI's fields, `own` what stands under `dinfer`."""
        known = {option.name for option in self.pipe.recipe.request_options}
        chosen = {name: value for name, value in asked.items() if value is not None}
        for name, value in chosen.items():
            if name not in known:
                raise refused(name, value, f"is not an option of the model {self.name!r}")
        for name, value in own.items():
            if name in OWN:
                continue
            if name.split(".")[-1] in chosen:
                raise ApiError(400, f"{name} is given twice: as a field of its own and under dinfer", f"dinfer.{name}")
            chosen[name] = value
        if chosen.get("temperature", 0) and "seed" not in chosen:
            chosen["seed"] = secrets.randbelow(SEEDS)
        return chosen

    def rows(
        self, prompts: Sequence[Sequence[int]], new_tokens: int | None, options: Mapping[str, Any], choices: int
    ) -> list[Request]:
        """One row for each choice of each prompt. Choices of one prompt differ by their seed."""
        rows = []
        for prompt in prompts:
            room = self.max_length - len(prompt)
            if room < 1:
                raise ApiError(
                    400, f"the prompt has {len(prompt)} tokens; {self.name!r} has {self.max_length} positions for prompt "
                    "and answer: shorten it", "messages", "context_length_exceeded",
                )  # fmt: skip
            if new_tokens is not None and new_tokens > room:
                raise ApiError(
                    400, f"max_tokens={new_tokens} and a prompt of {len(prompt)} tokens exceed the {self.max_length} "
                    f"positions of {self.name!r}: ask for at most {room}", "max_tokens", "context_length_exceeded",
                )  # fmt: skip
            length = min(self.max_new_tokens, room) if new_tokens is None else new_tokens
            for choice in range(choices):
                seeded = {**options, "seed": (options["seed"] + choice) % SEEDS} if "seed" in options else options
                rows += self._checked(prompt, length, seeded)
        return rows

    def _checked(self, prompt: Sequence[int], length: int, options: Mapping[str, Any]) -> list[Request]:
        try:
            return self.pipe.requests([prompt], length, [options])
        except ValueError as error:
            raise ApiError(400, str(error).removeprefix("prompt 0: "), code="invalid_value") from error

    def _offered(self) -> dict[str, dict[str, Any]]:
        """What a request may set under `dinfer`."""
        recipe = self.pipe.recipe
        parts = {"decoder": recipe.decoder, "sampling": recipe.sampling}
        helps = {(kind, info.name): info.help for kind, part in parts.items() for info in options_of(part)}
        return {
            o.name: {"default": o.default, "integer": isinstance(o.default, int), "help": helps[o.kind, o.name]}
            for o in recipe.request_options
        }

    def card(self) -> dict[str, Any]:
        """What /v1/models says of it."""
        recipe = self.pipe.recipe
        parts = {"iteration": recipe.iteration, "decoder": recipe.decoder, "cache": recipe.cache}
        return {
            "id": self.name, "object": "model", "created": self.created, "owned_by": "dinfer",
            "dinfer": {
                "max_length": self.max_length,
                "recipe": {kind: repr(part) for kind, part in parts.items()},
                "options": self._offered(),
            },
        }  # fmt: skip


class Catalogue:
    """The served models by name."""

    def __init__(self, served: Sequence[Served]) -> None:
        self._served = {model.name: model for model in served}

    def __iter__(self):
        return iter(self._served.values())

    def find(self, name: str, own: Mapping[str, Any]) -> Served:
        """The model of that name; where `own` asks for another decoder, the recipe of the same model that has it."""
        if name not in self._served:
            raise ApiError(
                404, f"the model {name!r} is not served. Served: {', '.join(self._served)}", "model", "model_not_found"
            )
        decoder = own.get("decoder")
        if decoder is None or decoder == decoder_name(self._served[name]):
            return self._served[name]
        family = name.split(":")[0]
        same = [model for model in self if model.name.split(":")[0] == family]
        for model in same:
            if decoder_name(model) == decoder:
                return model
        loaded = ", ".join(dict.fromkeys(decoder_name(model) for model in same))
        raise refused("dinfer.decoder", decoder, f"is not loaded for this model. Loaded: {loaded}")


def decoder_name(model: Served) -> str:
    cls = type(model.pipe.recipe.decoder)
    return next((name for name in DECODERS.names() if DECODERS.get(name) is cls), cls.__name__)
