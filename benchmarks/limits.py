"""The least time of a step, from the bytes it must read, its operations, and the rates of the card.

Rates are measured: by a copy of 4 GB, and a product of two large matrices. On a CPU, for dry runs, both are small. A
card that multiplies for seconds comes to the limit of its power and slows down. So there is a second rate of the
product, after `WARM` seconds of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from benchmarks.clock import device_ms
from dinfer.core.kernels.types import FLOAT8
from dinfer.core.layers.transformer import Experts
from dinfer.core.memory import KVPool
from dinfer.core.step.contracts import ModelSpec

SIDE = 8192  # of the matrices
WARM = 2.0  # seconds of products, after which a card's clock is what its power allows


def copy_bandwidth(device: torch.device) -> float:
    """Bytes read and written per second by a device-to-device copy of 4 GB."""
    source = torch.empty(2**31 if device.type == "cuda" else 2**24, dtype=torch.bfloat16, device=device).normal_()
    target = torch.empty_like(source)
    return 2e3 * source.nbytes / device_ms(lambda: target.copy_(source), device.type == "cuda")


def product_rate(device: torch.device, dtype: torch.dtype, warm: float = 0.0) -> float:
    """Floating-point operations per second of a product of two large matrices, bfloat16 or float8.

    `warm`: seconds of such products before.
    """
    if device.type != "cuda":
        a, b = (torch.randn(SIDE // 16, SIDE // 16) for _ in range(2))
        return 2e3 * len(a) ** 3 / device_ms(lambda: torch.mm(a, b), False)
    product, end = products(device, dtype), time.perf_counter() + warm
    while time.perf_counter() < end:
        for _ in range(32):
            product()
        torch.cuda.synchronize(device)
    return 2e3 * SIDE**3 / device_ms(product, True)


def products(device: torch.device, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    """A product of two large matrices, bfloat16 or float8."""
    a, b = (torch.randn(SIDE, SIDE, dtype=torch.bfloat16, device=device) for _ in range(2))
    if dtype != FLOAT8:
        return lambda: torch.mm(a, b)
    one = torch.ones((), dtype=torch.float32, device=device)
    narrow_a, narrow_b = a.to(FLOAT8), b.to(FLOAT8)

    def product() -> torch.Tensor:
        return torch._scaled_mm(
            narrow_a, narrow_b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    return product


def weight_bytes(model: Any, experts: float | None) -> float:
    """Bytes of the weights that a step reads: all except unread experts and the embedding.

    `experts`: how many experts of a layer it reads; None: all.
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


def key_bytes(kv: KVPool, rows: float, keys: float) -> float:
    """Bytes of the keys and values that `rows` requests of `keys` positions each read in all layers."""
    _, pages, page = kv.k_JPTGE.shape[:3]
    return rows * keys * (kv.k_JPTGE.nbytes + kv.v_JPTGE.nbytes) / (pages * page)


def operations(model: Any, positions: float, decoded: float, keys: float) -> dict[str, float]:
    """Floating-point operations of a step, two for each multiply-add: of weights, and of attention.

    The step computes `positions`, of which `decoded` need logits, and each attends to `keys`. Of the experts only a
    token's own count.
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


def rates(device: torch.device, quantize: str | None, warm: float = 0.0) -> dict[str, float]:
    """The rates of the card: bytes a second, and operations a second in the weights' format and in bfloat16.

    `warm`: seconds of products before those that count.
    """
    found = {"copy_bytes_per_s": copy_bandwidth(device), "bfloat16_per_s": product_rate(device, torch.bfloat16, warm)}
    narrow = product_rate(device, FLOAT8, warm) if quantize == "fp8" else found["bfloat16_per_s"]
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return found | {"weights_per_s": narrow}


def limits(model: Any, kv: KVPool, *, rows: float, width: int, block: float, keys: float, experts: float | None,
           rates: dict[str, float] | None) -> dict[str, Any]:  # fmt: skip
    """Bytes and operations of a step of `rows` requests, and, with rates of the card, its least time in ms."""
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


def experts_chosen(spec: ModelSpec, positions: float) -> float | None:
    """The mean number of experts of a layer that so many tokens choose together, if each chooses at random."""
    if (experts := spec.experts) is None:
        return None
    return experts.experts * (1 - (1 - experts.chosen / experts.experts) ** positions)


def run_limit(
    model: Any, kv: KVPool, steps: Iterable[dict[str, Any]], *, block: int, prompt: float, new: float,
    rates: dict[str, float],
) -> dict[str, Any]:  # fmt: skip
    """The least time of a run's steps, as they were grouped: of all, of each phase, and of the most frequent step.

    `steps`: the table of a `Clock`. On average half of a block is open, and only that needs the head, as far as it is
    computed. A row sees its whole canvas. In a block-causal model it sees its prompt and, on average, half of the
    answer. In a prefill it sees half of the prompt.
    """
    spec, found = model.spec, []
    for step in steps:
        prefill = step["phase"] == "PREFILL"
        seen = prompt / 2 if prefill else prompt + new / (2 if spec.causal_block else 1)
        each = limits(
            model, kv, rows=step["rows"], width=step["width"], keys=seen,
            block=0 if prefill else min(block / 2, step["width"]),
            experts=experts_chosen(spec, step["rows"] * step["width"]), rates=rates,
        )  # fmt: skip
        found.append((step, each))

    def total(phases: tuple[str, ...]) -> dict[str, float]:
        some = [(step, each) for step, each in found if step["phase"] in phases]
        took = sum(step["total_ms"] for step, _ in some) / 1e3
        positions = sum(step["launches"] * step["rows"] * step["width"] for step, _ in some)
        least = sum(step["launches"] * each["limit_ms"] for step, each in some) / 1e3
        rate = {"positions_per_s": positions / took, "share": least / took} if took else {}
        return {"seconds": took, "limit_s": least, **rate}

    usual, least = max(found, key=lambda one: (one[0]["phase"] == "WINDOW", one[0]["launches"]))
    return {
        "all": total(("PREFILL", "FULL", "WINDOW")), "prefill": total(("PREFILL",)), "full": total(("FULL",)),
        "window": total(("WINDOW",)),
        "usual": {name: usual[name] for name in ("phase", "lanes", "rows", "width", "median_ms")}
        | {name: least[name] for name in ("bytes_ms", "flops_ms", "limit_ms", "keys_gb")},
    }  # fmt: skip
