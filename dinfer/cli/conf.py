"""Composes configurations of the folder `conf` and of overrides with Hydra, and makes pipelines of them.

Explains Hydra's errors.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any, get_type_hints

import hydra
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, InterpolationResolutionError

import dinfer.core.recipe.presets as presets
from dinfer.core.loading.files import GGUF, SMALL, CheckpointError, local, locate
from dinfer.core.provided import needed
from dinfer.core.recipe.presets import folder
from dinfer.core.registry import REGISTRIES, Registry, UnknownName, typed, unknown

if TYPE_CHECKING:
    from dinfer.core.engine.runtime import Runtime
    from dinfer.core.pipeline import Pipeline
    from dinfer.core.recipe.recipe import Recipe
    from dinfer.demo.problems import Problem
    from dinfer.lab.inspect import Inspection

HINTS = {
    "model": " A folder, a GGUF file or a hub name such as 'GSAI-ML/LLaDA-8B-Instruct' is good too.",
    "hydra/launcher": " Launchers of clusters need an extra: pip install 'dinfer[cluster]'.",
}
GROUPS: dict[str, Registry] = {registry.kind: registry for registry in REGISTRIES}
PRIMARY = "config"  # what every command's configuration includes
RECIPE = "recipe"  # the group of presets that choose several components at once
VERSION = "1.3"  # of Hydra, whose defaults hold
OPTIONS = "{}_options"  # the choice of a family without its recipe, which presets begin with


def parse(text: str) -> Override:
    """An override as Hydra understands it. Raises ValueError."""
    try:
        return OverridesParser.create().parse_override(text)
    except HydraException as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"{text!r} is not a valid override ({reason}); quote special characters: \"name='value'\""
        ) from error


def check_once(given: Iterable[tuple[str, str]]) -> None:
    """Raises ValueError for a setting that is given twice: one would win in silence. Names, and what was typed."""
    first = dict[str, str]()
    for name, text in given:
        if name in first:
            raise ValueError(f"{first[name]} and {text} both set {name}: leave one out")
        first[name] = text


def leaves_of(override: Override) -> list[str]:
    """The settings that an override sets: of `runtime={rows: 2}` those within it."""
    name, value = override.key_or_group, None if override.is_sweep_override() else override.value()
    return [f"{name}.{leaf}" for leaf in dotted(value)] if isinstance(value, dict) else [name]


@contextmanager
def explained() -> Iterator[None]:
    """Raises a ValueError where Hydra does not know a name or a choice."""
    try:
        yield
    except MissingConfigException as error:
        file = error.missing_cfg_file or ""
        group, _, name = file.rpartition("/") if file.startswith("hydra/") else file.partition("/")
        if not name or error.options is None:
            raise
        hint = HINTS.get(group, "").format(name=name)
        raise UnknownName(f"{unknown(group, name, sorted(error.options))}{hint}") from error
    except ConfigCompositionException as error:
        cause = error.__cause__
        if not isinstance(cause, (ConfigAttributeError, ConfigKeyError)):
            raise
        raise unknown_setting(str(cause.full_key), cause.parent_node) from error


def components(config: DictConfig) -> dict[str, dict[str, Any]]:
    """The components of a configuration. Raises ValueError for an option that is unknown or not of its type."""
    found = dict[str, dict[str, Any]]()
    for registry in REGISTRIES:
        part = config.get(registry.kind)
        if not isinstance(part, DictConfig):
            raise ValueError(f"the configuration has no {registry.kind}: choose one with {registry.kind}=NAME")
        found[registry.kind] = registry.check(tree_of(part, resolve=True))
    return found


def tree_of(config: DictConfig, *, resolve: bool) -> dict[str, Any]:
    """A node and all below it, as plain dicts and lists."""
    try:
        tree = OmegaConf.to_container(config, resolve=resolve, throw_on_missing=resolve)
    except InterpolationResolutionError as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"{error.full_key}: {reason}. ${{...}} stands for another setting; write \\${{...}} for a text"
        ) from error
    assert isinstance(tree, dict)
    return {str(key): value for key, value in tree.items()}


USUAL = {
    "gen_length": "max_new_tokens", "max_gen_toks": "max_new_tokens", "max_length": "max_new_tokens",
    "block_length": "iteration.block", "block_size": "iteration.block", "cfg_scale": "sampling.guidance",
    "cfg": "sampling.guidance", "remasking": "decoder", "alg": "decoder", "batch_size": "runtime.rows",
}  # fmt: skip
"""What LLaDA's, Dream's and Fast-dLLM's scripts and lm-eval call some settings."""


