"""Trains the model in the box: masked-diffusion fine-tuning as in LLaDA (Nie et al., arXiv:2502.09992), from scratch.

A mask ratio t ~ U(0, 1) is drawn for every row, each response token is masked with probability t, and the loss is
the cross-entropy at masked positions, weighted 1/t and divided by the response length. Prompts are never masked;
the EOS that fill a response count like any token.

    PYTHONPATH=. python tools/train_tiny.py dinfer/checkpoints/tiny --steps 40000

Shape suffixes: B rows, T positions, V vocabulary.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import os
import platform
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from tiny_data import Shard, shards
from tiny_step import Step
from tokenizers import Tokenizer
from torch import Tensor

from dinfer.checkpoint import load_network, save_network
from dinfer.layers.transformer import Transformer
from dinfer.models.llada import Llada
from dinfer.protocols import ModelSpec


@dataclass(frozen=True, slots=True)
class Options:
    """The hyper-parameters of a run; every field is an option of the command line."""

    steps: int = 40_000
    batch: int = 256
    learning_rate: float = 2e-3
    warmup: int = 1000
    weight_decay: float = 0.05
    clip: float = 1.0
    seed: int = 0
    layers: int = 6
    hidden: int = 256
    heads: int = 4
    mlp: int = 768
    max_length: int = 256
    workers: int = 8
    time_limit: float = math.inf  # seconds of training after which it ends, wherever the learning rate is
    fit_seconds: float = 0.0  # not 0: when warm-up ends, set `steps` to what fits this time; the record has them
    log_every: int = 50
    compile: bool = True
    graphs: bool = True
    device: str = "cuda"


def spec_of(options: Options, tokenizer: Tokenizer) -> ModelSpec:
    """The LLaDA architecture in small."""
    eos = tokenizer.token_to_id("<|endoftext|>")
    return ModelSpec(
        family="llada",
        vocab=tokenizer.get_vocab_size(),
        hidden=options.hidden,
        layers=options.layers,
        heads=options.heads,
        kv_heads=options.heads,
        head_dim=options.hidden // options.heads,
        mlp=options.mlp,
        norm_eps=1e-5,
        rope_theta=10_000.0,
        max_length=options.max_length,
        mask_id=tokenizer.token_to_id("<|mdm_mask|>"),
        eos_id=eos,
        stop_ids=(eos,),
    )


def initialise(model: Transformer) -> None:
    """Normal weights; those that write into the residual stream smaller, by the number of writers."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            writes = name.endswith(("out.weight", "down.weight"))
            torch.nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * model.spec.layers) if writes else 0.02)


def learning_rate_at(step: int, options: Options) -> float:
    """Linear warm-up, then a cosine to zero."""
    if step < options.warmup:
        return options.learning_rate * (step + 1) / options.warmup
    done = (step - options.warmup) / max(1, options.steps - options.warmup)
    return options.learning_rate * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def tail_pace(marks: list[float], log_every: int) -> float | None:
    """Seconds a step over the second half, compilation out of the way; `marks` are seconds at every log line."""
    half = len(marks) // 2
    return (marks[-1] - marks[half]) / (log_every * (len(marks) - 1 - half)) if len(marks) > 2 else None


def batches(source: Iterator[Shard], size: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches on the device, a shard at a time: a copy a batch would hold up every step."""
    for shard in source:
        parts = {
            length: (torch.from_numpy(part.tokens_BT).to(device), torch.from_numpy(part.prompt_B).to(device))
            for length, part in shard.parts.items()
        }
        for length, at in shard.order:
            tokens_BT, prompt_B = parts[length]
            yield tokens_BT[at : at + size], prompt_B[at : at + size]


def train(model: Transformer, options: Options, tokenizer_file: Path) -> dict[str, object]:
    """Trains in place; returns the record: loss curve, steps done, seconds."""
    step = Step(
        model,
        weight_decay=options.weight_decay,
        clip=options.clip,
        seed=options.seed,
        compiled=options.compile,
        graphs=options.graphs,
    )
    source = shards(tokenizer_file, options.seed, options.batch, options.workers)
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
        step(tokens_BT, prompt_B, learning_rate_at(done - 1, options))
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
                # the learning rate does not depend on `steps` up to here, so a run given these steps is the same
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


def llada_config(spec: ModelSpec) -> dict[str, object]:
    """config.json with the field names of the published LLaDA checkpoints."""
    return {
        "architectures": ["LLaDAModelLM"],
        "model_type": "llada",
        "activation_type": "silu",
        "attention_dropout": 0.0,
        "block_group_size": 1,
        "block_type": "llama",
        "d_model": spec.hidden,
        "embedding_dropout": 0.0,
        "embedding_size": spec.vocab,
        "eos_token_id": spec.eos_id,
        "include_bias": False,
        "include_qkv_bias": False,
        "layer_norm_type": "rms",
        "mask_token_id": spec.mask_id,
        "max_sequence_length": spec.max_length,
        "mlp_hidden_size": spec.mlp,
        "n_heads": spec.heads,
        "n_kv_heads": spec.kv_heads,
        "n_layers": spec.layers,
        "pad_token_id": spec.eos_id,
        "residual_dropout": 0.0,
        "rms_norm_eps": spec.norm_eps,
        "rope": True,
        "rope_full_precision": True,
        "rope_theta": spec.rope_theta,
        "torch_dtype": "float16",
        "vocab_size": spec.vocab,
        "weight_tying": spec.tied_head,
    }


def save(model: Transformer, folder: Path) -> None:
    """An ordinary Hugging Face folder, weights in float16."""
    save_network(copy.deepcopy(model).half(), Llada(), folder, llada_config(model.spec))


def parse() -> tuple[Path, Path, Path | None, Options]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="has tokenizer.json; config.json and model.safetensors go there")
    parser.add_argument("--record", type=Path, default=Path("training.json"), help="where the record goes")
    parser.add_argument("--start-from", type=Path, help="a folder whose weights to go on from (default: none)")
    for name, value in asdict(Options()).items():
        kind = argparse.BooleanOptionalAction if isinstance(value, bool) else None
        extra = {"action": kind} if kind else {"type": type(value)}
        parser.add_argument("--" + name.replace("_", "-"), default=value, **extra)
    given = vars(parser.parse_args())
    return given.pop("folder"), given.pop("record"), given.pop("start_from"), Options(**given)


def main() -> None:
    folder, record_file, start_from, options = parse()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    tokenizer_file = folder / "tokenizer.json"
    if start_from is not None:
        model = load_network(start_from, Llada(), dtype=torch.float32, device=torch.device(options.device))
        model.requires_grad_(True).train()
    else:
        model = Transformer(spec_of(options, Tokenizer.from_file(str(tokenizer_file)))).to(options.device)
        initialise(model)
    started = time.perf_counter()
    # a graph cannot be captured on the default stream
    with torch.cuda.stream(torch.cuda.Stream()) if model.device.type == "cuda" else nullcontext():
        done = train(model, options, tokenizer_file)
    save(model, folder)
    record = {
        "command": shlex.join(["python", *sys.argv]),
        "hardware": torch.cuda.get_device_name() if options.device == "cuda" else platform.processor(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "options": {name: value for name, value in asdict(options).items() if value != math.inf},
        "wall_seconds": round(time.perf_counter() - started, 1),
        **done,
    }
    record_file.write_text(json.dumps(record) + "\n")
    print(f"{done['steps']} steps in {done['seconds']} s, {record['parameters']} parameters", flush=True)


if __name__ == "__main__":
    main()
