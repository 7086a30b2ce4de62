"""Machines without Triton, a compiler for C, or a card of NVIDIA's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dinfer
from dinfer.core.kernels.dispatch import card, on_hopper
from dinfer.core.kernels.linear import check_float8

PROGRAM = """
import sys
class Forbidden:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise ModuleNotFoundError(f"no module {name}", name=name)
sys.meta_path.insert(0, Forbidden)
import dinfer
from dinfer.core.kernels.dispatch import has_native
assert not has_native()
print(dinfer.load(sys.argv[1], device="cpu").generate_ids([[5, 7, 9]], max_new_tokens=16)[0].ids)
"""


@pytest.mark.rest(but=1)
@pytest.mark.parametrize("model", ["tiny", "tiny-llada2"])
def test_neither_triton_nor_a_compiler_is_needed(model: str, tmp_path: Path) -> None:
    env = os.environ | {"PATH": "", "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path), "DINFER_KERNELS": "triton"}
    done = subprocess.run([sys.executable, "-c", PROGRAM, model], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    here = dinfer.load(model, device="cpu").generate_ids([[5, 7, 9]], max_new_tokens=16)[0].ids
    assert done.stdout == f"{here}\n"


def test_an_amd_card_runs_the_references(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch calls it cuda, too, and gives it a capability that says something else."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4))
    assert card(torch.device("cuda")) is None
    assert not on_hopper(torch.ones(1))
    with pytest.raises(ValueError, match=r"kv=fp8 needs a GPU of compute capability 8\.9"):
        check_float8(torch.device("cuda"), "kv=fp8", "kv=model")


def test_metal_is_refused_with_its_reason() -> None:
    with pytest.raises(ValueError, match=r"device='mps' cannot be used \(steps need float64, which Metal lacks\)"):
        dinfer.load("tiny", device="mps")
