"""What a model is decoded with by default: the one source for Python, the command line and the server.

`conf/presets.yaml` holds the recipes of families and checkpoints, `conf/catalog.yaml` the published checkpoints.
"""

import re
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from dinfer.core.options import unknown


@dataclass(frozen=True, slots=True)
class Published:
    """A checkpoint on the Hugging Face hub."""

    checkpoint: str  # hub name; of an adapter, its own
    size: str  # parameters, those active for a token behind the dash
    family: str
    preset: str  # the name of the preset with the published decoding
    mask_id: int | None  # None: what is still to be decoded holds uniform noise
    eos_ids: list[int]  # those of its files, and those that the preset adds
    block: int | None = None  # length of its attention blocks; None: bidirectional
    canvas: int | None = None  # length of the canvas; a causal encoder reads what stands before it
    prompt_block: bool = False  # the prompt is an attention block of its own, and the others are counted from its end
    shifted: bool = False  # logits predict the next token

    @property
    def attention(self) -> str:
        """The kind of attention, in words."""
        if self.canvas is not None:
            return f"causal encoder, bidirectional canvas of {self.canvas}"
        return attention(self.block, self.prompt_block)


@dataclass(frozen=True, slots=True)
class Preset:
    """A checkpoint and its recipe."""

    name: str
    model: dict[str, Any]  # the family as `name`, and its options
    recipe: dict[str, str]  # the name of each component, or of a preset of one

    def parts(self) -> dict[str, dict[str, Any]]:
        """The components with their options."""
        return {kind: component(kind, name) for kind, name in self.recipe.items()}


def attention(block: int | None, prompt_block: bool) -> str:
    """The kind of attention, in words. `block`: length of attention blocks; `prompt_block`: the prompt is one."""
    if block is None:
        return "bidirectional"
    return "causal" if block == 1 else f"block-causal, {block}{' behind the prompt' if prompt_block else ''}"


def folder() -> Path:
    """`dinfer/conf` of an installed wheel, else `conf` of the checkout."""
    installed = Path(str(resources.files("dinfer") / "conf"))
    return installed if installed.is_dir() else installed.parents[1] / "conf"


@cache
def catalog() -> tuple[Published, ...]:
    """All published checkpoints, in the order of the file."""
    groups = [(group["sizes"], {key: group[key] for key in group if key != "sizes"}) for group in _read("catalog")]
    return tuple(Published(name, size, **group) for sizes, group in groups for name, size in sizes.items())


@cache
def components() -> dict[str, dict[str, dict[str, Any]]]:
    """Presets of components by kind and name: options, the component's name as `of`."""
    return {kind: _read("presets")[kind] for kind in ("iteration", "decoder", "sampling")}


@cache
def presets() -> dict[str, Preset]:
    """The presets of models by name."""
    found = {}
    for name, given in _read("presets")["model"].items():
        options = {key: value for key, value in given.items() if key not in ("of", "recipe")}
        found[name] = Preset(name, {"name": given["of"], **options}, of_family(given["of"]) | given.get("recipe", {}))
    return found


def component(kind: str, name: str) -> dict[str, Any]:
    """A component and its options, from its name or that of a preset."""
    preset = dict(components().get(kind, {}).get(name, {"of": name}))
    return {"name": preset.pop("of"), **preset}


def of_family(family: str) -> dict[str, str]:
    """The published recipe of a family, or what the file says of others."""
    families = _read("presets")["family"]
    return families["other"] | families.get(family, {})


def preset(name: str) -> Preset:
    """The preset with this name. Raises ValueError."""
    if name not in presets():
        raise unknown("preset", name, sorted(presets()))
    return presets()[name]


def chosen(checkpoint: str, family: str) -> Preset:
    """What a hub name or a folder is loaded and decoded with: as its preset says, or else as its family is published.

    A folder has the preset of the published checkpoint that it is called like.
    """
    names = {re.split("__|--", part)[-1].casefold() for part in Path(checkpoint).parts}  # as the hub's cache has them
    known = {entry.checkpoint: entry.preset for entry in catalog()}
    known |= {each.name: each.name for each in presets().values() if "/" not in each.model["checkpoint"]}
    fitting = (presets()[name] for full, name in known.items() if full.split("/")[-1].casefold() in names)
    found = next((each for each in fitting if each.model["name"] == family), None)
    if found is None:
        return Preset(family, {"name": family, "checkpoint": checkpoint}, of_family(family))
    return Preset(found.name, found.model | {"checkpoint": checkpoint}, found.recipe)


def named(model: str) -> Preset | None:
    """What a model's name says without a look at files: that of a preset, of a published checkpoint or adapter."""
    if model in presets():
        return presets()[model]
    entry = next((entry for entry in catalog() if entry.checkpoint == model), None)
    if entry is None or presets()[entry.preset].model.get("adapter") == model:
        return None if entry is None else presets()[entry.preset]
    return chosen(model, entry.family)


@cache
def _read(name: str) -> Any:
    import yaml  # not needed to import dinfer

    return yaml.safe_load((folder() / f"{name}.yaml").read_text(encoding="utf-8"))
