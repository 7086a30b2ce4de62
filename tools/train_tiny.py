"""Trains the model in the box: masked-diffusion fine-tuning as in LLaDA (Nie et al., arXiv:2502.09992), from scratch.

A mask ratio t ~ U(0, 1) is drawn for every row, each response token is masked with probability t, and the loss is
the cross-entropy at masked positions, weighted 1/t and divided by the response length. Prompts are never masked;
the EOS that fill a response count like any token.

    PYTHONPATH=. python tools/train_tiny.py dinfer/checkpoints/tiny --steps 40000

Shape suffixes: B rows, T positions, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from muon import Muon
from safetensors.torch import save_file
from tiny_data import Batch, batches
from tokenizers import Tokenizer
from torch import Tensor

from dinfer.kernels.attention import interval_attention
from dinfer.layers.transformer import Transformer
from dinfer.protocols import ModelSpec

BACKEND = os.environ.get("BACKEND", "inductor")
SMALLEST_RATIO = 1e-3  # LLaDA's: keeps 1/t finite


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
    max_length: int = 512
    workers: int = 14
    time_limit: float = math.inf  # seconds of training after which the learning rate is brought down and it ends
    log_every: int = 50
    compile: bool = True
    muon: bool = True
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


class Whole:
    """Attention of whole rows over themselves, as `Transformer.score` does it, in a form torch.compile can trace."""

    def __init__(self, pos_BW: Tensor) -> None:
        self.pos_BW = pos_BW

    def __call__(self, layer: int, q_BWHE: Tensor, k_BWGE: Tensor, v_BWGE: Tensor) -> Tensor:
        return interval_attention(q_BWHE, k_BWGE, v_BWGE, None)


def cost(model: Transformer, shown_BT: Tensor, tokens_BT: Tensor) -> Tensor:
    """Cross-entropy at every position, bf16 matrix products on a GPU. float32 [B, T]"""
    pos_BT = torch.arange(tokens_BT.shape[1], device=tokens_BT.device).expand_as(tokens_BT)
    with torch.autocast(tokens_BT.device.type, torch.bfloat16, enabled=tokens_BT.is_cuda):
        logits_BTV = model.logits(model(model.embed(shown_BT), Whole(pos_BT)))
    return F.cross_entropy(logits_BTV.float().flatten(0, 1), tokens_BT.flatten(), reduction="none").view_as(tokens_BT)


def masked_diffusion_loss(
    model: Transformer, tokens_BT: Tensor, prompt_B: Tensor, generator: torch.Generator, cost: Callable[..., Tensor]
) -> Tensor:
    """LLaDA's fine-tuning loss of one batch."""
    rows, length = tokens_BT.shape
    device = tokens_BT.device
    # one draw spread evenly over the rows: each t is uniform, and the batch covers (0, 1) with little variance
    offset = torch.rand((), device=device, generator=generator)
    ratio_B = (offset + torch.arange(rows, device=device) / rows).remainder(1).clamp_min(SMALLEST_RATIO)
    response_BT = torch.arange(length, device=device) >= prompt_B[:, None]
    chance_BT = torch.rand(tokens_BT.shape, device=device, generator=generator)
    masked_BT = response_BT & (chance_BT < ratio_B[:, None])
    cost_BT = cost(model, torch.where(masked_BT, model.spec.mask_id, tokens_BT), tokens_BT)
    return ((cost_BT * masked_BT).sum(1) / ratio_B / response_BT.sum(1)).mean()


