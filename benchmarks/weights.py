"""New weights under a running engine: what an update takes beside plain copies, what sleep gives back, what stays.

    python -m benchmarks.weights --out FILE                  # a CPU
    python -m benchmarks.weights --device cuda --out FILE    # also CUDA graphs, handles of another process

The network is random, of LLaDA's shape. Updates and plain copies of the same tensors take turns in one run.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.clock import lap
from benchmarks.provenance import begun, command_line, save, show
from dinfer import Pipeline, Runtime, compose, load
from dinfer.core.loading.checkpoint import place_of
from dinfer.core.models.llada import Llada
from dinfer.lab.random_network import random_network
from dinfer.rollouts.transport import handle_of

CONFIG: dict[str, Any] = {
    "model_type": "llada", "architectures": ["LLaDAModelLM"], "vocab_size": 8000, "embedding_size": 8000,
    "mask_token_id": 7999, "eos_token_id": 7998, "max_sequence_length": 4096, "rope": True, "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5, "layer_norm_type": "rms", "block_type": "llama", "activation_type": "silu",
    "weight_tying": False,
}  # fmt: skip
PROMPTS = [[*range(5, 69)], [*range(100, 190)]]


def made(given: Namespace, seed: int) -> Pipeline:
    """A pipeline with random weights."""
    width = given.hidden
    config = CONFIG | {
        "d_model": width, "n_heads": width // 64, "n_kv_heads": width // 64, "n_layers": given.layers,
        "mlp_hidden_size": 3 * width,
    }  # fmt: skip
    family, device = Llada(), torch.device(given.device)
    torch.manual_seed(seed)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    network = random_network(family, family.spec(config), dtype=dtype, device=device)
    recipe = compose(network, iteration={"name": "blockwise", "block": 32}, decoder="threshold", cache="dual")
    return Pipeline(recipe, None, Runtime(graphs=device.type == "cuda", rows=4), (family, Path()))


def tensors_of(pipe: Pipeline) -> dict[str, Tensor]:
    """Copies of all tensors, by their names in a checkpoint."""
    held = dict(pipe.model.named_parameters())
    places = pipe.origin[0].weights(pipe.model.spec)  # type: ignore[index]
    return {name: place_of(held, place).clone() for name, place in places.items()}


def answers(pipe: Pipeline, tokens: int) -> list[list[int]]:
    return [result.canvas for result in pipe.generate_ids(PROMPTS, max_new_tokens=tokens)]


def copies(given: Namespace, pipe: Pipeline, new: dict[str, Tensor]) -> dict[str, Any]:
    """An update beside plain copies of the same tensors, in turns."""
    held = dict(pipe.model.named_parameters())
    places = {name: place_of(held, place) for name, place in pipe.origin[0].weights(pipe.model.spec).items()}  # type: ignore[index]

    def plain() -> None:
        for name, tensor in new.items():
            places[name].copy_(tensor)

    def update() -> None:
        with pipe.updating() as into:
            into.load_all(new)

    taken: dict[str, list[float]] = {"copy": [], "update": []}
    for turn in range(given.turns + 1):
        for name, work in (("copy", plain), ("update", update)):
            took = lap(work, cpu=given.device == "cpu").seconds
            if turn:  # the first turn meets memory for the first time
                taken[name].append(took)
    middle = {name: statistics.median(times) for name, times in taken.items()}
    size = sum(tensor.nbytes for tensor in new.values())
    return {
        "bytes": size, "tensors": len(new), "seconds": taken, "ratio": middle["update"] / middle["copy"],
        "update_gb_per_s": size / middle["update"] / 1e9,
    }  # fmt: skip


def sender(given: Namespace) -> None:
    """The trainer's side of handles: it makes weights, tells where they are, and stays until its input ends."""
    new = tensors_of(made(given, 2))
    print(json.dumps([handle_of(name, tensor) for name, tensor in new.items()]), flush=True)
    sys.stdin.read()


