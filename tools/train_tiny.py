"""Trains a model in the box from scratch, with LLaDA's loss if it is bidirectional, otherwise with block diffusion.

FOLDER has the architecture (config.json) and the tokenizer. `tools/noise.py` defines the loss.

    python -m tools.train_tiny dinfer/demo/checkpoints/tiny --steps 40000
    python -m tools.train_tiny dinfer/demo/checkpoints/tiny-llada2 --wrong 0.15 --drafts 8 \
        --row-lengths 96:8,128:6,160:1

`benchmarks/results/tiny-training.json` and `tiny-llada2-training.json` have the commands of the models in the box.

Shape suffixes: B rows, T positions.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

import dinfer  # registers the families
from dinfer.core.layers.transformer import Transformer
from dinfer.core.loading.checkpoint import family_of, load_network, read_config
from dinfer.core.models.family import ModelFamily
from dinfer.formats.saving import save_network
from tools.noise import Noise
from tools.tiny_data import Shard, shards
from tools.tiny_step import Step
from tools.trained_experts import trainable
from tools.training import capturable, parsed, prepare, write_record


@dataclass(frozen=True, slots=True)
class Options:
    """The hyper-parameters of a run. Every field is an option of the command line."""

    steps: int = 40_000
    batch: int = 256
    learning_rate: float = 2e-3
    warmup: int = 1000
    weight_decay: float = 0.05
    clip: float = 1.0
    seed: int = 0
    row_lengths: str = "112:4,144:4,176:2"  # each with the weight with which a row that fits takes it
    wrong: float = 0.0  # share of the blocks with wrong tokens, for editing decoders
    drafts: int = 0  # in one of so many steps, wrong tokens are the network's drafts; 0: never
    workers: int = 8
    time_limit: float = math.inf  # seconds after which training ends, whatever the learning rate
    fit_seconds: float = 0.0  # sets `steps` to the number that fits this time, when warm-up ends; 0: does not
    log_every: int = 50
    compile: bool = True
    graphs: bool = True
    device: str = "cuda"


def initialise(model: Transformer) -> None:
    """Draws normal weights. Those that write into the residual stream are smaller, by the number of writers."""
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            writes = name.endswith(("out.weight", "down.weight", "mlp.down"))
            torch.nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * model.spec.layers) if writes else 0.02)
        else:
            torch.nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 1.0)


def learning_rate_at(step: int, options: Options) -> float:
    """The learning rate: linear warm-up, then a cosine to zero."""
    if step < options.warmup:
        return options.learning_rate * (step + 1) / options.warmup
    done = (step - options.warmup) / max(1, options.steps - options.warmup)
    return options.learning_rate * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def tail_pace(marks: list[float], log_every: int) -> float | None:
    """Seconds of a step in the second half, without compilation. `marks`: the time of every log line, in seconds."""
    half = len(marks) // 2
    return (marks[-1] - marks[half]) / (log_every * (len(marks) - 1 - half)) if len(marks) > 2 else None


def batches(source: Iterator[Shard], size: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches on the device. It copies a shard at a time, since a copy for each batch would delay every step."""
    for shard in source:
        parts = {
            length: (torch.from_numpy(part.tokens_BT).to(device), torch.from_numpy(part.prompt_B).to(device))
            for length, part in shard.parts.items()
        }
        for length, at in shard.order:
            tokens_BT, prompt_B = parts[length]
            yield tokens_BT[at : at + size], prompt_B[at : at + size]


