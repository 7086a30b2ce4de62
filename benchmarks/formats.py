"""How published formats of weights change the answers of the models in the box, on a CPU.

    python -m benchmarks.formats --gguf FOLDER --out benchmarks/results/formats-cpu

It runs `tiny` as GGUF, in the types that the gguf package writes and as every *.gguf in FOLDER (`llama-quantize` makes
K-quants from the file of `tools.convert tiny F16.gguf`). It runs both models as compressed-tensors W8A16 and W4A16,
symmetric like GPTQ and with zeros like AWQ, rounded to nearest. Problems, settings and columns are those of
`benchmarks.quantized`, with the model's best cache and `rows` requests at once. `same` compares with the unrounded
model. It writes OUT.json and OUT.csv after every row.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import dinfer
from benchmarks.provenance import provenance
from benchmarks.quality import with_problems, write
from benchmarks.quantized import RECIPES, row_of
from dinfer.demo.problems import generate
from dinfer.loading.hub import locate
from tools.to_gguf import write_gguf

TYPES = ("Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")
SCHEMES = {"W8A16": (8, -1, True), "W4A16": (4, 128, True), "W4A16 with zeros": (4, 128, False)}
WHOLE = ("wte", "word_embeddings", ".gate.weight")  # embeddings and routers


def words(values: Tensor, bits: int) -> Tensor:
    """Packs integers from 0 on into int32, lowest bits first. [..., N] -> [..., N * bits / 32]"""
    grouped = values.to(torch.int64).unflatten(-1, (-1, 32 // bits))
    whole = (grouped << torch.arange(0, 32, bits)).sum(-1)
    return torch.where(whole < 1 << 31, whole, whole - (1 << 32)).to(torch.int32)


def packed(weight: Tensor, bits: int, group: int, symmetric: bool) -> dict[str, Tensor]:
    """A weight [O, K] in compressed-tensors' "pack-quantized", rounded to nearest."""
    width, most = weight.shape[1], (1 << bits) - 1
    group = width if group < 0 else min(group, width & -width)
    wide = weight.float().unflatten(-1, (-1, group))
    if symmetric:
        scale, zero = wide.abs().amax(-1) / (most / 2), torch.full(wide.shape[:2], (most + 1) / 2)
    else:
        low, high = wide.amin(-1).clamp_max(0), wide.amax(-1).clamp_min(0)
        scale = (high - low) / most
        zero = (-low / scale).round()
    scale = scale.clamp_min(1e-8).to(torch.float16)
    values = (wide / scale.float()[..., None] + zero[..., None]).round().clamp(0, most).flatten(1)
    found = {"packed": words(values, bits), "scale": scale, "shape": torch.tensor(weight.shape)}
    return found if symmetric else found | {"zero_point": words(zero.T, bits).T.contiguous()}


def write_packed(source: Path, target: Path, bits: int, group: int, symmetric: bool) -> None:
    """Writes the checkpoint with packed weights, except those whose width is no multiple of the group."""
    shutil.copytree(source, target)
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if tensor.dim() != 2 or any(one in name for one in WHOLE) or tensor.shape[1] % max(group, 1):
            tensors[name] = tensor
        else:
            tensors |= {f"{name}_{end}": one for end, one in packed(tensor, bits, group, symmetric).items()}
    save_file(tensors, target / "model.safetensors")
    strategy = {"strategy": "channel"} if group < 0 else {"strategy": "group", "group_size": group}
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, **strategy}
    scheme = {"all": {"targets": ["Linear"], "weights": weights}}
    how = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": scheme}
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": how}))


def files(model: str, folder: Path, more: Path | None) -> Iterator[tuple[str, Path]]:
    """The names of formats, and the path of the model in each."""
    source = locate(model)
    for name, (bits, group, symmetric) in SCHEMES.items():
        path = folder / f"{model}-{bits}-{symmetric}"
        write_packed(source, path, bits, group, symmetric)
        yield f"compressed-tensors {name}", path
    if model == "tiny":
        for kind in TYPES:
            write_gguf(source, folder / f"{kind}.gguf", kind)
            yield f"GGUF {kind}", folder / f"{kind}.gguf"
        for path in sorted(more.glob("*.gguf")) if more else ():
            yield f"GGUF {path.stem}", path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path, help="folder of more GGUF files of `tiny`")
    parser.add_argument("--models", nargs="+", choices=RECIPES, default=[*RECIPES])
    parser.add_argument("--only", default="", help="regular expression that a format's name must match")
    given = with_problems(parser).parse_args()
    setting = {name: str(value) if isinstance(value, Path) else value for name, value in vars(given).items()}
    problems = generate("heldout", given.count, given.seed)
    rows: list[dict[str, Any]] = []
    for model in given.models:
        iteration, caches = RECIPES[model]
        tokenizer, as_is = dinfer.load(model, device="cpu").tokenizer, list[Any]()
        with tempfile.TemporaryDirectory() as folder:
            settings: list[tuple[str, str, str | None]] = [("as it is", model, None)]
            settings += [(f"quantize={name}", model, name) for name in ("int8", "int4")]
            settings += [(name, str(path), None) for name, path in files(model, Path(folder), given.gguf)]
            chosen = [one for one in settings[1:] if re.search(given.only, one[0])]
            for name, path, quantize in [settings[0], *chosen]:
                loaded = dinfer.load(
                    path, iteration={"name": iteration} | ({"block": 32} if model == "tiny" else {}),
                    decoder={"name": "threshold", "threshold": 0.9}, cache=caches[-1], quantize=quantize,
                    device=given.device, dtype="float32", runtime=dinfer.Runtime(rows=given.rows),
                )  # fmt: skip
                pipe = dinfer.Pipeline(loaded.recipe, tokenizer, loaded.engine.runtime)
                began = time.perf_counter()
                results = list(pipe.generate([one.question for one in problems], max_new_tokens=given.new))
                as_is = as_is or results
                figures = row_of(problems, results, as_is, time.perf_counter() - began)
                rows.append({"model": model, "cache": caches[-1], "format": name} | figures)
                print(rows[-1], flush=True)
                if given.out:
                    cpu = {"cpu": torch.backends.cpu.get_cpu_capability()}
                    write(given.out, rows, {"setting": setting} | cpu | provenance(torch.device(given.device)))


if __name__ == "__main__":
    main()
