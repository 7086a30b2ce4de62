"""A trainer's requests to a server: the paths and fields of SGLang's and vLLM's."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.serving import Client, served

import dinfer
from dinfer.core.engine.engine import Engine
from dinfer.serving.settings import Settings

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "3 + 4 = ?"}], "max_tokens": 32}


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    pipe = dinfer.load("tiny", device="cpu", runtime=dinfer.Runtime(rows=8))
    with served(Settings(rollouts=True), pipe) as made:
        yield made


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model in the box with other weights."""
    pipe = dinfer.load("tiny", device="cpu")
    with torch.no_grad():
        for parameter in pipe.model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(parameter))))
    folder = tmp_path_factory.mktemp("other") / "tiny"
    pipe.save(folder)
    return folder


def text(client: Client) -> str:
    answer = client.ask("/v1/chat/completions", CHAT).json()
    return str(answer["choices"][0]["message"]["content"])


def test_sglangs_update_from_disk(client: Client, other: Path) -> None:
    before = text(client)
    assert client.ask("/get_weight_version").json() == {"weight_version": "0"}
    body = {"model_path": str(other), "weight_version": "7", "flush_cache": True, "abort_all_requests": False}
    answer = client.ask("/update_weights_from_disk", body)
    assert (answer.status_code, answer.json()) == (200, {"success": True, "message": "", "num_paused_requests": 0})
    told = client.ask("/v1/chat/completions", CHAT).json()
    fresh = dinfer.load(
        str(other), device="cpu", **{kind: vars(client.pipe.recipe)[kind] for kind in ("iteration", "decoder", "cache")}
    )
    assert told["choices"][0]["message"]["content"] == fresh.generate("3 + 4 = ?", max_new_tokens=32).text
    assert told["usage"]["dinfer"]["weight_version"] == 7
    assert client.ask("/v1/models").json()["data"][0]["dinfer"]["weight_version"] == 7
    assert "dinfer_weight_version 7.0" in client.ask("/metrics").text
    sums = client.ask("/weights_checker", {"action": "checksum"}).json()["checksums"]
    assert sums == fresh.weights.checksums()
    back = {"model_path": str(client.pipe.origin[1]), "weight_version": 8, "flush_cache": True}
    assert client.ask("/update_weights_from_disk", back).json()["success"] and text(client) == before


def test_vllms_four_phases_and_what_waits_meanwhile(client: Client) -> None:
    before = text(client)

    async def trained() -> list[Any]:
        await client.http.post("/pause?mode=keep")
        assert (await client.http.get("/is_paused")).json() == {"is_paused": True}
        waiting = asyncio.create_task(client.http.post("/v1/chat/completions", json=CHAT))
        await asyncio.sleep(0.05)
        found = [await client.http.post("/start_weight_update", json={"is_checkpoint_format": True})]
        found.append(await client.http.post("/finish_weight_update", json={"weight_version": "12"}))
        assert not waiting.done()
        found += [await client.http.post("/resume"), await waiting]
        return found

    answers = client.loop.run(trained())
    assert [answer.status_code for answer in answers] == [200] * 4
    assert answers[-1].json()["choices"][0]["message"]["content"] == before
    assert client.ask("/weight_info").json() == {"weight_version": "12"}
    assert client.ask("/get_world_size").json() == {"world_size": 1}


def test_trl_is_told_how_weights_come(client: Client) -> None:
    """By the texts of errors, which `VLLMClient` of TRL 1.16 shows: `init_communicator` and `update_named_param`."""
    info = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2, "packed": True}
    chunk = {"names": ["model.norm.weight"], "dtype_names": ["float32"], "shapes": [[2]], "packed": True}
    answers = [
        client.ask("/server_info?config_format=json"),
        client.ask("/init_weight_transfer_engine", {"init_info": info}),
        client.ask("/start_weight_update", {}),
        client.ask("/update_weights", {"update_info": chunk}),
    ]
    assert [one.status_code for one in answers] == [501, 400, 200, 400]
    assert all("transport.join" in one.json()["error"]["message"] for one in answers if one.status_code != 200)
    assert client.ask("/server_info").status_code == 200 and text(client)  # nothing waits for the update that failed