def train(model: Transformer, options: Options, tokenizer_file: Path) -> dict[str, object]:
    """Trains in place, and returns the record: loss curve, steps, seconds. Raises RuntimeError."""
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    noise = Noise(
        spec=model.spec,
        digits_X=torch.tensor([tokenizer.token_to_id(digit) for digit in "0123456789"], device=model.device),
        wrong=options.wrong,
        generator=torch.Generator(model.device).manual_seed(options.seed),
    )
    step = Step(
        model,
        noise,
        weight_decay=options.weight_decay,
        clip=options.clip,
        compiled=options.compile,
        graphs=options.graphs,
    )
    lengths = {int(length): int(ease) for length, ease in (item.split(":") for item in options.row_lengths.split(","))}
    source = shards(tokenizer_file, lengths, options.seed, options.batch, options.workers)
    feed = batches(source, options.batch, model.device)
    curve: list[tuple[int, float]] = []
    marks: list[float] = []
    started = time.perf_counter()
    waiting = 0.0
    done = tokens = 0
    for done in itertools.count(1):
        asked = time.perf_counter()
        tokens_BT, prompt_B = next(feed)
        waiting += time.perf_counter() - asked
        drafts = options.drafts > 0 and done % options.drafts == 0
        step(tokens_BT, prompt_B, learning_rate_at(done - 1, options), drafts)
        tokens += tokens_BT.numel()
        if done % options.log_every == 0:
            mean = step.mean_loss(options.log_every)
            curve.append((done, round(mean, 5)))
            marks.append(time.perf_counter() - started)
            if done % (20 * options.log_every) == 0:
                print(f"step {done} loss {mean:.4f} {marks[-1]:.0f} s", flush=True)
            if not math.isfinite(mean):
                raise RuntimeError(f"the loss is {mean} at step {done}; lower --learning-rate")
            if marks[-1] > options.time_limit:
                print(f"time limit reached at step {done} of {options.steps}", flush=True)
                break
            pace = tail_pace(marks, options.log_every)
            if options.fit_seconds and pace and done - options.log_every < options.warmup <= done:
                # Up to here the learning rate does not depend on `steps`, so a run with this `--steps` is the same.
                options = replace(options, steps=done + max(1, int((options.fit_seconds - marks[-1]) / pace)))
                print(f"{options.steps} steps of {pace * 1000:.1f} ms fit", flush=True)
        if done >= options.steps:
            break
    source.close()
    return {
        "steps": done,
        "tokens": tokens,
        "seconds": round(time.perf_counter() - started, 1),
        "seconds_waiting_for_data": round(waiting, 1),
        "seconds_per_step_once_compiled": tail_pace(marks, options.log_every),
        "curve": curve,
    }


def save(model: Transformer, family: ModelFamily, folder: Path, config: dict[str, Any]) -> None:
    """Writes a Hugging Face folder, with weights in float16. Biases that choose experts keep their dtype."""
    rounded = copy.deepcopy(model).half()
    for (name, given), parameter in zip(model.named_parameters(), rounded.parameters(), strict=True):
        if name.endswith("choice_bias"):
            parameter.data = given.detach().clone()
    save_network(rounded, family, folder, config)


def parse() -> tuple[Path, Path, Path | None, Options]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="has config.json and tokenizer.json; model.safetensors goes there")
    parser.add_argument("--record", type=Path, default=Path("training.json"), help="file for the record")
    parser.add_argument("--start-from", type=Path, help="a folder with the initial weights (default: none)")
    given, options = parsed(parser, Options)
    return given["folder"], given["record"], given["start_from"], options


def main() -> None:
    folder, record_file, start_from, options = parse()
    prepare(options.seed)
    config, device = read_config(folder), torch.device(options.device)
    family = dinfer.MODELS.build(family_of(config))
    if start_from is not None:
        model = load_network(start_from, family, dtype=torch.float32, device=device)
    else:
        model = family.network(family.spec(config)).to(device)
        initialise(model)
    model = trainable(model)
    started = time.perf_counter()
    with capturable(model.device):
        done = train(model, options, folder / "tokenizer.json")
    save(model, family, folder, config)
    found = {"wall_seconds": round(time.perf_counter() - started, 1), **done}
    write_record(record_file, "tools.train_tiny", model.device, model.parameters(), options, found)


if __name__ == "__main__":
    main()
