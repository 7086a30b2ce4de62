"""The YAML files and the dataclasses say the same, and every file composes into something that can be built."""

from __future__ import annotations

import dataclasses
import math
import operator
import re
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from dinfer.cli import conf
from dinfer.cli.commands.demo import decoders_of
from dinfer.cli.main import find, names
from dinfer.cli.recipe import pipeline
from dinfer.core.registry import REGISTRIES, Registry, options_of
from dinfer.demo.problems import generate, is_correct
from dinfer.engine.runtime import Runtime

COMPONENTS = [(registry, name) for registry in REGISTRIES for name in registry.names()]
CHOICES = [(kind, path.stem) for kind in conf.GROUPS for path in sorted((conf.folder() / kind).glob("*.yaml"))]


def composed(name: str, *overrides: str) -> dict[str, Any]:
    with initialize_config_dir(version_base="1.3", config_dir=str(conf.folder())):
        config = OmegaConf.to_container(compose(name, overrides=list(overrides)), resolve=True)
    assert isinstance(config, dict)
    return {str(key): value for key, value in config.items()}


def test_the_folder_is_the_one_at_the_top_of_the_checkout() -> None:
    assert conf.folder() == Path(__file__).parents[2] / "conf"


@pytest.mark.parametrize("registry,name", COMPONENTS, ids=[f"{r.kind}-{n}" for r, n in COMPONENTS])
def test_every_component_has_a_file_with_all_its_options_and_defaults(registry: Registry, name: str) -> None:
    path = conf.folder() / registry.kind / f"{name}.yaml"
    assert path.is_file(), f"write {path}: name and every option with its default"
    defaults = {info.name: info.default for info in options_of(registry.get(name))}
    listed = {key: list(value) if isinstance(value, tuple) else value for key, value in defaults.items()}
    assert conf.read(path) == {"name": name, **listed}
    assert [*conf.read(path)][1:] == [*listed], "in the order of the dataclass"


@pytest.mark.parametrize("registry,name", COMPONENTS, ids=[f"{r.kind}-{n}" for r, n in COMPONENTS])
def test_no_option_is_nan(registry: Registry, name: str) -> None:
    """A comparison with NaN is false, so a check that asks whether a value is out of range lets it through."""
    for info in options_of(registry.get(name)):
        if type(info.default) is float:
            with pytest.raises(ValueError, match=f"{registry.kind}.{info.name}=nan must be "):
                registry.build({"name": name, info.name: math.nan})


@pytest.mark.parametrize("kind,choice", CHOICES, ids=[f"{kind}-{choice}" for kind, choice in CHOICES])
def test_every_choice_composes_and_builds(kind: str, choice: str) -> None:
    part = composed("config", f"{kind}={choice}")[kind]
    component = conf.GROUPS[kind].build(part)
    assert conf.Schema("generate").choices(kind)[choice] == part["name"]
    assert dataclasses.is_dataclass(component)


def test_presets_differ_from_their_family_only_where_they_say() -> None:
    choices = conf.Schema("generate").choices("model")
    presets = {choice: family for choice, family in choices.items() if choice != family}
    assert {"tiny", "llada_8b_base", "llada_8b_instruct", "llada_1_5"} <= presets.keys()
    for preset, family in presets.items():
        base = composed("config", f"model={family}")["model"]
        content = conf.read(conf.folder() / "model" / f"{preset}.yaml")
        own = {key: value for key, value in content.items() if key != "defaults"}
        assert composed("config", f"model={preset}")["model"] == base | own


def test_runtime_lists_every_field_with_its_default() -> None:
    fields = {field.name: field.default for field in dataclasses.fields(Runtime)}
    assert composed("config")["runtime"] == {**fields, "graphs": None}


@pytest.mark.parametrize("command", sorted(set(names()) & {path.stem for path in conf.folder().glob("*.yaml")}))
def test_every_command_composes_and_its_help_names_all_its_settings(command: str) -> None:
    config = composed(command)
    help_text = find(command).__doc__ or ""
    own = conf.read(conf.folder() / f"{command}.yaml").keys() - {"defaults"}
    missing = [name for name in own if f"{name}=" not in help_text and f"--{name}" not in help_text]
    assert not missing
    assert {*conf.GROUPS, "max_new_tokens", "device", "dtype", "runtime"} <= config.keys()


def test_the_demo_compares_the_settings_it_says_and_adds_the_chosen_one() -> None:
    rows = decoders_of(composed("demo", "iteration.block=16"))
    assert [type(row).__name__ for row in rows] == ["Fixed", "Threshold", "Threshold"]
    assert rows[0].steps == 16
    more = decoders_of(composed("demo", "decoder.threshold=0.7"))
    assert [row.threshold for row in more[1:]] == [0.9, 0.5, 0.7]
    with pytest.raises(ValueError, match="compare='x' must be a list"):
        decoders_of(composed("demo", "compare=x"))


def test_the_demo_begins_with_a_problem_worked_out_right() -> None:
    """In every step, not in the answer alone."""
    config = composed("demo", "device=cpu")
    problem = generate("heldout", 1, config["seed"])[0]
    text = pipeline(config).generate(problem.question, max_new_tokens=config["max_new_tokens"]).text
    steps = re.findall(r"(\d+) ([-+*/]) (\d+) = (\d+)", text)
    signs = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
    assert is_correct(problem, text) and len(steps) >= 3
    assert [signs[sign](int(a), int(b)) for a, sign, b, _ in steps] == [int(result) for *_, result in steps]


def test_commands_are_run_in_the_working_directory_and_leave_nothing() -> None:
    with initialize_config_dir(version_base="1.3", config_dir=str(conf.folder())):
        hydra = compose("generate", return_hydra_config=True).hydra
    assert (hydra.run.dir, hydra.output_subdir, hydra.job.chdir) == (".", None, False)
    assert hydra.job_logging.root is None and hydra.hydra_logging.root is None
