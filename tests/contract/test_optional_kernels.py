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

found = {}
for name, settings in SETTINGS.items():
    pipe = dinfer.load(device="cpu", dtype="float32", **settings)
    found.setdefault("algebra", "sympy" in sys.modules)
    found[name] = [result.ids for result in pipe.generate(QUESTIONS, max_new_tokens=32)]
found["modules"] = [name for name in sys.modules if name.startswith(MODULES)]
print(json.dumps(found))
"""
QUESTIONS = [
    "Take the number 71, then add 124, subtract 59 and subtract 87. Which number is it?",
    "Eva wants 32 books and 37 cups. One of the books costs 7 coins, one of the cups 9 coins. How many coins is that?",
]
TINY: dict[str, Any] = {"model": "tiny", "cache": "dual", "iteration": {"name": "blockwise", "block": 16}}
SETTINGS: dict[str, dict[str, Any]] = {
    "tiny": TINY,
    "tiny-llada2": {"model": "tiny-llada2", "cache": "block", "iteration": {"name": "block_diffusion"}},
}
ROUNDED = {"rounded": TINY | {"quantize": "int4"}}  # the kernels round in another order


def answers(gone: tuple[str, ...], settings: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The tokens of two answers by name of the settings, all of one new process, and which modules that imports."""
    code = f"GONE, MODULES, QUESTIONS, SETTINGS = {gone!r}, {GONE!r}, {QUESTIONS!r}, {settings!r}\n{WORK}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def bare() -> dict[str, Any]:
    return answers(GONE, SETTINGS | ROUNDED)


@pytest.fixture(scope="module")
def usual() -> dict[str, Any]:
    return answers((), SETTINGS)


@pytest.mark.parametrize("name", SETTINGS)
def test_tiny_models_give_the_same_tokens_without_kernels(
    name: str, bare: dict[str, Any], usual: dict[str, Any]
) -> None:
    assert bare[name] == usual[name] and all(bare[name])
    assert not bare["modules"] and usual["modules"], "the test removes what is otherwise imported"


def test_rounded_weights_need_no_kernels(bare: dict[str, Any]) -> None:
    assert len(bare["rounded"]) == 2 and all(bare["rounded"])


def test_loading_a_model_imports_no_computer_algebra(usual: dict[str, Any]) -> None:
    """Torch does so when it is asked for a tensor like one without memory, and then every command starts later."""
    assert not usual["algebra"]
