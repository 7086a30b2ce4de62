"""Kernels are optional: without `dinfer.kernels.triton` and `dinfer.kernels.cpu` dinfer gives the same tokens."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
GONE = ("dinfer.kernels.triton", "dinfer.kernels.cpu")
WORK = """
import json, sys
import torch

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.startswith(GONE):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

if GONE:
    sys.meta_path.insert(0, Blocked())
torch.set_num_threads(1)
import dinfer

pipe = dinfer.load(device="cpu", dtype="float32", **SETTINGS)
results = pipe.generate(QUESTIONS, max_new_tokens=32)
print(json.dumps([[result.ids for result in results], [name for name in sys.modules if name.startswith(MODULES)]]))
"""
QUESTIONS = [
    "Take the number 71, then add 124, subtract 59 and subtract 87. Which number is it?",
    "Eva wants 32 books and 37 cups. One of the books costs 7 coins, one of the cups 9 coins. How many coins is that?",
]
SETTINGS: dict[str, dict[str, Any]] = {
    "tiny": {"model": "tiny", "cache": "dual", "iteration": {"name": "blockwise", "block": 16}},
    "tiny-llada2": {"model": "tiny-llada2", "cache": "block", "iteration": {"name": "block_diffusion"}},
}


def answers(gone: tuple[str, ...], settings: dict[str, Any]) -> tuple[list[list[int]], list[str]]:
    """The tokens of two answers of a new process, and which modules of kernels it has imported."""
    code = f"GONE, MODULES, QUESTIONS, SETTINGS = {gone!r}, {GONE!r}, {QUESTIONS!r}, {settings!r}\n{WORK}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    tokens, modules = json.loads(done.stdout.splitlines()[-1])
    return tokens, modules


@pytest.mark.parametrize("name", SETTINGS)
def test_tiny_models_give_the_same_tokens_without_kernels(name: str) -> None:
    (bare, none), (usual, some) = answers(GONE, SETTINGS[name]), answers((), SETTINGS[name])
    assert bare == usual and all(bare)
    assert not none and some, "the test removes what is otherwise imported"


def test_rounded_weights_need_no_kernels() -> None:
    bare, _ = answers(GONE, SETTINGS["tiny"] | {"quantize": "int4"})
    assert len(bare) == 2 and all(bare)
