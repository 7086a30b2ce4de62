"""The memory of a model of 8B in 4 bits, loaded from a file of its real shape with random weights.

    python -m benchmarks.memory --format int4 --device cuda --out benchmarks/results/memory-int4-h200.json
    python -m benchmarks.memory --format Q4_K --device cpu --out benchmarks/results/memory-q4-k-cpu.json
    python -m benchmarks.memory --shape small --format int4 --device cpu        # dry run

`int4`: safetensors of compressed-tensors W4A16, groups of 128. `Q4_K`: a GGUF file. Another process writes the file,
tensor by tensor. This one loads it with `dinfer.load` and answers a prompt, so its peak is that of a user's process.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import save_file

import dinfer
from benchmarks.provenance import provenance, show
from benchmarks.shapes import LLADA_8B
from dinfer.models.llada import Llada

SHAPES = {
    "llada-8b": LLADA_8B,
    "small": LLADA_8B | {
        "d_model": 256, "n_layers": 2, "n_heads": 4, "n_kv_heads": 4, "mlp_hidden_size": 512, "vocab_size": 512,
        "embedding_size": 512, "mask_token_id": 511, "eos_token_id": 510,
    },
}  # fmt: skip
GROUP = 128
W4A16 = {
    "quant_method": "compressed-tensors", "format": "pack-quantized",
    "config_groups": {"all": {"targets": ["Linear"], "weights": {
        "num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True,
    }}},
}  # fmt: skip
KEYS = {
    "context_length": "max_sequence_length", "embedding_length": "d_model", "block_count": "n_layers",
    "feed_forward_length": "mlp_hidden_size", "attention.head_count": "n_heads",
    "attention.head_count_kv": "n_kv_heads", "vocab_size": "vocab_size",
}  # fmt: skip


def write_int4(folder: Path, config: Mapping[str, Any]) -> None:
    """Writes a file for each layer, and an index."""
    folder.mkdir(parents=True, exist_ok=True)
    rng, files, held = np.random.default_rng(0), dict[str, str](), dict[str, dict[str, np.ndarray]]()
    for name, place in Llada().weights(Llada().spec(dict(config))).items():
        found = re.search(r"blocks\.\d+", name)
        part = f"{found[0] if found else name}.safetensors"
        tensors = held.setdefault(part, {})
        if len(place.shape) == 1:
            tensors[name] = np.ones(place.shape, np.float16)
        elif "wte" in name:
            tensors[name] = (rng.standard_normal(place.shape, np.float32) * 0.02).astype(np.float16)
        else:
            (rows, width), base = place.shape, name.removesuffix(".weight")
            tensors[f"{base}.weight_packed"] = rng.integers(-(2**31), 2**31, (rows, width // 8), np.int64).astype(
                np.int32
            )
            tensors[f"{base}.weight_scale"] = np.full((rows, width // GROUP), width**-0.5 / 4.6, np.float16)
            tensors[f"{base}.weight_shape"] = np.array(place.shape, np.int64)
        files |= dict.fromkeys(tensors, part)
        for other in [other for other in held if other != part]:  # complete, since layers come in order
            save_file(held.pop(other), folder / other)
    for part, tensors in held.items():
        save_file(tensors, folder / part)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": W4A16}))


def write_gguf(path: Path, config: Mapping[str, Any]) -> None:
    """Writes all matrices in Q4_K, and norms in float32."""
    rng, writer = np.random.default_rng(0), gguf.GGUFWriter(path, "llada")
    for key, field in KEYS.items():
        writer.add_uint32(f"llada.{key}", config[field])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_causal_attention(False)
    writer.add_mask_token_id(config["mask_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLADA, config["n_layers"])
    shapes = {
        f"{names.get_name(name, try_suffixes=('.weight',))}".removesuffix(".weight") + ".weight": place.shape
        for name, place in Llada().weights(Llada().spec(dict(config))).items()
    }
    block, size = gguf.GGML_QUANT_SIZES[Kind.Q4_K]
    for name, shape in shapes.items():
        nbytes = shape[0] * shape[1] // block * size if len(shape) == 2 else shape[0] * 4
        kind = Kind.Q4_K if len(shape) == 2 else Kind.F32
        packed = gguf.quant_shape_to_byte_shape(shape, kind) if len(shape) == 2 else shape
        dtype = np.dtype(np.uint8 if len(shape) == 2 else np.float32)
        writer.add_tensor_info(name, packed, dtype, nbytes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for shape in shapes.values():
        if len(shape) == 1:
            writer.write_tensor_data(np.ones(shape, np.float32))
            continue
        blocks = rng.integers(0, 256, (shape[0] * shape[1] // block, size), np.uint8)
        scale = shape[1] ** -0.5 / 150
        blocks[:, :4] = np.array([scale, 7.5 * scale], np.float16).view(np.uint8)  # so that values are around 0
        writer.write_tensor_data(blocks.reshape(gguf.quant_shape_to_byte_shape(shape, Kind.Q4_K)))
    writer.close()


def peak() -> float:
    """The peak memory of this process in GB."""
    return int(re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[1]) * 1024 / 1e9  # type: ignore[index]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llada-8b")
    parser.add_argument("--format", choices=("int4", "Q4_K"), required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", help="default: float32 on a CPU, bfloat16 on a GPU")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--write", type=Path, help="only writes the checkpoint there")
    given = parser.parse_args()
    if given.write:
        (write_int4 if given.format == "int4" else write_gguf)(given.write, SHAPES[given.shape])
        return
    with tempfile.TemporaryDirectory() as folder:
        at = Path(folder) / ("model" if given.format == "int4" else "model.gguf")
        subprocess.run([sys.executable, "-m", "benchmarks.memory", *sys.argv[1:], "--write", str(at)], check=True)
        files = [at] if at.is_file() else [*at.iterdir()]
        device, before, began = torch.device(given.device), peak(), time.perf_counter()
        cuda = device.type == "cuda"
        pipe = dinfer.load(
            str(at), device=given.device, dtype=given.dtype or ("bfloat16" if cuda else None), cache="dual",
            decoder={"name": "fixed", "steps": 4}, iteration={"name": "blockwise", "block": 32, "stop": "off"},
            runtime=dinfer.Runtime(rows=1, graphs=cuda),
        )  # fmt: skip
        loaded, load_s, began = peak(), time.perf_counter() - began, time.perf_counter()
        (result,) = pipe.generate_ids([[*range(100, 100 + given.prompt)]], max_new_tokens=given.new)
        found = {
            "shape": given.shape, "format": given.format, "dtype": str(pipe.model.dtype), "file_gb": sum(
                file.stat().st_size for file in files) / 1e9, "before_gb": before, "loaded_gb": loaded,
            "peak_ram_gb": peak(), "load_s": load_s, "generate_s": time.perf_counter() - began,
            "tokens": len(result.canvas) - given.prompt,
            "peak_gpu_gb": torch.cuda.max_memory_allocated() / 1e9 if cuda else None,
            "reserved_gpu_gb": torch.cuda.max_memory_reserved() / 1e9 if cuda else None,
            "used_on_card_gb": (lambda free, total: (total - free) / 1e9)(*torch.cuda.mem_get_info()) if cuda else None,
            "cpu": torch.backends.cpu.get_cpu_capability(), **provenance(device),
        }  # fmt: skip
    show(found, given.out)


if __name__ == "__main__":
    main()
