"""The `dinfer` command as a user has it: from an installed wheel, in a working directory of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from dinfer.loading.checkpoint import random_network, save_network
from dinfer.models.llada import Llada

ROOT = Path(__file__).parents[2]

# Runs command lines in one process, since most of a run is imports; tells what each printed and asked the model.
DRIVER = """
import contextlib, io, json, sys
import dinfer.pipeline
from dinfer.cli.main import main
asked, encode = [], dinfer.pipeline.Pipeline.encode
def recording(self, prompt, **given):
    asked.append(prompt)
    return encode(self, prompt, **given)
dinfer.pipeline.Pipeline.encode = recording
for args in json.loads(sys.stdin.read()):
    out, err, status = io.StringIO(), io.StringIO(), 0
    asked.clear()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(args)
        except SystemExit as end:
            status = end.code
    said = {"status": status, "out": out.getvalue(), "err": err.getvalue(), "asked": list(asked)}
    print(json.dumps(said), flush=True)
"""


@dataclass(frozen=True)
class Said:
    """What a command line came to."""

    status: int
    out: str
    err: str
    asked: tuple[str, ...] = ()


@dataclass(frozen=True)
class CommandLine:
    """An installed dinfer."""

    site: Path
    cwd: Path

    @property
    def program(self) -> list[str]:
        return [sys.executable, str(self.site / "bin" / "dinfer")]

    def environment(self, **more: str) -> dict[str, str]:
        clean = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "DINFER_DEBUG", "HYDRA_FULL_ERROR")}
        return clean | {"PYTHONPATH": str(self.site), "COLUMNS": "80", "OMP_NUM_THREADS": "1"} | more

    def run(self, *args: str, stdin: str = "", **environment: str) -> Said:
        """One command line in a process of its own."""
        done = subprocess.run(
            [*self.program, *args], cwd=self.cwd, env=self.environment(**environment),
            input=stdin, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        return Said(done.returncode, done.stdout, done.stderr)

    def run_all(self, lines: list[list[str]]) -> list[Said]:
        """Many command lines in one process."""
        done = subprocess.run(
            [sys.executable, "-c", DRIVER], cwd=self.cwd, env=self.environment(),
            input=json.dumps(lines), capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        said = [json.loads(line) for line in done.stdout.splitlines()]
        return [Said(s["status"], s["out"], s["err"], tuple(s["asked"])) for s in said]


def install(folder: Path) -> CommandLine:
    """Builds a wheel of the checkout without a network and installs it, alone, into a folder."""
    site, cwd = folder / "site", folder / "elsewhere"
    cwd.mkdir(parents=True)
    quiet: dict[str, Any] = {"check": True, "capture_output": True, "text": True, "timeout": 120}
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)], cwd=ROOT, **quiet)
    wheel = next(folder.glob("*.whl"))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile"]
    subprocess.run([*pip, "--target", str(site), str(wheel)], cwd=cwd, **quiet)
    return CommandLine(site, cwd)


def write_checkpoint(folder: Path) -> Path:
    """A folder like that of a released model: random weights, and a tokenizer in which every byte is a token."""
    specials = ["<eos>", "<mask>", "<user>", "<assistant>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*specials, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    config = {
        "model_type": "llada", "architectures": ["LLaDAModelLM"], "d_model": 32, "n_heads": 2, "n_kv_heads": 2,
        "n_layers": 2, "mlp_hidden_size": 64, "vocab_size": len(vocabulary), "embedding_size": len(vocabulary),
        "mask_token_id": 1, "eos_token_id": 0, "max_sequence_length": 256, "rope": True, "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5, "layer_norm_type": "rms", "block_type": "llama", "activation_type": "silu",
        "weight_tying": False,
    }  # fmt: skip
    family = Llada()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = random_network(family, family.spec(config), dtype=torch.float32, device=torch.device("cpu"))
    save_network(network, family, folder, config)
    tokenizer.save(str(folder / "tokenizer.json"))
    template = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "chat_template": template})
    )
    return folder
