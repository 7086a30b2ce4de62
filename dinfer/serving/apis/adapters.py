"""LoRA adapters of a server with `adapters=`, asked for as MODEL:ADAPTER, loaded and unloaded at vLLM's paths, and at
SGLang's, which are the same without `/v1` and answer in JSON."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import FastAPI
from fastapi.responses import PlainTextResponse
from pydantic import Field

from dinfer.core.loading.files import CheckpointError
from dinfer.core.provided import needed
from dinfer.serving.errors import ApiError, at_field, invalid, refused
from dinfer.serving.forms import Strict
from dinfer.serving.served import Catalogue, Served
from dinfer.serving.server import Server

Name = Annotated[str, Field(min_length=1)]
POLL = 0.1  # seconds


class Load(Strict):
    lora_name: Name
    lora_path: Name  # a folder of this machine, or a hub name
    load_inplace: Literal[False] = False


class Unload(Strict):
    lora_name: Name
    lora_int_id: int | None = None  # vLLM's own number, which says nothing here


class Variant:
    """An adapter over whichever recipe of the model a request asks for."""

    def __init__(self, name: str, path: str) -> None:
        self.name, self.path, self._made = name, path, dict[str, Served]()

    def __call__(self, served: Served) -> Served:
        if served.name not in self._made:
            pipe = needed("adapters", f"adapters={self.name}", "formats").AdaptedPipeline(served.pipe, self.name)
            own = f"{served.name}:{self.name}"
            self._made[served.name] = replace(served, name=own, pipe=pipe, root=self.path, parent=served.name)
        return self._made[served.name]


def load(catalogue: Catalogue, name: str, path: str) -> None:
    """Loads an adapter beside the others. Raises ValueError."""
    first = next(iter(catalogue.values()))
    used = {*catalogue, *catalogue.aliases, *(one.rpartition(":")[2] for one in catalogue)}
    if name in used:
        raise ValueError(f"{name!r:.80} is the name of a model or a recipe: choose another")
    needed("adapters", f"adapters={name}", "formats").load_adapter(first.pipe, name, path)
    catalogue.variants[name] = Variant(name, path)


async def unload(server: Server, name: str) -> None:
    """Forgets an adapter once its requests have ended. Meanwhile no other request finds it.

    Raises ValueError if they run longer than the server's deadline: then it stays.
    """
    variants, adapters = server.catalogue.variants, needed("adapters", f"adapters={name}", "formats")
    pipe, end = next(iter(server.catalogue.values())).pipe, time.monotonic() + server.settings.deadline
    variant = variants.pop(name)
    try:
        while True:
            try:
                return await asyncio.to_thread(adapters.unload_adapter, pipe, name)
            except adapters.InUse:
                if time.monotonic() > end:
                    raise
                await asyncio.sleep(POLL)
    except BaseException:
        variants[name] = variant
        raise


def add(app: FastAPI, server: Server) -> None:
    leaving = set[str]()  # names of adapters whose requests are to end

    @app.post("/v1/load_lora_adapter")
    async def load_adapter(body: Load) -> PlainTextResponse:
        """Loads an adapter, which requests then ask for as MODEL:ADAPTER or by its name alone.

        It waits for an adapter of this name that is being unloaded.
        """
        while body.lora_name in leaving:
            await asyncio.sleep(POLL)
        with at_field("lora_name"):
            try:
                await asyncio.to_thread(load, server.catalogue, body.lora_name, body.lora_path)
            except CheckpointError as error:
                raise invalid("lora_path", f": {error}") from error
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @app.post("/load_lora_adapter")
    async def load_as_sglang(body: Load) -> dict[str, Any]:
        """Loads an adapter, which `/generate` then takes as `lora_path`."""
        await load_adapter(body)
        return {"success": True, "loaded_adapters": [*server.catalogue.variants]}

    @app.post("/unload_lora_adapter")
    async def unload_as_sglang(body: Unload) -> dict[str, Any]:
        """Forgets an adapter once no request uses it."""
        await unload_adapter(body)
        return {"success": True, "loaded_adapters": [*server.catalogue.variants]}

    @app.post("/v1/unload_lora_adapter")
    async def unload_adapter(body: Unload) -> PlainTextResponse:
        """Forgets an adapter once no request uses it."""
        if body.lora_int_id is not None:
            raise refused("lora_int_id", body.lora_int_id, "says nothing here: give lora_name alone")
        if body.lora_name not in server.catalogue.variants:
            known = ", ".join(server.catalogue.variants) or "none"
            raise ApiError(
                404, f"lora_name={body.lora_name!r:.80} is not loaded. Loaded: {known}", "lora_name", "not_found"
            )
        leaving.add(body.lora_name)
        try:
            with at_field("lora_name"):
                await unload(server, body.lora_name)
        finally:
            leaving.remove(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")
