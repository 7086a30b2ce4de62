"""LoRA adapters over HTTP, at vLLM's paths: loaded, asked for as MODEL:ADAPTER beside rows without one, unloaded."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.adapters import save_adapter
from support.serving import Client, served

import dinfer
from dinfer.serving.settings import Settings

QUESTION = {"messages": [{"role": "user", "content": "What is 3 + 4?"}], "max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def pipe() -> dinfer.Pipeline:
    return dinfer.load("tiny", device="cpu", runtime=dinfer.Runtime(rows=8, share=True))


@pytest.fixture
def folders(pipe: dinfer.Pipeline, tmp_path: Path) -> list[str]:
    family, spec = pipe.origin[0], pipe.model.spec
    return [str(save_adapter(tmp_path / name, family, spec, rank)) for name, rank in (("one", 2), ("two", 3))]


@pytest.fixture
def client(pipe: dinfer.Pipeline) -> Iterator[Client]:
    with served(Settings(adapters={}), pipe, careful={"cache": "none"}) as found:
        yield found
        for name in [*found.server.catalogue.variants]:
            found.ask("/v1/unload_lora_adapter", {"lora_name": name})


def said(client: Client, *models: str) -> list[tuple[str, str]]:
    """The model that each of several requests at once says it is, and its answer."""

    async def all_of() -> list[Any]:
        bodies = [QUESTION | {"model": model} for model in models]
        return await asyncio.gather(*(client.http.post("/v1/chat/completions", json=body) for body in bodies))

    return [(a.json()["model"], a.json()["choices"][0]["message"]["content"]) for a in client.loop.run(all_of())]


def test_adapters_are_models_beside_their_base(client: Client, folders: list[str], pipe: dinfer.Pipeline) -> None:
    for name, folder in zip(("one", "two"), folders, strict=True):
        answer = client.ask("/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder})
        assert (answer.status_code, answer.text) == (200, f"Success: LoRA adapter '{name}' added successfully.")
    cards = {card["id"]: card for card in client.ask("/v1/models").json()["data"]}
    assert [*cards] == ["tiny", "tiny:careful", "tiny:one", "tiny:two"]
    assert (cards["tiny:one"]["root"], cards["tiny:one"]["parent"]) == (folders[0], "tiny")
    models = ("tiny", "tiny:one", "two", "tiny:careful:one")
    alone = [said(client, model)[0] for model in models]
    assert said(client, *models) == alone
    assert [name for name, _ in alone] == ["tiny", "tiny:one", "tiny:two", "tiny:careful:one"]
    assert len({text for _, text in alone[:3]}) == 3
    merged = dinfer.load({"name": "llada", "checkpoint": "tiny", "adapter": folders[0]}, preset="tiny", device="cpu")
    assert alone[1][1] == merged.generate([*QUESTION["messages"]], max_new_tokens=12, temperature=0).text
    choose = QUESTION | {"model": "tiny:one", "dinfer": {"decoder": "no_such"}}
    assert "is not loaded for this model" in client.ask("/v1/chat/completions", choose).text
    assert client.ask("/v1/unload_lora_adapter", {"lora_name": "one"}).status_code == 200
    assert client.ask("/v1/models/tiny:one").status_code == 404
    assert said(client, "tiny", "two") == [alone[0], alone[2]]


def test_an_adapter_is_unloaded_when_its_last_request_has_ended(client: Client, folders: list[str]) -> None:
    """Another one of its name that is loaded meanwhile comes then."""
    client.ask("/v1/load_lora_adapter", {"lora_name": "one", "lora_path": folders[0]})
    long = QUESTION | {"model": "tiny:one", "max_tokens": 64, "ignore_eos": True, "dinfer": {"threshold": 1.0}}

    async def all_of() -> list[Any]:
        asked = asyncio.ensure_future(client.http.post("/v1/chat/completions", json=long))
        while not (client.pipe.engine.loop.running or asked.done()):
            await asyncio.sleep(0.001)
        unloaded = asyncio.ensure_future(client.http.post("/v1/unload_lora_adapter", json={"lora_name": "one"}))
        await asyncio.sleep(0)
        while "one" in client.server.catalogue.variants and not unloaded.done():
            await asyncio.sleep(0.001)
        late = await client.http.post("/v1/chat/completions", json=QUESTION | {"model": "tiny:one"})
        loaded = await client.http.post("/v1/load_lora_adapter", json={"lora_name": "one", "lora_path": folders[1]})
        return [await asked, await unloaded, late, loaded]

    answer, unloaded, late, loaded = client.loop.run(all_of())
    assert answer.json()["usage"]["completion_tokens"] == 64
    assert (unloaded.status_code, late.status_code, loaded.status_code) == (200, 404, 200), loaded.text
    assert client.ask("/v1/models/tiny:one").json()["root"] == folders[1]


def test_what_is_wrong_is_said(client: Client, folders: list[str], tmp_path: Path) -> None:
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    assert client.ask(load, {"lora_name": "one", "lora_path": folders[0]}).status_code == 200
    for path, body, status, param, message in (
        (load, {"lora_name": "one", "lora_path": folders[1]}, 400, "lora_name", "adapter='one' is loaded from"),
        (load, {"lora_name": "careful", "lora_path": folders[1]}, 400, "lora_name", "the name of a model or a recipe"),
        (load, {"lora_name": "new", "lora_path": str(tmp_path)}, 400, "lora_path", "has no adapter_config.json"),
        (load, {"lora_name": "new"}, 400, "lora_path", "is missing"),
        (unload, {"lora_name": "new"}, 404, "lora_name", "lora_name='new' is not loaded. Loaded: one"),
        (unload, {"lora_name": "one", "lora_int_id": 1}, 400, "lora_int_id", "give lora_name alone"),
    ):  # fmt: skip
        answer = client.ask(path, body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text
        assert message in answer.json()["error"]["message"]


def test_only_a_server_that_says_so_loads_adapters() -> None:
    with served() as client:
        assert client.ask("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "b"}).status_code == 404
    with pytest.raises(ValueError, match=r"adapters= lets clients load files of this machine, .*: set api_key"):
        Settings(host="0.0.0.0", insecure=True, adapters={})