def unknown_setting(key: str, parent: Any) -> UnknownName:
    """The error for a key that the node of the configuration above it does not have."""
    prefix, _, name = key.rpartition(".")
    tree = tree_of(parent, resolve=False) if isinstance(parent, DictConfig) else {}
    if not prefix:
        known = sorted(dotted(tree))
        if meant := [each for each in known if each in (USUAL.get(name), *(f"{part}.{name}" for part in tree))]:
            hint = " or ".join(map(repr, meant))
            return UnknownName(f"unknown setting {name!r}. Did you mean {hint}? Known: {', '.join(known)}.")
        return unknown("setting", name, known)
    known = [sibling for sibling in tree if sibling != "name"]
    if "name" in tree:
        return unknown(f"option of {prefix} {tree['name']!r}:", name, known)
    return unknown(f"setting of {prefix}:", name, known)


def dotted(tree: dict[Any, Any], prefix: str = "") -> list[str]:
    """The full names of nested settings, but for Hydra's own and the names of components."""
    names: list[str] = []
    for key, value in tree.items():
        if f"{prefix}{key}" != "hydra" and not (prefix and key == "name"):
            names += [f"{prefix}{key}", *(dotted(value, f"{prefix}{key}.") if isinstance(value, dict) else [])]
    return names


def searched(folders: Sequence[str]) -> str:
    """The value of `hydra.searchpath` that adds a user's folders. Raises ValueError."""
    for extra in folders:
        if not Path(extra).is_dir():
            raise ValueError(f"--config-dir {extra}: there is no such folder")
    paths = [str(Path(folder).resolve()).replace("\\", "\\\\").replace("'", "\\'") for folder in folders]
    return "[" + ",".join(f"'file://{path}'" for path in paths) + "]"


@cache
def publish() -> None:
    """Registers with Hydra what has no file in `conf`: the components with their options, and all presets.

    A model brings its recipe. So does a family, with the options of the model under another name.
    """
    store = partial(ConfigStore.instance().store, provider="dinfer")
    vars(ConfigStore.instance())["__deepcopy__"] = shared
    for kind, registry in GROUPS.items():
        for name in registry.names():
            node: dict[str, Any] = {"name": name}
            node |= {info.name: info.default for info in registry.describe(name).options}
            bare = name if kind != "model" else OPTIONS.format(name)
            store(group=kind, name=bare, node=node)
            if kind == "model":
                store(group=kind, name=name, node={"defaults": [bare, *brought(presets.of_family(name)), "_self_"]})
    for kind, named in presets.components().items():
        for name, options in named.items():
            base, own = options["of"], {key: value for key, value in options.items() if key != "of"}
            store(group=kind, name=name, node={"defaults": [base, "_self_"], **own})
    for name, preset in presets.presets().items():
        own = {key: value for key, value in preset.model.items() if key != "name"}
        bare = OPTIONS.format(preset.model["name"])
        store(group="model", name=name, node={"defaults": [bare, *brought(preset.recipe), "_self_"], **own})


def shared(memo: Any) -> ConfigStore:
    """Hydra copies its whole store to compose a configuration, and then each node again that it reads."""
    return ConfigStore.instance()


def brought(recipe: Mapping[str, str]) -> list[dict[str, str]]:
    """The entries of Hydra's defaults list by which a model chooses the other components."""
    return [{f"override /{kind}@_global_.{kind}": name} for kind, name in recipe.items()]


