"""Writes a network as a checkpoint that `dinfer.load` reads."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dinfer.core.loading.checkpoint import family_of, read_config, save_network
from dinfer.core.loading.files import CONFIG, GGUF, CheckpointError
from dinfer.core.registry import MODELS, values_of
from dinfer.core.step.model import ModelFamily

SMALL = ("*.json", "*.jinja", "*.txt", "*.model")
INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_config.json"  # of an adapter that has been merged
LOADED = ("checkpoint", "revision", "adapter")  # options of a family that say which weights, and not what they mean


def save_checkpoint(network: Any, family: ModelFamily, source: Path, tokenizer: Any, target: Path) -> None:
    """Writes a network, changed since it was loaded, and the small files beside it, to a new folder.

    `source`: the folder or GGUF file that it was loaded from. Raises CheckpointError; then nothing is left behind.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} is not an empty folder: name a new one")
    config, dtype = read_config(source), str(next(network.parameters()).dtype).removeprefix("torch.")
    config |= {key: dtype for key in ("torch_dtype", "dtype") if key in config}
    if MODELS.build({"name": family_of(config)}).spec(config) != network.spec:
        given = {name: value for name, value in values_of(family).items() if name not in LOADED and value is not None}
        raise CheckpointError(
            f"{source}/{CONFIG} does not say what this model was loaded with, {given}: write it there, and load again"
        )
    with whole(target):
        for path in () if source.suffix == GGUF else {path for end in SMALL for path in source.glob(end)}:
            if path.name not in (INDEX, ADAPTER):
                shutil.copy2(path, target / path.name)
        if source.suffix == GGUF and tokenizer is not None:
            tokenizer.save_pretrained(target)
        save_network(network, family, target, config)


@contextmanager
def whole(target: Path) -> Iterator[None]:
    """Makes a folder. After an error or Ctrl-C it is as it was: absent or empty."""
    before = target.exists()
    target.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for path in target.iterdir():
            path.unlink()
        if not before:
            target.rmdir()
        raise
