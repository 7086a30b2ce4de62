"""A server for trainers: SGLang's /generate with step maps, and likelihoods."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("fastapi")

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


def test_only_a_server_for_trainers_has_these_paths() -> None:
    with served() as found:
        assert found.ask("/generate", asked(found)).status_code == 404
    with pytest.raises(ValueError, match="rollouts=true lets clients replace the weights"):
        Settings(rollouts=True, host="0.0.0.0", insecure=True)
