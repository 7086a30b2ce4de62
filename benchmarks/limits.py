"""What a step has to read and to multiply, and the rates of the card: the least time it can take.

Rates are measured: a copy of 4 GB, and a product of two large matrices.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dinfer.core.kv import KVPool
from dinfer.kernels.types import FLOAT8
from dinfer.layers.mlp import Experts

SIDE = 8192  # of the matrices


def copy_bandwidth(device: torch.device) -> float:
    """Bytes read and written per second by a device-to-device copy of 4 GB."""
    source = torch.empty(2**31, dtype=torch.bfloat16, device=device).normal_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_seconds(lambda: target.copy_(source))


def product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations per second of a product of two large matrices, bfloat16 or float8."""
    a, b = (torch.randn(SIDE, SIDE, dtype=torch.bfloat16, device=device) for _ in range(2))
    if dtype != FLOAT8:
        return 2 * SIDE**3 / median_seconds(lambda: torch.mm(a, b))
    one = torch.ones((), dtype=torch.float32, device=device)
    narrow_a, narrow_b = a.to(FLOAT8), b.to(FLOAT8)

    def product() -> torch.Tensor:
        return torch._scaled_mm(
            narrow_a, narrow_b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    return 2 * SIDE**3 / median_seconds(product)


def median_seconds(work: Callable[[], Any], times: int = 10) -> float:
    """GPU time of a piece of work, once it is warm."""
    found = []
    for _ in range(times + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(found[2:])


def weight_bytes(model: Any, experts: float | None) -> float:
    """Bytes of the weights that one step reads: all but unread experts, and the embedding but for a few rows.

    `experts`: how many of a layer's are read.
    """
    spec = model.spec
    share = 1.0 if spec.experts is None or experts is None else experts / spec.experts.experts
    total = 0.0
    for name, module in model.named_modules():
        if name == "embedding" and not spec.tied_head:
            continue
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        total += sum(tensor.nbytes for tensor in own) * (share if isinstance(module, Experts) else 1.0)
    return total


def key_bytes(kv: KVPool, rows: int, keys: float) -> float:
    """Bytes of the keys and values that `rows` requests of `keys` positions each read in all layers."""
    _, pages, page = kv.k_JPTGE.shape[:3]
    return rows * keys * (kv.k_JPTGE.nbytes + kv.v_JPTGE.nbytes) / (pages * page)


def operations(model: Any, positions: int, decoded: int, keys: float) -> dict[str, float]:
    """Floating-point operations of a step, two for each multiply-add: of weights, of attention.

    `positions`: that the step computes; `decoded`: those of them that need logits; `keys`: that each attends to. Of the
    experts, those that a token goes to count.
    """
    spec = model.spec
    weights = spec.hidden * spec.vocab * decoded if spec.tied_head else 0
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            weights += module.in_features * module.out_features * (decoded if name == "head" else positions)
        elif isinstance(module, Experts):
            weights += 3 * spec.hidden * module.experts.width * module.experts.chosen * positions
    attention = 2 * spec.layers * spec.heads * spec.head_dim * positions * keys
    return {"weights": 2.0 * weights, "attention": 2.0 * attention}


def rates(device: torch.device, quantize: str | None) -> dict[str, float]:
    """Of the card: bytes per second, operations per second with weights as they are kept, and in bfloat16."""
    found = {"copy_bytes_per_s": copy_bandwidth(device), "bfloat16_per_s": product_rate(device, torch.bfloat16)}
    narrow = product_rate(device, FLOAT8) if quantize == "fp8" else found["bfloat16_per_s"]
    torch.cuda.empty_cache()
    return found | {"weights_per_s": narrow}


def limits(model: Any, kv: KVPool, *, rows: int, width: int, block: int, keys: float, experts: float | None,
           rates: dict[str, float] | None) -> dict[str, Any]:  # fmt: skip
    """Bytes and operations of a step of `rows` requests, and with rates of the card the least it can take, in ms."""
    weights, cached = weight_bytes(model, experts), key_bytes(kv, rows, keys)
    work = operations(model, rows * width, rows * block, keys)
    found: dict[str, Any] = {
        "weights_gb": weights / 1e9, "keys_gb": cached / 1e9, "keys": keys,
        "weights_gflop": work["weights"] / 1e9, "attention_gflop": work["attention"] / 1e9,
    }  # fmt: skip
    if rates is None:
        return found
    found["bytes_ms"] = 1e3 * (weights + cached) / rates["copy_bytes_per_s"]
    found["flops_ms"] = 1e3 * (work["weights"] / rates["weights_per_s"] + work["attention"] / rates["bfloat16_per_s"])
    return found | rates | {"limit_ms": max(found["bytes_ms"], found["flops_ms"])}