def handles(given: Namespace, pipe: Pipeline) -> dict[str, Any]:
    """Weights from the memory of another process on the same card."""
    command = [sys.executable, "-m", "benchmarks.weights", "--device", "cuda", "--sender"]
    command += ["--hidden", str(given.hidden), "--layers", str(given.layers)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        told = json.loads(process.stdout.readline())  # type: ignore[union-attr]

        def update() -> None:
            with pipe.updating() as into:
                into.open(told)

        took = [lap(update).seconds for _ in range(3)]
        same = pipe.weights.checksums() == made(given, 2).weights.checksums()
        process.stdin.close()  # type: ignore[union-attr]
        process.wait()
    return {"seconds": took, "bits_are_the_senders": same}


def deterministic(given: Namespace) -> dict[str, Any]:
    """What the same bits alone and beside others cost: the model in the box in bfloat16, 16 requests at once.

    `nats`: the largest difference of a log-probability between a request alone and beside the others.
    """
    found: dict[str, Any] = {"requests": 16, "tokens": 32}
    for name, on in (("off", False), ("on", True)):
        runtime = Runtime(rows=16, deterministic=on, graphs=given.device != "cpu", max_length=256)
        pipe = load("tiny", device=given.device, dtype="bfloat16", runtime=runtime)
        prompts = [f"{number} + {2 * number} = ?" for number in range(16)]
        how: Any = {"max_new_tokens": 32, "temperature": 0.8}
        beside = pipe.rollout(prompts, seed=[*range(16)], **how)
        work = partial(pipe.rollout, prompts, seed=[*range(16)], **how)
        took = [lap(work, pipe.engine, cpu=given.device == "cpu") for _ in range(3)]
        nats = 0.0
        for number, prompt in enumerate(prompts[:4]):
            alone = pipe.rollout([prompt], seed=[number], **how)
            size = min(int(alone.lengths[0]), int(beside.lengths[number]))
            nats = max(nats, float((alone.logps[0, :size] - beside.logps[number, :size]).abs().max()))  # type: ignore[index]
        captured = sum(one.captured for one in took)
        found[name] = {"seconds": [one.seconds for one in took], "captured_while_timed": captured, "nats": nats}
    found["ratio"] = statistics.median(found["on"]["seconds"]) / statistics.median(found["off"]["seconds"])
    return found


def main() -> None:
    parser = command_line(__doc__, "cpu")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--sender", action="store_true")
    given = parser.parse_args()
    if given.sender:
        return sender(given)
    report = begun(given, torch.device(given.device))
    cuda = given.device != "cpu"
    pipe, other = made(given, 0), made(given, 1)
    new, fresh = tensors_of(other), [answers(other, given.tokens) for _ in range(3 if cuda else 1)]
    before = [answers(pipe, given.tokens) for _ in range(4 if cuda else 1)]  # the second and later ones are CUDA graphs
    graphs = pipe.engine.runner.captured
    report["deterministic"] = deterministic(given)
    report["copies"] = copies(given, pipe, new)
    save(report, given.out)
    report["after"] = {
        "answers_are_those_of_a_fresh_load": answers(pipe, given.tokens) == fresh[-1] != before[-1],
        "graphs": {"before": graphs, "after": pipe.engine.runner.captured},
    }
    if cuda:
        report["handles"] = handles(given, pipe)
        save(report, given.out)
        with pipe.updating() as into:
            into.load_all(new)
    new = {name: tensor.cpu() for name, tensor in new.items()}  # what sleep leaves on the card is the engine's alone
    del other
    report["sleep"] = {}
    for level in (1, 2):
        found = pipe.weights.sleep(level)
        if cuda:
            free, total = torch.cuda.mem_get_info()
            found |= {"used_on_the_card": total - free}
        found["wake_seconds"] = lap(pipe.weights.wake, cpu=not cuda).seconds
        if level == 2:
            with pipe.updating() as into:
                into.load_all(new)
        found["same_answers"] = answers(pipe, given.tokens) == fresh[-1]
        report["sleep"][str(level)] = found
        save(report, given.out)
    show(report, given.out)


if __name__ == "__main__":
    main()