def model_named(override: str) -> list[str]:
    """`model=FOLDER`, `model=FILE.gguf` and `model=HUB_NAME` as overrides that Hydra takes; others as they are."""
    given, _, name = override.partition("=")
    if (
        given != "model"
        or name in presets.presets()
        or not ("/" in name or name.endswith(GGUF) or local(name).is_dir())
    ):
        return [override]
    if (found := presets.named(name)) is None:
        from dinfer.core.loading.checkpoint import family_of, read_config

        found = presets.chosen(name, family_of(read_config(locate(name, wanted=SMALL))))
    quoted = str(found.model["checkpoint"]).replace("\\", "\\\\").replace("'", "\\'")
    return [f"model={found.name}", f"model.checkpoint='{quoted}'"]


@contextmanager
def session() -> Iterator[ConfigLoader]:
    """Hydra with our configuration; within another session, that one."""
    publish()
    running = GlobalHydra.instance()
    if running.is_initialized():
        yield running.config_loader()
        return
    with hydra.initialize_config_dir(version_base=VERSION, config_dir=str(folder())):
        yield GlobalHydra.instance().config_loader()


@cache
def choices(kind: str) -> list[str]:
    """All that may be chosen for a component."""
    with session() as loader:
        return [name for name in loader.get_group_options(kind) if not name.endswith(OPTIONS.format(""))]


def compose(name: str, overrides: list[str]) -> dict[str, Any]:
    """The configuration of a command with these overrides, in a session. Raises ValueError."""
    with explained():
        return values_of(hydra.compose(name, overrides))


def values_of(config: DictConfig) -> dict[str, Any]:
    """The settings, with components that are complete. Raises ValueError."""
    return tree_of(config, resolve=True) | components(config)


def recomposed(command: str, more: Sequence[str], without: Collection[str] = ()) -> dict[str, Any]:
    """The running command's configuration with more overrides, and without those of some groups. Raises ValueError."""
    given = HydraConfig.get().overrides  # those of Hydra hold the folder of --config-dir
    kept = [text for text in given.task if parse(text).key_or_group.partition(".")[0] not in without]
    return compose(command, [*given.hydra, *kept, *more])


def pipeline(config: dict[str, Any]) -> Pipeline:
    """Loads the model with the recipe of the configuration."""
    import torch

    from dinfer.core.pipeline import load

    parts = {kind: config[kind] for kind in GROUPS}
    device = setting(config, "device", str | None) or ("cuda" if torch.cuda.is_available() else "cpu")
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
    from dinfer.core.engine.runtime import Runtime

    unset = isinstance(config["runtime"], dict) and config["runtime"].get("graphs") is None
    graphs = {"graphs": device.startswith("cuda")} if unset else {}
    return group(config, "runtime", Runtime, **graphs)


def beside(base: Pipeline, parts: dict[str, Any]) -> Pipeline:
    """Another recipe around the same network."""
    from dinfer.core.pipeline import Pipeline
    from dinfer.core.recipe.recipe import compose

    names = {kind: parts[kind] for kind in GROUPS if kind != "model"}
    return Pipeline(compose(base.model, **names), base.tokenizer, base.engine.runtime)


def ranks_of(config: dict[str, Any]) -> int:
    """The number of processes that run one model together. `Runtime` checks it."""
    runtime = config["runtime"]
    found = runtime.get("tensor_parallel") if isinstance(runtime, dict) else None
    return found if type(found) is int else 1


def located(config: dict[str, Any]) -> None:
    """Finds the description of the model's checkpoint. Raises CheckpointError if it cannot be had."""
    model = config["model"]
    if checkpoint := model.get("checkpoint"):
        locate(checkpoint, model.get("revision"), wanted=SMALL)


