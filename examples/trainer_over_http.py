"""A trainer and a server in two processes, by the paths of SGLang that slime and AReaL call.

    python examples/trainer_over_http.py --rounds 2

The trainer asks /generate for groups with their step maps, updates a model of its own, and broadcasts its weights over
gloo in one bucket. The next samples tell the new version.
"""

import argparse
import json
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

import dinfer
from dinfer.demo.problems import extract_answer, generate
from dinfer.lab.likelihood import Samples, combine, logps, passes
from dinfer.rollouts.transport import broadcast, join, leave

GROUP = 4


def post(url: str, path: str, **body: Any) -> Any:
    """The answer to a request. Errors hold what the server says."""
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.loads(answer.read())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    """Until the server takes requests."""
    while server.poll() is None:
        try:
            urllib.request.urlopen(f"{url}/ready", timeout=5)
            return
        except OSError:
            time.sleep(0.5)
    raise SystemExit("the server has ended")


def sampled(url: str, prompt: list[int], seed: int) -> list[dict[str, Any]]:
    """One group, as slime's rollout function asks for it."""
    params = {"max_new_tokens": 64, "temperature": 1.0, "sampling_seed": seed, "n": GROUP}
    own = {"threshold": 0.5}  # of the decoder
    return list(post(url, "/generate", input_ids=prompt, sampling_params=params, return_step_maps=True, dinfer=own))


def update(
    pipe: Any, groups: list[list[dict[str, Any]]], prompts: list[list[int]], answers: list[str], seed: int
) -> float:  # fmt: skip
    """One step of TraceRL over all groups; returns the mean reward."""
    rewards = torch.tensor([
        [float(extract_answer(one["text"]) == wanted) for one in group]
        for group, wanted in zip(groups, answers, strict=True)
    ])  # fmt: skip
    advantage_N = (rewards - rewards.mean(1, keepdim=True)).flatten()
    told = [(prompt, one["meta_info"]) for prompt, group in zip(prompts, groups, strict=True) for one in group]
    samples = Samples.of(
        [(prompt, meta["dllm_replay_token_ids"]) for prompt, meta in told],
        steps=[[step - 1 for step in meta["dllm_replay_step_maps"]] for _, meta in told],
    )
    drawn = passes("tracerl", pipe.model.spec, samples, seed=seed, shrink=8)
    scored = combine(drawn, logps(pipe.model, drawn)).sequence
    loss = -((scored - scored.detach()).exp() * advantage_N).mean()
    pipe.model.zero_grad()
    loss.backward()
    with torch.no_grad():
        for parameter in pipe.model.parameters():
            if parameter.grad is not None:
                parameter -= 1e-4 * parameter.grad
    return float(rewards.mean())


def send(url: str, group: Any, pipe: Any, version: int) -> None:
    """Broadcasts every tensor under its name in a checkpoint."""
    tensors = pipe.weights.tensors()
    told = {
        "names": [*tensors], "dtypes": [str(one.dtype) for one in tensors.values()],
        "shapes": [[*one.shape] for one in tensors.values()], "load_format": "flattened_bucket",
    }  # fmt: skip
    post(url, "/pause_generation", mode="in_place")
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(post, url, "/update_weights_from_distributed", weight_version=version, **told)
        broadcast(group, torch.cat([one.contiguous().view(torch.uint8).flatten() for one in tensors.values()]))
        print(taken.result()["message"] or "taken", f"{len(tensors)} tensors")
    post(url, "/continue_generation")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()
    port, meeting = free_port(), free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "dinfer", "serve", "model=tiny", f"port={port}", "rollouts=true", "cache=none"]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        pipe = dinfer.load("tiny", device="cpu", cache="none")
        pipe.model.requires_grad_(True)
        wait_for(url, server)
        with ThreadPoolExecutor(1) as pool:
            where = {"master_address": "127.0.0.1", "master_port": meeting, "rank_offset": 1, "world_size": 2}
            joined = pool.submit(post, url, "/init_weights_update_group", backend="gloo", **where)
            group = join("127.0.0.1", meeting, 0, 2)
            joined.result()
        for number in range(given.rounds):
            problems = generate("train", count=2, seed=number, families=["sharing"])
            prompts = [pipe.encode(problem.question) for problem in problems]
            groups = [sampled(url, prompt, 1000 * number + 10 * i) for i, prompt in enumerate(prompts)]
            seen = {one["meta_info"]["weight_version"] for one in groups[0]}
            reward = update(pipe, groups, prompts, [problem.answer for problem in problems], number)
            print(f"round {number}: reward {reward:.2f}, samples of version {', '.join(seen)}")
            send(url, group, pipe, number + 1)
        print("the server has version", post(url, "/generate", input_ids=prompts[0])["meta_info"]["weight_version"])
        post(url, "/destroy_weights_update_group")
        leave(group)
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