def learning_rate_at(step: int, options: Options) -> float:
    """Linear warm-up, then a cosine to zero."""
    if step < options.warmup:
        return options.learning_rate * (step + 1) / options.warmup
    done = (step - options.warmup) / max(1, options.steps - options.warmup)
    return options.learning_rate * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def on_device(source: Iterator[Batch], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches as tensors, copied while the kernels already queued still run."""
    for batch in source:
        parts = [torch.from_numpy(np.ascontiguousarray(part)) for part in (batch.tokens_BT, batch.prompt_B)]
        if device.type == "cuda":
            parts = [part.pin_memory() for part in parts]
        tokens_BT, prompt_B = (part.to(device, non_blocking=True).long() for part in parts)
        yield tokens_BT, prompt_B


def tail_pace(marks: list[float], log_every: int) -> float | None:
    """Seconds a step over the second half, compilation out of the way; `marks` are seconds at every log line."""
    half = len(marks) // 2
    return (marks[-1] - marks[half]) / (log_every * (len(marks) - 1 - half)) if len(marks) > 2 else None


def train(model: Transformer, options: Options, tokenizer_file: Path) -> dict[str, object]:
    """Trains in place; returns the record: loss curve, steps done, seconds."""
    device = torch.device(options.device)
    generator = torch.Generator(device).manual_seed(options.seed)
    inner = [p for p in model.blocks.parameters() if p.dim() == 2] if options.muon else []
    matrices = [p for p in model.parameters() if p.dim() == 2 and all(p is not other for other in inner)]
    norms = [p for p in model.parameters() if p.dim() != 2]
    muon = Muon(inner, options.hidden, options.weight_decay) if inner else None
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": options.weight_decay}, {"params": norms, "weight_decay": 0.0}],
        lr=options.learning_rate,
        betas=(0.9, 0.98),
        fused=device.type == "cuda",
    )
    cost_of = torch.compile(cost, dynamic=False, backend=BACKEND) if options.compile else cost
    source = batches(tokenizer_file, options.seed, options.batch, options.workers)
    feed = on_device(source, device)
    waiting = 0.0
    curve: list[tuple[int, float]] = []
    marks: list[float] = []
    window = torch.zeros((), device=device)
    started = time.perf_counter()
    step = tokens = 0
    for step in range(1, options.steps + 1):
        waited = time.perf_counter()
        tokens_BT, prompt_B = next(feed)
        waiting += time.perf_counter() - waited
        rate = learning_rate_at(step - 1, options)
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = masked_diffusion_loss(model, tokens_BT, prompt_B, generator, cost_of)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip)
        optimizer.step()
        if muon is not None:
            muon.step(rate)
        window += loss.detach()
        tokens += tokens_BT.numel()
        if step % options.log_every == 0:
            mean = window.item() / options.log_every
            window.zero_()
            curve.append((step, round(mean, 5)))
            seconds = time.perf_counter() - started
            marks.append(seconds)
            if step % (20 * options.log_every) == 0:
                print(f"step {step} loss {mean:.4f} {seconds:.0f} s", flush=True)
            if not math.isfinite(mean):
                raise RuntimeError(f"the loss is {mean} at step {step}; lower --learning-rate")
            if seconds > options.time_limit:
                print(f"time limit reached at step {step} of {options.steps}", flush=True)
                break
    source.close()
    return {
        "steps": step,
        "tokens": tokens,
        "seconds_waiting_for_data": round(waiting, 1),
        "tail_seconds_per_step": tail_pace(marks, options.log_every),
        "seconds": round(time.perf_counter() - started, 1),
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


def llada_tensors(model: Transformer) -> dict[str, Tensor]:
    """The weights under the names of the published LLaDA checkpoints, fused projections taken apart."""
    heads, kv_heads, size = model.spec.heads, model.spec.kv_heads, model.spec.head_dim
    tensors = {
        "model.transformer.wte.weight": model.embedding.weight,
        "model.transformer.ln_f.weight": model.norm.weight,
    }
    if model.head is not None:
        tensors["model.transformer.ff_out.weight"] = model.head.weight
    for index, block in enumerate(model.blocks):
        at = f"model.transformer.blocks.{index}."
        q, k, v = block.qkv.weight.split((heads * size, kv_heads * size, kv_heads * size))
        gate, up = block.gate_up.weight.chunk(2)
        parts = {
            "attn_norm": block.attn_norm.weight, "q_proj": q, "k_proj": k, "v_proj": v, "attn_out": block.out.weight,
            "ff_norm": block.mlp_norm.weight, "ff_proj": gate, "up_proj": up, "ff_out": block.down.weight,
        }  # fmt: skip
        tensors |= {f"{at}{name}.weight": tensor for name, tensor in parts.items()}
    return tensors


def save(model: Transformer, folder: Path) -> None:
    """An ordinary Hugging Face folder, weights in float16."""
    tensors = {name: tensor.detach().half().cpu().contiguous() for name, tensor in llada_tensors(model).items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(llada_config(model.spec), indent=1) + "\n")


def parse() -> tuple[Path, Path, Options]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="has tokenizer.json; config.json and model.safetensors go there")
    parser.add_argument("--record", type=Path, default=Path("training.json"), help="where the record goes")
    for name, value in asdict(Options()).items():
        kind = argparse.BooleanOptionalAction if isinstance(value, bool) else None
        extra = {"action": kind} if kind else {"type": type(value)}
        parser.add_argument("--" + name.replace("_", "-"), default=value, **extra)
    given = vars(parser.parse_args())
    return given.pop("folder"), given.pop("record"), Options(**given)


def main() -> None:
    folder, record_file, options = parse()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    tokenizer_file = folder / "tokenizer.json"
    model = Transformer(spec_of(options, Tokenizer.from_file(str(tokenizer_file)))).to(options.device)
    initialise(model)
    started = time.perf_counter()
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
