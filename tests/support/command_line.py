"""The `dinfer` command: in this process, which is fast, or as a user has it, from an installed wheel."""

from __future__ import annotations

import io
import json
import logging
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from dinfer.__main__ import main
from dinfer.core.models.llada import Llada
from dinfer.formats.saving import save_network
from dinfer.lab.random_network import random_network

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Said:
    """What a command line came to."""

    status: int
    out: str
    err: str


class CommandLine:
    """The command line in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(self, *args: str, stdin: str = "", **environment: str) -> Said:
        with self._monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", io.StringIO(stdin))
            for name, value in {"COLUMNS": "80", "DINFER_DEBUG": "0", **environment}.items():
                patch.setenv(name, value)
            self._capsys.readouterr()
            status = 0
            with loggers_kept():
                try:
                    main(list(args))
                except SystemExit as end:
                    status = int(end.code or 0)
            return Said(status, *self._capsys.readouterr())


@contextmanager
def loggers_kept() -> Iterator[None]:
    """Takes back what a command does to loggers: a server's write to stderr alone, Hydra's --info to this stdout."""
    loggers = [logging.getLogger(name) for name in (None, "dinfer", "dinfer.serving", "uvicorn")]
    before = [(logger, [*logger.handlers], logger.level, logger.propagate) for logger in loggers]
    try:
        yield
    finally:
        for logger, handlers, level, propagate in before:
            logger.handlers[:], logger.propagate = handlers, propagate
            logger.setLevel(level)


@dataclass(frozen=True)
class Installed:
    """A dinfer that a wheel was installed from, in a working directory of its own."""

    site: Path
    cwd: Path

    @property
    def program(self) -> Path:
        return self.site / "bin" / "dinfer"

    def _started(self, args: Sequence[str], environment: Mapping[str, str], **streams: Any) -> subprocess.Popen[str]:
        clean = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "DINFER_DEBUG", "HYDRA_FULL_ERROR")}
        own = {"PYTHONPATH": str(self.site), "COLUMNS": "80", "LINES": "40", "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            [sys.executable, *args], cwd=self.cwd, env=clean | own | environment,
            start_new_session=True, text=True, **streams,
            # A shell starts background jobs, such as this test run may be, deaf to Ctrl-C.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )  # fmt: skip

    def __call__(self, *args: str, **environment: str) -> Said:
        return self.python(str(self.program), *args, **environment)

    def python(self, *args: str, **environment: str) -> Said:
        process = self._started(args, environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        out, err = process.communicate(timeout=240)
        return Said(process.returncode, out, err)

    def in_terminal(self, *args: str, interrupt_after: str) -> Said:
        """In a terminal, with Ctrl-C once it has printed `interrupt_after`; `out` holds all."""
        parent, child = pty.openpty()
        process = self._started(
            [str(self.program), *args], {"TERM": "xterm-256color"}, stdin=child, stdout=child, stderr=child
        )
        os.close(child)
        seen = b""
        try:
            while chunk := os.read(parent, 4096):
                seen += chunk
                if interrupt_after and interrupt_after.encode() in seen:
                    process.send_signal(signal.SIGINT)
                    interrupt_after = ""
        except OSError:  # how Linux says that the other end is closed
            pass
        os.close(parent)
        return Said(process.wait(timeout=240), seen.decode(errors="replace"), "")


def install(folder: Path) -> Installed:
    """Builds a wheel of the checkout without a network and installs it, alone, into a folder."""
    site, cwd = folder / "site", folder / "elsewhere"
    cwd.mkdir(parents=True)
    quiet: dict[str, Any] = {"check": True, "capture_output": True, "text": True, "timeout": 240}
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)], cwd=ROOT, **quiet)
    wheel = next(folder.glob("*.whl"))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile"]
    subprocess.run([*pip, "--target", str(site), str(wheel)], cwd=cwd, **quiet)
    return Installed(site, cwd)


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
