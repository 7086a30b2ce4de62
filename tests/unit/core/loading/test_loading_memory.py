"""Loading takes hardly more memory than the model, or a rank's share of it: measured in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dinfer.core.layers.format import Weight
from dinfer.core.loading.checkpoint import load_network
from dinfer.core.loading.files import locate
from dinfer.core.models.llada import Llada
from dinfer.formats.rounding.int4 import Int4

LARGE = {
    "model_type": "llada", "d_model": 1024, "n_heads": 8, "n_layers": 5, "mlp_hidden_size": 3072, "vocab_size": 2000,
    "mask_token_id": 1999, "eos_token_id": 1998, "max_sequence_length": 256, "rope": True, "rope_theta": 1e4,
    "rms_norm_eps": 1e-5, "layer_norm_type": "rms", "block_type": "llama", "activation_type": "silu",
    "weight_tying": False,
}  # fmt: skip
MEASURE = """
import ctypes
import sys
from pathlib import Path
import torch
from dinfer.core.ranks.split import WHOLE, Rank
from dinfer.formats.kernels import packed
from dinfer.formats.rounding import eight_bits as plain
from dinfer.core.loading.checkpoint import load_network
from dinfer.core.loading.files import locate
from dinfer.core.models.llada import Llada

def memory(what):
    line = next(line for line in open("/proc/self/status") if line.startswith(what))
    return int(line.split()[1]) * 1024

def load(folder, rank=WHOLE, quantize=None):
    return load_network(folder, Llada(), dtype=None, device=torch.device("cpu"), rank=rank, quantize=quantize)

plain.PIECE = packed.PIECE = 1 << 20  # a small part of this model, as it is of a large one
for quantize in ("int4", "int8", None):
    load(locate("tiny"), quantize=quantize)  # what torch imports on first use is not the checkpoint's
for rank, quantize in ((WHOLE, "int4"), (WHOLE, "int8"), (Rank(1, 2), None), (WHOLE, None)):
    before = memory("VmRSS")
    network = load(Path(sys.argv[1]), rank, quantize)
    print(memory("VmHWM") - before, sum(p.nbytes for p in (*network.parameters(), *network.buffers())))
    del network
    ctypes.CDLL(None).malloc_trim(0)  # gives back what is free, or the next would seem to need less
    Path("/proc/self/clear_refs").write_text("5")  # the next peak begins here
"""


@pytest.mark.rest
@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="the peak is read from Linux's /proc")
def test_the_peak_is_hardly_more_than_the_model(tmp_path: Path) -> None:
    family = Llada()
    places, shards = family.weights(family.spec(LARGE)), 3
    where = {name: f"model-{i % shards}.safetensors" for i, name in enumerate(places)}
    for file in set(where.values()):
        save_file({name: torch.ones(places[name].shape) for name in places if where[name] == file}, tmp_path / file)
    (tmp_path / "config.json").write_text(json.dumps(LARGE))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    done = subprocess.run([sys.executable, "-c", MEASURE, tmp_path], capture_output=True, text=True, check=True)
    sizes = [[int(word) for word in line.split()] for line in done.stdout.splitlines()]
    *rounded, (share_peak, share), (peak, model) = sizes
    assert 250e6 < model <= peak and model / 2.1 < share < model / 1.9
    assert peak <= 1.15 * model, f"{peak / model:.2f} x the model"
    weight = 4 * 2 * 3072 * 1024  # the largest: gate and up
    for small_peak, small in rounded:  # pages of the file count too, until the system takes them back: 2 to 4.2 weights
        assert small < model / 3.4 and small_peak <= small + 5 * weight, f"{small_peak:,} for {small:,}"
    assert share_peak <= 1.15 * share, f"{share_peak / share:.2f} x the share of a rank"


def test_weights_are_laid_out_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU wants another layout of 4 bits. All weights in both layouts once took 8.7 GB for 4.9 GB of LLaDA-8B."""
    before, alive = list[weakref.ref[torch.Tensor]](), list[int]()

    def settled(self: Int4, weight: Weight) -> Weight:
        alive.append(sum(one() is not None for one in before))
        before.append(weakref.ref(weight[0]))
        return weight[0].clone(), weight[1]

    monkeypatch.setattr(Int4, "settled", settled)
    load_network(locate("tiny"), Llada(), dtype=None, device=torch.device("cpu"), quantize="int4")
    assert len(alive) > 10
    assert max(alive) <= 1, "the one before may still have a name"