def test_what_a_pause_aborts_says_so(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a stop token nor the length ended it."""
    user, slow = [{"role": "user", "content": "3 + 4 = ?"}], {"threshold": 1.0, "min_tokens": 150}
    asked: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": user, "max_tokens": 160, "dinfer": slow},
        "/v1/messages": {"messages": user, "max_tokens": 160, "dinfer": slow},
        "/v1/responses": {"input": "3 + 4 = ?", "max_output_tokens": 160, "dinfer": slow},
        "/generate": {"text": "3 + 4 = ?", "sampling_params": {"max_new_tokens": 160}, "dinfer": slow},
    }

    loop, step, aborts = client.pipe.engine.loop, Engine.step, threading.Event()

    def held(engine: Engine) -> Any:
        """Once all run, none ends before it is aborted."""
        if len(loop.running) == len(asked):
            aborts.wait(120)
        return step(engine)

    async def ended() -> list[Any]:
        await client.http.post("/pause?mode=keep")  # or the first could end before the last enters
        posts = [client.http.post(path, json={"model": "tiny"} | body) for path, body in asked.items()]
        tasks = [asyncio.create_task(post) for post in posts]
        while len(loop.waiting) < len(tasks):
            await asyncio.sleep(0.001)
        await client.http.post("/resume")
        while len(loop.running) < len(tasks) and not any(task.done() for task in tasks):
            await asyncio.sleep(0.001)
        aborted = await client.http.post("/pause?mode=abort")
        aborts.set()
        assert aborted.status_code == 200
        found = [(await task).json() for task in tasks]
        await client.http.post("/resume")
        return found

    monkeypatch.setattr(Engine, "step", held)
    chat, message, response, sample = client.loop.run(ended())
    assert chat["choices"][0]["finish_reason"] == "abort" and message["stop_reason"] == "pause_turn"
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "aborted"})
    assert sample["meta_info"]["finish_reason"]["type"] == "abort"


@pytest.mark.parametrize("runs", [False, True])
def test_a_failed_update_ends_requests_on_the_way(runs: bool, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits hears why, what runs ends with what it has; neither waits until its deadline for another update."""
    pipe, ends = client.pipe, threading.Event()
    loop, step = pipe.engine.loop, Engine.step
    old = {name: tensor.clone() for name, tensor in pipe.weights.tensors().items()}
    body = CHAT | {"max_tokens": 160, "dinfer": {"threshold": 1.0, "min_tokens": 150}}

    def held(engine: Engine) -> Any:
        if loop.running:
            ends.wait(120)
        return step(engine)

    def fails() -> None:
        with pytest.raises(ValueError, match="is no tensor"), pipe.updating(pending="keep") as into:
            into.load_all(iter(old.items()))
            into.load("nothing.weight", torch.ones(1))

    async def ended() -> Any:
        await client.http.post("/pause?mode=keep")
        task = asyncio.create_task(client.http.post("/v1/chat/completions", json=body))
        while not loop.waiting:
            await asyncio.sleep(0.001)
        if runs:
            await client.http.post("/resume")
            while not (loop.running or task.done()):
                await asyncio.sleep(0.001)
        await asyncio.to_thread(fails)
        ends.set()
        return await asyncio.wait_for(task, 60)

    monkeypatch.setattr(Engine, "step", held)
    answer = client.loop.run(ended())
    try:
        if runs:
            assert answer.json()["choices"][0]["finish_reason"] == "abort"
        else:
            assert answer.status_code == 503 and "before it began: the weights are incomplete (an" in answer.text
    finally:
        with pipe.updating() as into:
            into.load_all(old)
        pipe.weights.resume()
    assert text(client)


def test_a_failed_update_stops_requests_until_one_succeeds(client: Client, tmp_path: Path) -> None:
    before = text(client)
    absent = client.ask("/update_weights_from_disk", {"model_path": str(tmp_path / "nothing")})
    assert absent.status_code == 400 and not absent.json()["success"] and "is no folder" in absent.json()["message"]
    assert text(client) == before
    for path, body in (
        ("/update_weights_from_tensor", {"serialized_named_tensors": ["gASV"]}),
        ("/update_weights_from_disk", {"model_path": "x", "recapture_cuda_graph": True}),
        ("/update_weights_from_disk", {"model_path": "x", "unknown": 1}),
        ("/update_weights_from_disk", {"model_path": str(tmp_path)}),  # which has no config.json
        ("/update_weights_from_tensor", {}),
        ("/update_weights_from_tensor", {"handles": [{}]}),
        ("/update_weight_version", {"new_version": -1}),
        ("/update_weight_version", {"new_version": 2**80}),
        ("/update_weights", {"update_info": {"names": ["x"]}}),
        ("/finish_weight_update", {}),
        ("/update_weights_from_distributed", {"names": [], "dtypes": [], "shapes": []}),
        ("/destroy_weights_update_group", {"group_name": "none"}),
        ("/wake_up?tags=weights,all", {}),
    ):
        assert client.ask(path, body).status_code == 400, path


def test_sleep_and_wake(client: Client) -> None:
    before = text(client)
    assert client.ask("/release_memory_occupation", {"tags": ["weights", "kv_cache"], "level": 2}).json()["success"]
    assert client.ask("/is_sleeping").json() == {"is_sleeping": True}
    refused = client.ask("/v1/chat/completions", CHAT)
    assert refused.status_code == 503 and "sleep" in refused.json()["error"]["message"]
    assert client.ask("/ready").status_code == 503 and client.ask("/health").status_code == 200
    assert client.ask("/resume_memory_occupation", {"tags": ["weights"]}).json()["success"]
    assert not client.ask("/continue_generation", {}).json()["success"]  # nothing is there yet
    assert client.ask("/update_weights_from_disk", {"model_path": str(client.pipe.origin[1])}).json()["success"]
    assert client.ask("/resume_memory_occupation", {"tags": ["kv_cache"]}).json()["success"]
    assert text(client) == before
    woken = "/wake_up?tags=weights&tags=kv_cache"  # as vLLM's clients send a list
    for path in ("/sleep?level=1", woken, "/sleep?level=1", "/wake_up", "/flush_cache", "/pause?mode=wait", "/resume"):
        assert client.ask(path, {}).status_code == 200, path
    assert client.ask("/pause?mode=x", {}).json()["error"]["param"] == "mode"
    assert client.ask("/update_weight_version", {"new_version": 13, "abort_all_requests": True}).json()["success"]
    assert client.ask("/weight_version").json() == {"weight_version": "13"} and text(client) == before


def test_others_have_no_such_paths() -> None:
    with served() as client:
        assert client.ask("/flush_cache", {}).status_code == 404
    with pytest.raises(ValueError, match=r"rollouts=true lets clients replace the weights, and host=0\.0\.0\.0"):
        Settings(rollouts=True, host="0.0.0.0", insecure=True)
