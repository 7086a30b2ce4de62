"""A server for trainers: SGLang's /generate with step maps, and likelihoods."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("fastapi")

from support.adapters import save_adapter
from support.serving import QUESTION, Client, served

import dinfer
from dinfer.lab.likelihood import Samples, combine, logps, passes
from dinfer.serving.settings import Settings


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with served(Settings(rollouts=True), dinfer.load("tiny", device="cpu", cache="none")) as found:
        yield found


def asked(client: Client, **more: Any) -> dict[str, Any]:
    ids = client.pipe.encode(QUESTION)
    params = {"max_new_tokens": 40, "temperature": 0.8, "sampling_seed": 5, **more.pop("sampling_params", {})}
    return {"input_ids": ids, "sampling_params": params, **more}


def test_a_sample_is_that_of_a_rollout(client: Client) -> None:
    body = asked(client, return_logprob=True, return_step_maps=True, rid="a")
    answer = client.ask("/generate", body).json()
    made = client.pipe.rollout([body["input_ids"]], max_new_tokens=40, seed=[5], temperature=0.8)
    (want,) = made.to_sglang()
    assert answer["output_ids"] == want["output_ids"] and answer["text"] == client.pipe.decode(want["output_ids"])
    meta = answer["meta_info"]
    assert {key: meta[key] for key in want["meta_info"] if key != "output_token_logprobs"} == {
        key: value for key, value in want["meta_info"].items() if key != "output_token_logprobs"
    }
    assert [token for _, token, _ in meta["output_token_logprobs"]] == answer["output_ids"]
    assert meta["id"] == "a" and meta["weight_version"] == "0" and meta["dllm_replay_contract_version"] == 1


def test_samples_of_a_group_differ_and_lists_give_lists(client: Client) -> None:
    found = client.ask("/generate", asked(client, sampling_params={"n": 3, "temperature": 1.5})).json()
    assert [one["meta_info"]["seed"] for one in found] == [5, 6, 7] and "step_maps" not in found[0]["meta_info"]
    assert len({tuple(one["output_ids"]) for one in found}) > 1
    one = client.ask("/generate", {"text": [QUESTION], "sampling_params": {"max_new_tokens": 32, "ignore_eos": True}})
    assert one.json()[0]["meta_info"]["finish_reason"]["type"] == "length"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"input_ids": None}, "give either input_ids or text"),
        ({"stream": True}, "stream"),
        ({"sampling_params": {"temprature": 1}}, "temprature"),
        ({"sampling_params": {"stop_token_ids": [5]}}, "must be among those of the model"),
        ({"input_ids": [10**6]}, "outside the vocabulary"),
        ({"sampling_params": {"max_new_tokens": 100000}}, "exceed the model's"),
        ({"dinfer": {"treshold": 0.5}}, "treshold"),
    ],
)  # fmt: skip
def test_bad_input_names_the_field(client: Client, more: dict[str, Any], message: str) -> None:
    answer = client.ask("/generate", asked(client) | more)
    assert answer.status_code == 400 and message in answer.json()["error"]["message"]


def test_likelihoods_and_their_masks(client: Client) -> None:
    pairs = [([5, 6, 7], [8, 9, 10, 11]), ([5, 6], [12, 13, 14])]
    body = {"sequences": [{"prompt_ids": p, "answer_ids": a} for p, a in pairs], "estimator": "elbo",
            "options": {"samples": 4}, "seed": 3}  # fmt: skip
    answer = client.ask("/score", {**body, "return_passes": True}).json()
    drawn = passes("elbo", client.pipe.model.spec, Samples.of(pairs), seed=3, samples=4)
    want = combine(drawn, logps(client.pipe.model, drawn, grad=False))
    assert [one["sequence"] for one in answer["scores"]] == pytest.approx(want.sequence.tolist(), rel=1e-5)
    again = client.ask("/score", {**body, "seed": 9, "passes": answer["passes"]}).json()
    assert again["scores"] == answer["scores"] and "passes" not in again
    other = client.ask("/score", {**body, "passes": answer["passes"] | {"mask_id": 3}})
    assert other.status_code == 400 and "passes: mask_id is not that" in other.json()["error"]["message"]
    for estimator, message in (("nothing", "nothing"), ("ebpo", "ebpo cannot be had here")):
        wrong = client.ask("/score", {**body, "options": {}, "estimator": estimator})
        assert wrong.status_code == 400 and message in wrong.json()["error"]["message"]


def test_samples_tell_the_weights_that_an_update_brought(client: Client, tmp_path: Path) -> None:
    other = dinfer.load("tiny", device="cpu", cache="none")
    with torch.no_grad():
        for parameter in other.model.parameters():
            parameter.mul_(1.01)
    other.save(tmp_path / "other")
    answer = client.ask("/update_weights_from_disk", {"model_path": str(tmp_path / "other"), "weight_version": "7"})
    assert answer.status_code == 200 and client.ask("/health_generate").status_code == 200
    sample = client.ask("/generate", asked(client)).json()
    want = other.rollout([client.pipe.encode(QUESTION)], max_new_tokens=40, seed=[5], temperature=0.8)
    assert sample["output_ids"] == want.to_sglang()[0]["output_ids"]
    assert sample["meta_info"]["weight_version"] == "7"


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("passes.ids_NT", [["a"]], "passes: ids_NT is not as /score gave it"),
        ("passes.place_X", [-1, -1], "place_X"),
        ("passes.pass_X", [0, 10**20], "pass_X is not as /score gave it"),
        ("passes.sequence_M", [7, 7], "sequence_M has numbers out of range"),
        ("passes.sample_M", [0], "have different lengths"),
        ("passes.masked_MT", None, "masked_MT is not as /score gave it"),
        ("options", {"seed": 1}, "is no option of an estimator"),
        ("options", {"name": "espo"}, "is no option of an estimator"),
        ("seed", 2**64, "must be an integer of 64 bits"),
    ],
)
def test_what_was_not_told_by_score_is_refused(client: Client, field: str, value: Any, message: str) -> None:
    body: dict[str, Any] = {"sequences": [{"prompt_ids": [5], "answer_ids": [8, 9]}], "options": {"samples": 2}}
    found = client.ask("/score", body | {"return_passes": True}).json()["passes"]
    name = field.removeprefix("passes.")
    wrong = client.ask("/score", body | ({name: value} if name == field else {"passes": found | {name: value}}))
    assert wrong.status_code == 400 and message in wrong.json()["error"]["message"]


def test_an_empty_answer_is_certain(client: Client) -> None:
    empty = {"sequences": [{"prompt_ids": [], "answer_ids": []}]}
    assert client.ask("/score", empty).json()["scores"] == [
        {"sequence": 0, "error": None, "per_token": [], "tokens": 0}
    ]


def test_areal_s_and_slime_s_requests_are_taken_as_they_send_them(client: Client) -> None:
    """AReaL 4aef98d8 (`SGLangBackend`), slime 624b824a (`GenerateState`, `abort_server_until_idle`, `external.py`)."""
    ids = client.pipe.encode(QUESTION)
    areal = {
        "top_p": 1.0, "top_k": 100_000_000, "max_new_tokens": 40, "temperature": 0.7, "ignore_eos": False,
        "stop_token_ids": [client.pipe.model.spec.eos_id], "skip_special_tokens": True, "frequency_penalty": 0.0,
    }  # fmt: skip
    slime = {
        "temperature": 0.7, "top_p": 1.0, "top_k": -1, "max_new_tokens": 40, "stop": None, "stop_token_ids": None,
        "skip_special_tokens": False, "no_stop_trim": True, "spaces_between_special_tokens": False, "sampling_seed": 5,
    }  # fmt: skip
    bodies = [
        {"input_ids": ids, "image_data": None, "sampling_params": areal, "return_logprob": True, "stream": False},
        {"input_ids": ids, "sampling_params": slime, "return_logprob": True},
    ]
    found = [client.ask("/generate", body).json() for body in bodies]
    made = client.pipe.rollout([ids], max_new_tokens=40, seed=[5], temperature=0.7)
    assert [one[1] for one in found[1]["meta_info"]["output_token_logprobs"]] == made.to_trl()["completion_ids"][0]
    told = [one[0] for one in found[1]["meta_info"]["output_token_logprobs"]]
    assert told == pytest.approx(made.to_trl()["logprobs"][0], abs=1e-4)  # of what was drawn from, not raw
    assert told != pytest.approx(made.logps[0, : len(told)].tolist(), abs=1e-2)
    assert found[0]["meta_info"]["finish_reason"]["type"] in ("stop", "length")
    for path in ("/abort_request", "/pause_generation", "/continue_generation"):
        assert client.ask(path, {"abort_all": True} if path == "/abort_request" else {}).status_code == 200
    loads = client.ask("/v1/loads?include=core").json()["loads"]
    assert sum(one["num_running_reqs"] + one["num_waiting_reqs"] for one in loads) == 0
    assert client.ask("/server_info").json() == client.ask("/get_server_info").json()
    assert client.ask("/server_info").json()["tp_size"] == 1 and client.ask("/reset_prefix_cache", {}).json()["success"]
    group = {"master_address": "127.0.0.1", "master_port": "x", "rank_offset": 1, "world_size": 2, "backend": "gloo"}
    wrong = client.ask("/init_weights_update_group", group)
    assert wrong.status_code == 400 and "master_port" in wrong.text  # a text of digits is taken
    assert "image_data" in client.ask("/generate", bodies[0] | {"image_data": ["a.png"]}).text
    penalty = client.ask("/generate", bodies[1] | {"sampling_params": slime | {"repetition_penalty": 1.5}}).json()
    want = client.pipe.rollout([ids], max_new_tokens=40, seed=[5], temperature=0.7, repetition_penalty=1.5)
    assert penalty["output_ids"] == want.to_sglang()[0]["output_ids"]


@pytest.mark.rest
def test_an_adapter_is_asked_for_by_its_path(tmp_path: Path) -> None:
    pipe = dinfer.load("tiny", device="cpu", cache="none")
    folder = str(save_adapter(tmp_path / "one", pipe.origin[0], pipe.model.spec, 2))
    with served(Settings(rollouts=True, adapters={}), pipe) as found:
        before = found.ask("/generate", asked(found)).json()["output_ids"]
        answer = found.ask("/load_lora_adapter", {"lora_name": "v1", "lora_path": folder})
        assert (answer.status_code, answer.json()) == (200, {"success": True, "loaded_adapters": ["v1"]})
        made = found.ask("/generate", asked(found, lora_path="v1")).json()["output_ids"]
        assert found.ask("/generate", asked(found)).json()["output_ids"] == before != made
        assert found.ask("/generate", asked(found, lora_path="v2")).status_code == 404
        assert found.ask("/unload_lora_adapter", {"lora_name": "v1"}).json()["loaded_adapters"] == []
    family = {"name": "llada", "checkpoint": "tiny", "adapter": folder}
    merged = dinfer.load(family, preset="tiny", device="cpu", cache="none")
    want = merged.rollout([pipe.encode(QUESTION)], max_new_tokens=40, seed=[5], temperature=0.8)
    assert made == want.to_sglang()[0]["output_ids"]


def test_only_a_server_for_trainers_has_these_paths() -> None:
    with served() as found:
        assert found.ask("/generate", asked(found)).status_code == 404
    with pytest.raises(ValueError, match="rollouts=true lets clients replace the weights"):
        Settings(rollouts=True, host="0.0.0.0", insecure=True)
