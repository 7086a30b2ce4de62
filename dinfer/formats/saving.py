"""Writes a network as a checkpoint that `dinfer.load` reads."""

import json
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

from dinfer.core.loading.checkpoint import family_of, place_of, read_config
from dinfer.core.loading.files import CONFIG, GGUF, CheckpointError
from dinfer.core.loading.safetensors_io import read, stored
from dinfer.core.models.family import ModelFamily
from dinfer.core.registry import MODELS, values_of
from dinfer.core.terms.spec import ExpertLayout

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
    headers = {} if source.suffix == GGUF else stored(source)
    beside = {name: one for name, one in headers.items() if name.startswith(tuple(family.unused))}  # such as a tower
    with whole(target):
        for path in () if source.suffix == GGUF else {path for end in SMALL for path in source.glob(end)}:
            if path.name not in (INDEX, ADAPTER):
                shutil.copy2(path, target / path.name)
        if source.suffix == GGUF and tokenizer is not None:
            tokenizer.save_pretrained(target)
        save_network(network, family, target, config, beside=dict(read(beside)))


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


def save_network(
    network: Any, family: ModelFamily, folder: Path, config: dict[str, Any], experts: ExpertLayout = "separate",
    *, beside: Mapping[str, Tensor] = MappingProxyType({}),
) -> None:  # fmt: skip
    """Writes config.json and model.safetensors with the tensor names of the family. Overwrites both.

    `beside`: further tensors of the file. Raises CheckpointError for a network that a checkpoint of this family cannot
    hold.
    """
    weights = family.weights(family.spec(config), experts)
    held = held_by(network, {place.parameter for place in weights.values()})
    tensors = {name: place_of(held, place).cpu().contiguous() for name, place in weights.items()}
    tensors |= beside
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    # safetensors lets nobody else read the file, whatever the umask is.
    (folder / "model.safetensors").chmod((folder / CONFIG).stat().st_mode)


def held_by(network: nn.Module, names: Collection[str]) -> dict[str, Tensor]:
    """The weights of a network by name, those of parametrized layers too. Raises CheckpointError for any others."""
    layers = {name.rpartition(".")[0] for name in names}
    for name, _ in network.named_parameters():
        parametrized = name.partition(".parametrizations.")  # of such a layer, the weight as it comes out
        if name not in names and not (parametrized[1] and parametrized[0] in layers):
            raise CheckpointError(
                f"the network has {name}, which no checkpoint of its family has: merge what was added into the weights "
                "first (with peft, model.merge_and_unload())"
            )
    from dinfer.core.layers.linear import formatted  # only here: networks are heavy to import

    for name, (module, own) in formatted(network, embeddings=True).items():
        if module.formats[own].beside or not module.weight_of(own)[0].is_floating_point():
            raise CheckpointError(f"{name} is in few bits: load without quantize, from weights in floats, to save them")
    return {name: attrgetter(name)(network) for name in names}  # by name: a parametrized weight is no parameter
