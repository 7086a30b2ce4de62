"""From a composed configuration to a pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any, get_type_hints

from dinfer.cli.conf import GROUPS
from dinfer.demo.problems import Problem, generate
from dinfer.loading.files import SMALL, CheckpointError, local, locate
from dinfer.recipe.registry import typed, unknown

if TYPE_CHECKING:
    from dinfer.engine.runtime import Runtime
    from dinfer.loading.inspect import Inspection
    from dinfer.pipeline import Pipeline


def pipeline(config: dict[str, Any]) -> Pipeline:
    """Loads the model with the recipe of the configuration."""
    import torch

    from dinfer.pipeline import load

    parts = {kind: config[kind] for kind in GROUPS}
    device = setting(config, "device", str | None) or ("cuda" if torch.cuda.is_available() else "cpu")
    # Before the weights are read, so that a slip in a decoder's option is known at once.
    for kind, registry in GROUPS.items():
        registry.build(parts[kind])
    return load(
        parts.pop("model"),
        **parts,
        device=device,
        dtype=setting(config, "dtype", str | None),
        quantize=setting(config, "quantize", str | None),
        runtime=runtime_of(config, device),
    )


def runtime_of(config: dict[str, Any], device: str) -> Runtime:
    """The settings below `runtime`, for that device. Raises ValueError."""
    from dinfer.engine.runtime import Runtime

    unset = isinstance(config["runtime"], dict) and config["runtime"].get("graphs") is None
    graphs = {"graphs": device.startswith("cuda")} if unset else {}
    return group(config, "runtime", Runtime, **graphs)


def beside(base: Pipeline, parts: dict[str, Any], rows: int | None = None) -> Pipeline:
    """Another recipe around the same network. `rows`: requests in flight; None: as many as there."""
    from dinfer.pipeline import Pipeline
    from dinfer.recipe.recipe import compose

    names = {kind: parts[kind] for kind in GROUPS if kind != "model"}
    runtime = base.engine.runtime if rows is None else replace(base.engine.runtime, rows=rows)
    return Pipeline(compose(base.model, **names), base.tokenizer, runtime)


def ranks_of(config: dict[str, Any]) -> int:
    """The number of processes that run one model together. `Runtime` checks it."""
    runtime = config["runtime"]
    found = runtime.get("tensor_parallel") if isinstance(runtime, dict) else None
    return found if type(found) is int else 1


def located(config: dict[str, Any]) -> None:
    """Finds the description of the model's checkpoint. Raises CheckpointError if it cannot be had."""
    _, options = GROUPS["model"].check(config["model"])
    if checkpoint := options.get("checkpoint"):
        locate(checkpoint, options.get("revision"), wanted=SMALL)


def check_ahead(config: dict[str, Any], others: Mapping[str, dict[str, Any]] = MappingProxyType({})) -> None:
    """Raises ValueError for a checkpoint, recipe or runtime that cannot be loaded, and reads no weights.

    For models that processes of Ray will load: they can only fail with pages of tracebacks. `others`: further recipes.
    """
    from dinfer.recipe.recipe import compose

    runtime_of(config, setting(config, "device", str | None) or "cpu")
    dtype, quantize = setting(config, "dtype", str | None), setting(config, "quantize", str | None)
    described = SimpleNamespace(spec=inspected(config["model"], dtype, quantize).spec)
    for name, parts in {"": config, **others}.items():
        with of_recipe(name):
            compose(described, **{kind: parts[kind] for kind in GROUPS if kind != "model"})


def inspected(model: dict[str, Any], dtype: str | None, quantize: str | None) -> Inspection:
    """What is known of a model. Raises ValueError if `load` would, as far as the small files and headers tell.

    A folder must hold its weights; those of a hub name may still be downloaded.
    """
    from dinfer.layers.linear import taken
    from dinfer.loading.inspect import inspect
    from dinfer.loading.safetensors_io import stored
    from dinfer.pipeline.pipeline import dtype_of

    taken(quantize)
    if dtype is not None:
        dtype_of(dtype)
    name, options = GROUPS["model"].check(model)
    family = GROUPS["model"].build(model)
    folder = locate(family.checkpoint, family.revision, wanted=SMALL)
    found = inspect(folder, {"name": name, **options})
    if found.problems:
        raise CheckpointError(found.problems[0])
    if local(family.checkpoint).is_dir():
        stored(folder)
    return found


@contextmanager
def of_recipe(name: str) -> Iterator[None]:
    """Names one of the further recipes in what is wrong with it. The command's own has the name ""."""
    try:
        yield
    except ValueError as error:
        if not name:
            raise
        raise ValueError(f"recipes: {name}: {error}") from error


def setting(config: dict[str, Any], name: str, hint: Any) -> Any:
    """A setting, ValueError if it is not of the type that is wanted."""
    return typed({name: hint}, {name: config[name]})[name]


def counted(config: dict[str, Any], name: str) -> int:
    """A setting that counts something; ValueError if it is below 1."""
    if (count := setting(config, name, int)) < 1:
        raise ValueError(f"{name}={count} must be at least 1")
    return count


def problems_of(config: dict[str, Any], count: int) -> list[Problem]:
    """The first `count` held-out problems that the settings `seed` and `families` choose. Raises ValueError."""
    families = setting(config, "families", tuple[str, ...] | None)
    return generate("heldout", count, setting(config, "seed", int), families)


def need(module: str, extra: str, what: str) -> None:
    """Raises ValueError if a library that `what` needs is not installed, and names the extra that has it."""
    if find_spec(module) is None:
        raise ValueError(f"{what}: pip install 'dinfer[{extra}]'")


def text_of(config: dict[str, Any], name: str, given: str | None) -> str | None:
    """The text on the command line, or else that of the setting `name`; ValueError for both, and for an empty one."""
    value = config[name]
    if given is not None and value is not None:
        raise ValueError(f"the {name} is given twice, as an argument and as {name}=")
    if isinstance(value, (dict, list)):
        raise ValueError(f"{name}={value!r} must be a text: give it as an argument of its own")
    text = value if given is None else given
    if text is not None and not str(text).strip():
        raise ValueError(f"the {name} is empty")
    return None if text is None else str(text)


def held_of(config: dict[str, Any]) -> dict[str, Any]:
    """What answers are held to, as `Pipeline.generate` takes it. Raises ValueError for a file that cannot be read."""
    choice = setting(config, "choice", tuple[str, ...] | None)
    held: dict[str, Any] = {"regex": setting(config, "regex", str | None), "choice": choice}
    for name in ("schema", "grammar"):
        if (path := setting(config, name, str | None)) is not None:
            try:
                held[name] = Path(path).read_text("utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ValueError(f"{name}={path} is not a file of text: {error}") from error
    held["posterior"] = setting(config, "posterior", bool) or None
    return {name: value for name, value in held.items() if value is not None}


def group(config: dict[str, Any], name: str, kind: type, **more: Any) -> Any:
    """The settings below `name` as a dataclass, with `more` in it. ValueError for an unknown one, or a wrong type."""
    values, hints = config[name], get_type_hints(kind)
    if not isinstance(values, dict):
        raise ValueError(f"{name}={values!r} must be settings, such as {name}.{next(iter(hints))}=...")
    for key in values:
        if key not in hints:
            raise unknown(f"setting of {name}:", key, list(hints))
    return kind(**typed(hints, values | more, prefix=f"{name}."))
