"""What Hydra is told: every choice composes into a component that can be built, every setting is explained."""

from __future__ import annotations

import dataclasses
import math
import operator
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hydra
import pytest
from hydra.core.config_loader import ConfigLoader

from dinfer.cli import conf
from dinfer.cli.commands.demo import decoders_of
from dinfer.cli.conf import pipeline
from dinfer.cli.program import parsers
from dinfer.core.engine.runtime import Runtime
from dinfer.core.recipe import presets
from dinfer.core.registry import MODELS, REGISTRIES, Registry, options_of
from dinfer.demo.problems import generate, is_correct

COMPONENTS = [(registry, name) for registry in REGISTRIES for name in registry.names()]
COMMANDS = sorted({*parsers()[1]} & {path.stem for path in conf.folder().glob("*.yaml")})


@pytest.fixture(autouse=True)
def loader() -> Iterator[ConfigLoader]:
    with conf.session() as found:
        yield found


def composed(name: str, *overrides: str) -> dict[str, Any]:
    return conf.compose(name, list(overrides))


def test_the_folder_is_the_one_at_the_top_of_the_checkout() -> None:
    assert conf.folder() == Path(__file__).parents[2] / "conf"


@pytest.fixture(scope="module")
def parts() -> dict[str, dict[str, Any]]:
    """What every choice of every component composes into. As many choices as there can be in one composition."""
    found: dict[str, dict[str, Any]] = {kind: {} for kind in conf.GROUPS}
    with conf.session():
        choices = {kind: conf.choices(kind) for kind in conf.GROUPS}
        lines = [{"iteration": name} for name in choices.pop("iteration")]
        for index in range(max(map(len, choices.values()))):
            chosen = {kind: names[index % len(names)] for kind, names in choices.items()}
            lines.append(chosen | {"iteration": "blockwise"})  # some choices take their block from it
        for line in lines:
            values = conf.compose("config", [f"{kind}={choice}" for kind, choice in line.items()])
            for kind, choice in line.items():
                found[kind][choice] = values[kind]
    return found


@pytest.mark.rest(but=3)
@pytest.mark.parametrize("registry", REGISTRIES, ids=[registry.kind for registry in REGISTRIES])
def test_every_choice_composes_and_builds(registry: Registry, parts: dict[str, dict[str, Any]]) -> None:
    assert {*registry.names()} <= parts[registry.kind].keys()
    for choice, part in parts[registry.kind].items():
        component = registry.build(part)
        if choice in registry.names():
            assert type(component) is registry.get(choice)
            defaults = {info.name: info.default for info in options_of(component)}
            listed = {name: list(value) if isinstance(value, tuple) else value for name, value in defaults.items()}
            assert part == {"name": choice, **listed}


@pytest.mark.parametrize("registry,name", COMPONENTS, ids=[f"{r.kind}-{n}" for r, n in COMPONENTS])
def test_no_option_is_nan(registry: Registry, name: str) -> None:
    """A comparison with NaN is false, so a check that asks whether a value is out of range lets it through."""
    for info in options_of(registry.get(name)):
        if type(info.default) is float:
            with pytest.raises(ValueError, match=f"{registry.kind}.{info.name}=nan must be "):
                registry.build({"name": name, info.name: math.nan})


def test_presets_differ_from_their_family_only_where_they_say(parts: dict[str, dict[str, Any]]) -> None:
    assert presets.presets().keys() == parts["model"].keys() - {*MODELS.names()}
    for preset in presets.presets():
        own = presets.preset(preset).model
        assert parts["model"][preset] == parts["model"][parts["model"][preset]["name"]] | own


def test_runtime_lists_every_field_with_its_default() -> None:
    fields = {field.name: field.default for field in dataclasses.fields(Runtime)}
    assert composed("config")["runtime"] == {**fields, "graphs": None}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_composes_and_its_help_explains_all_its_settings(command: str) -> None:
    config, text = composed(command), parsers()[1][command].format_help()
    assert [name for name in config.keys() - conf.GROUPS.keys() if f"  {name}:" not in text] == []
    assert {*conf.GROUPS, "max_new_tokens", "device", "dtype", "runtime"} <= config.keys()


def test_the_demo_compares_the_settings_it_says_and_adds_the_chosen_one() -> None:
    rows = decoders_of(composed("demo", "iteration.block=16"))
    assert [type(row).__name__ for row in rows] == ["Fixed", "Threshold", "Threshold"]
    assert rows[0].steps == 32  # one token a step
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
    own = hydra.compose("generate", return_hydra_config=True).hydra
    assert (own.run.dir, own.output_subdir, own.job.chdir) == (".", None, False)
    assert own.job_logging.root is None and own.hydra_logging.root is None
