"""Our products with weights in 4 bits beside those of libraries, on the matrices of LLaDA-8B.

    python -m benchmarks.peers.int4 --out benchmarks/results/int4-libraries-h200.json

Times of one product in a CUDA graph that goes through several weights, so that none is still in the cache. GemLite
(`pip install gemlite`) tunes itself first, by its own rules; torch's is `_weight_int4pack_mm` ("tinygemm").
`humming-kernels` compiles its kernels first, with NVRTC. Where inputs are rounded, that counts too. A library that is
not there or fails is named with its reason.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.provenance import provenance, save
from dinfer.kernels.linear import linear, round_rows, scaled_linear
from dinfer.kernels.packed import pack, packed_linear, tiled
from dinfer.kernels.types import FLOAT8

MATRICES = {"qkv": (12288, 4096), "out": (4096, 4096), "gate, up": (24576, 4096), "down": (4096, 12288),
            "head": (126464, 4096)}  # fmt: skip
TIMES = {"qkv": 32, "out": 32, "gate, up": 32, "down": 32, "head": 1}
COPIES = 4  # of a weight: 33 MB and more, of a cache of 50
GROUP = 128


def timed(products: list[Callable[[], Any]], rounds: int = 5) -> float:
    """Microseconds of a product: the median of replays of a graph that has each of them three times."""
    for product in products:
        product()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            for product in products:
                product()
    graph.replay()
    found = []
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(1e3 * begin.elapsed_time(end) / (3 * len(products)))
    return statistics.median(found)


def ours(x: Tensor, outputs: int) -> list[Callable[[], Any]]:
    weights = [pack(torch.randn(outputs, x.shape[1], device=x.device, dtype=x.dtype)) for _ in range(COPIES)]
    return [partial(packed_linear, x, tiled(values, scale), scale) for values, scale in weights]


def bfloat16(x: Tensor, outputs: int) -> list[Callable[[], Any]]:
    weights = [torch.randn(outputs, x.shape[1], device=x.device, dtype=x.dtype) for _ in range(COPIES)]
    return [partial(linear, x, w) for w in weights]


def float8(x: Tensor, outputs: int) -> list[Callable[[], Any]]:
    scale = torch.ones(outputs, device=x.device)
    weights = [torch.randn(outputs, x.shape[1], device=x.device).to(FLOAT8) for _ in range(COPIES)]

    def product(weight: Tensor) -> Tensor:
        return scaled_linear(round_rows(x), weight, scale)

    return [partial(product, weight) for weight in weights]


def gemlite(x: Tensor, outputs: int) -> list[Callable[[], Any]]:
    from gemlite import DType, GemLiteLinear

    made = []
    for _ in range(COPIES):
        layer = GemLiteLinear(
            4, group_size=GROUP, in_features=x.shape[1], out_features=outputs, input_dtype=DType.BF16,
            output_dtype=DType.BF16,
        )  # fmt: skip
        values = torch.randint(0, 16, (outputs, x.shape[1]), dtype=torch.uint8, device=x.device)
        scales = torch.rand(outputs, x.shape[1] // GROUP, device=x.device).to(x.dtype)
        layer.pack(values, scales, torch.full_like(scales, 8.0), None)
        made.append(layer)
    return [partial(layer, x) for layer in made]


def tinygemm(x: Tensor, outputs: int) -> list[Callable[[], Any]]:
    values = [
        torch.ops.aten._convert_weight_to_int4pack(
            torch.randint(0, 256, (outputs, x.shape[1] // 2), dtype=torch.uint8, device=x.device), 8
        )
        for _ in range(COPIES)
    ]
    scales = torch.rand(x.shape[1] // GROUP, outputs, 2, device=x.device).to(x.dtype)
    return [partial(torch.ops.aten._weight_int4pack_mm, x, w, GROUP, scales) for w in values]


def humming(x: Tensor, outputs: int, inputs: str = "bfloat16") -> list[Callable[[], Any]]:
    from humming.layer import HummingLayer
    from humming.tune import get_heuristics_config

    made = []
    for _ in range(COPIES):
        layer = HummingLayer(
            shape_n=outputs, shape_k=x.shape[1], weight_config={"dtype": "uint4", "group_size": GROUP},
            input_config={"dtype": inputs}, torch_dtype=x.dtype,
        ).to(x.device)  # fmt: skip
        layer.load_from_unquantized(torch.randn(outputs, x.shape[1], device=x.device, dtype=x.dtype))
        layer.transform()
        made.append(layer)
    config = get_heuristics_config(made[0].humming_config, len(x), gemm_type="dense", device=x.device)
    return [partial(layer, x, tuning_config=config) for layer in made]


SIDES: dict[str, Callable[[Tensor, int], list[Callable[[], Any]]]] = {
    "bfloat16": bfloat16, "fp8": float8, "int4": ours, "torch's int4": tinygemm, "GemLite": gemlite,
    "humming": humming, "humming, int8 inputs": partial(humming, inputs="int8"),
}  # fmt: skip


@torch.no_grad()
def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(args)
    device = torch.device("cuda")
    report: dict[str, Any] = {"rows": given.rows, **provenance(device), "microseconds": {}, "step_ms": {}}
    for side, make in SIDES.items():
        found: dict[str, Any] = {}
        began = time.perf_counter()
        try:
            for matrix, (outputs, width) in MATRICES.items():
                x = torch.randn(given.rows, width, device=device, dtype=torch.bfloat16)
                found[matrix] = round(timed(make(x, outputs)), 2)
            report["step_ms"][side] = round(sum(TIMES[m] * us for m, us in found.items()) / 1e3, 3)
        except Exception as error:  # a library that is missing or broken ends its own row only
            found["failed"] = f"{type(error).__name__}: {error}"[:300]
        report["microseconds"][side] = found | {"seconds": round(time.perf_counter() - began, 1)}
        print(side, report["step_ms"].get(side), found, flush=True)
        save(report, given.out)


if __name__ == "__main__":
    main()
