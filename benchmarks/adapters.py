"""What LoRA adapters cost: a batch of 32 with two adapters and none, and the same batch without, in turns.

    python -m benchmarks.adapters --rank 8 --out benchmarks/results/adapters-cpu.json

Adapters are random, of all linear layers within blocks. Every block takes as many steps, so both batches take the same
forwards. Figures are CPU seconds of one thread.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import dinfer
from benchmarks.clock import lap
from benchmarks.feeds import random_prompts
from benchmarks.provenance import begun, command_line, show

ROWS, NEW, STEPS, PROMPT = 32, 32, 8, 32


def adapter(folder: Path, pipe: Any, rank: int, seed: int) -> str:
    """A random adapter."""
    generator, tensors, modules = torch.Generator().manual_seed(seed), dict[str, torch.Tensor](), list[str]()
    for name, place in pipe.origin[0].weights(pipe.model.spec).items():
        if place.parameter.startswith("blocks.") and len(place.shape) == 2:
            modules.append(name.removesuffix(".weight"))
            for part, shape in (("A", (rank, place.shape[1])), ("B", (place.shape[0], rank))):
                drawn = torch.randn(shape, generator=generator) / shape[1] ** 0.5
                tensors[f"base_model.model.{modules[-1]}.lora_{part}.weight"] = drawn
    folder.mkdir()
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": modules}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return str(folder)


def seconds(pipes: list[Any], prompts: list[list[int]]) -> tuple[float, int]:
    """CPU seconds of the batch, whose rows take these pipelines in turn, and its forwards."""
    rows = [pipes[i % len(pipes)].requests([prompt], NEW, None, stops=False)[0] for i, prompt in enumerate(prompts)]
    updates, took, _ = lap(lambda: [*pipes[0].engine.run(rows)], cpu=True)
    return took, sum(one.completion.counts.forwards for one in updates if one.completion is not None)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    decoder = {"name": "fixed", "steps": STEPS}
    pipe = dinfer.load(given.model, device="cpu", runtime=dinfer.Runtime(rows=ROWS), decoder=decoder)
    prompts = random_prompts(pipe.model.spec, ROWS, PROMPT)
    with tempfile.TemporaryDirectory() as folder:
        names = (("a", 1), ("b", 2))
        own = [dinfer.load_adapter(pipe, n, adapter(Path(folder) / n, pipe, given.rank, seed)) for n, seed in names]
    report = begun(given, torch.device("cpu"))
    pairs = [(seconds([pipe], prompts), seconds([pipe, *own], prompts)) for _ in range(given.rounds + 1)][1:]
    report["forwards"] = sorted({forwards for pair in pairs for _, forwards in pair})
    report["plain_seconds"], report["adapted_seconds"] = ([pair[i][0] for pair in pairs] for i in (0, 1))
    report["ratios"] = [adapted / plain for (plain, _), (adapted, _) in pairs]
    report["median_ratio"] = statistics.median(report["ratios"])
    show(report, given.out)


if __name__ == "__main__":
    main()