def check_ahead(config: dict[str, Any], others: Mapping[str, dict[str, Any]] = MappingProxyType({})) -> Recipe:
    """The recipe. Raises ValueError for a checkpoint, recipe or runtime that cannot be loaded, and reads no weights.

    For models that are loaded late, or by processes of Ray, which can only fail with pages of tracebacks. `others`:
    further recipes.
    """
    from dinfer.core.recipe.recipe import compose

    runtime_of(config, setting(config, "device", str | None) or "cpu")
    dtype, quantize = setting(config, "dtype", str | None), setting(config, "quantize", str | None)
    described = SimpleNamespace(spec=inspected(config["model"], dtype, quantize).spec)
    for name, parts in {**others, "": config}.items():
        with of_recipe(name):
            found = compose(described, **{kind: parts[kind] for kind in GROUPS if kind != "model"})
    return found


def inspected(model: dict[str, Any], dtype: str | None, quantize: str | None) -> Inspection:
    """What is known of a model. Raises ValueError if `load` would, as far as the small files and headers tell.

    A folder must hold its weights; those of a hub name may still be downloaded.
    """
    from dinfer.core.loading.safetensors_io import stored
    from dinfer.core.pipeline.pipeline import dtype_of
    from dinfer.lab.inspect import inspect

    if quantize is not None:
        needed("format_of", f"quantize={quantize}", "formats")(quantize)
    if dtype is not None:
        dtype_of(dtype)
    family = GROUPS["model"].build(model)
    folder = locate(family.checkpoint, family.revision, wanted=SMALL)
    found = inspect(folder, model)
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
    from dinfer.demo.problems import generate  # of a layer

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


def asked(config: dict[str, Any], chat: bool | None) -> Any:
    """The question, with pictures as a message. Raises ValueError for a file that is none."""
    question, images = config["prompt"], setting(config, "image", str | tuple[str, ...] | None)
    if images is None:
        return question
    if not (images := [images] if isinstance(images, str) else images):
        raise ValueError("image=[] names no picture: give a file, or leave it out")
    seen, first = needed("images", f"image={images[0]}", "families"), f"image={images[0]}"
    if chat is not False:
        images = [seen.opened(one, f"image={one}") for one in images]
    return seen.beside(question, images, single=True, chat=chat, name=first)


def held_of(config: dict[str, Any]) -> dict[str, Any]:
    """What answers are held to, as `Pipeline.generate` takes it. A list is of gaps, one for each.

    Raises ValueError for a file that cannot be read.
    """
    try:
        choice = setting(config, "choice", tuple[str, ...] | tuple[tuple[str, ...], ...] | None)
    except ValueError as error:
        raise ValueError(
            f"choice={config['choice']!r:.80} must be a list of texts, such as choice=[yes,no]. Quote numbers and true "
            "or false: \"choice=['1','2']\""
        ) from error
    held: dict[str, Any] = {"regex": setting(config, "regex", str | tuple[str, ...] | None), "choice": choice}
    for name in ("schema", "grammar"):
        given = setting(config, name, str | tuple[str, ...] | None)
        several = isinstance(given, list | tuple)
        texts = [] if given is None else [_text_in(name, path) for path in (given if several else [given])]
        held[name] = texts if several else next(iter(texts), None)
    held["posterior"] = setting(config, "posterior", bool) or None
    return {name: value for name, value in held.items() if value is not None}


def _text_in(name: str, path: str) -> str:
    try:
        return Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{name}={path} is not a file of text: {error}") from error


def group(config: dict[str, Any], name: str, kind: type, **more: Any) -> Any:
    """The settings below `name` as a dataclass, with `more` in it. ValueError for an unknown one, or a wrong type."""
    values, hints = config[name], get_type_hints(kind)
    if not isinstance(values, dict):
        raise ValueError(f"{name}={values!r} must be settings, such as {name}.{next(iter(hints))}=...")
    for key in values:
        if key not in hints:
            raise unknown(f"setting of {name}:", key, list(hints))
    return kind(**typed(hints, values | more, prefix=f"{name}."))
