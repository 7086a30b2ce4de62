"""Tuning: the search against an objective whose best recipe is known, what is refused, and the preset it writes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from support.command_line import write_checkpoint

from dinfer.__main__ import main
from dinfer.cli import conf
from dinfer.cli.commands.tune import preset_file, save_preset
from dinfer.core.recipe.recipe import IncompatibleRecipe
from dinfer.lab.metrics import Difference, Sample, measure
from dinfer.lab.tuning import Components, Found, Measured, NothingFound, Split, Tried, check_space, tune

REFERENCE: Components = {
    "iteration": {"name": "blockwise", "block": 32},
    "decoder": {"name": "fixed", "steps": 32},
    "cache": {"name": "none"},
}
SPACE: dict[str, Any] = {
    "decoder": {"name": ["threshold", "factor"], "threshold": {"low": 0.5, "high": 1.0, "step": 0.05}},
    "cache": {"name": ["none", "dual", "block"]},
}
optuna = pytest.importorskip("optuna", reason="optuna is not installed")


class Scripted:
    """The lower the threshold the faster, and below `knee` ever more problems are wrong; a cache saves two forwards."""

    def __init__(self, knee: float = 0.8, heldout_knee: float | None = None) -> None:
        self.knees = {"calibration": knee, "heldout": knee if heldout_knee is None else heldout_knee}
        self.asked: list[tuple[str, Components]] = []

    def __call__(self, parts: Components, split: Split, rows: int | None = None) -> Measured:
        self.asked.append((split, parts))
        if parts["cache"]["name"] == "block":
            raise IncompatibleRecipe("cache=block does not fit")
        threshold = parts["decoder"].get("threshold", 1.0)
        right = round(100 - 200 * max(self.knees[split] - threshold, 0))
        forwards = round(20 * threshold) + (2 if parts["cache"]["name"] == "none" else 0)
        forwards -= parts["iteration"].get("blocks", 1)
        samples = [Sample(forwards, 0, 30, 1.0, True, float(i < right)) for i in range(100)]
        return Measured(measure(samples, forwards / (rows or 1)), [float(i < right) for i in range(100)])


def tuned(objective: Scripted, **settings: Any) -> tuple[list[Tried], Found]:
    *tried, found = tune(objective, SPACE, REFERENCE, **{"trials": 40, "goal": "tpf"} | settings)
    assert isinstance(found, Found)
    return tried, found  # type: ignore[return-value]


def test_the_fastest_recipe_within_the_bound_is_found_and_verified() -> None:
    objective = Scripted(knee=0.8)
    tried, found = tuned(objective, max_drop=0.0)
    assert found.parts["decoder"] == {"name": "threshold", "threshold": 0.8} and found.parts["cache"]["name"] == "dual"
    assert found.parts["iteration"] == REFERENCE["iteration"]
    assert found.heldout.drop.points == 0 and found.verified == 1
    keys = [json.dumps(one.parts, sort_keys=True) for one in tried]
    assert len(set(keys)) == len(keys) and found.tried == tried
    # The held-out problems are not looked at before the search is over.
    assert [split for split, _ in objective.asked[-2:]] == ["heldout"] * 2
    assert all(split == "calibration" for split, _ in objective.asked[:-2])


def test_the_command_searches_recipes_with_several_blocks_and_editing_decoders() -> None:
    space = OmegaConf.to_container(OmegaConf.load(conf.folder() / "tune.yaml").space)
    *tried, found = tune(Scripted(), space, REFERENCE, trials=40, goal="tpf", max_drop=100.0)
    assert isinstance(found, Found) and found.parts["iteration"]["name"] == "multi_block"
    assert {one.parts["iteration"]["name"] for one in tried} == {"blockwise", "multi_block"}
    assert {"joint_threshold", "entropy_bound"} < {one.parts["decoder"]["name"] for one in tried}
    assert len(tried) == 40  # those that are refused do not count


def test_a_wider_bound_buys_speed() -> None:
    _, exact = tuned(Scripted(), max_drop=0.0)
    _, loose = tuned(Scripted(), max_drop=20.0)
    assert loose.parts["decoder"]["threshold"] == pytest.approx(0.7)
    assert loose.heldout.speed > exact.heldout.speed
    assert loose.calibration.drop.points == pytest.approx(20)


def test_recipes_that_do_not_compose_are_no_trials_and_are_counted_with_their_reason() -> None:
    tried, found = tuned(Scripted(), max_drop=0.0)
    assert all(one.parts["cache"]["name"] != "block" for one in tried)
    assert list(found.refused) == ["cache=block does not fit"] and found.refused["cache=block does not fit"] > 0
    with pytest.raises(NothingFound, match=r"none of \d+ recipes runs; the first of them: cache=block does not fit"):
        list(tune(Scripted(), {"cache": {"name": ["block"]}, "decoder": SPACE["decoder"]}, REFERENCE, trials=2))


def test_the_search_turns_away_from_what_is_refused() -> None:
    """Three quarters of this space are refused. A sampler that does not learn it spends its tries there."""

    class Picky(Scripted):
        def __call__(self, parts: Components, split: Split) -> Measured:
            if parts["iteration"].get("align") or parts["iteration"]["block"] > 32:
                raise IncompatibleRecipe("iteration.align=true does not fit")
            return super().__call__(parts, split)

    iteration = {"name": ["blockwise", "multi_block"], "block": [8, 16, 32, 64], "align": [False, True]}
    space = SPACE | {"iteration": iteration | {"blocks": [2, 4]}}
    *_, found = tune(Picky(), space, REFERENCE, trials=40, goal="tpf", max_drop=100.0, seed=1)
    assert isinstance(found, Found) and found.calibration.speed == 5.0  # four blocks, the lowest threshold, a cache


def test_what_fails_on_held_out_problems_is_not_found() -> None:
    """Held out, the knee lies higher: the fastest candidates fail, and no more than `verify` are looked at."""
    with pytest.raises(NothingFound, match=r"the 2 fastest recipes keep the accuracy .* but not on the held-out ones"):
        tuned(Scripted(knee=0.6, heldout_knee=0.9), max_drop=0.0, verify=2)
    _, found = tuned(Scripted(knee=0.8, heldout_knee=0.85), max_drop=0.0, verify=10)
    assert found.verified > 1 and found.parts["decoder"].get("threshold", 1.0) >= 0.85
    with pytest.raises(NothingFound, match=r"keeps the accuracy within 0.0 points .* \(the best loses 20.00\)"):
        space = {"decoder": {"name": ["threshold"], "threshold": [0.6, 0.7]}}
        list(tune(Scripted(), space, REFERENCE, max_drop=0.0, trials=3))


def test_the_interval_of_a_drop_is_that_of_paired_differences() -> None:
    def measured(scores: list[float]) -> Measured:
        return Measured(measure([Sample(1, 0, 1, 1.0, True, s) for s in scores], 1.0), scores)

    # By hand, Bonett and Price: b = 1 lost, c = 0 won of n = 4; shares (b + 1) / (n + 2) and (c + 1) / (n + 2).
    drop = Difference.between([1, 1, 1, 0], [1, 0, 1, 0])
    b, c = 2 / 6, 1 / 6
    half = 1.959964 * ((b + c - (b - c) ** 2) / 6) ** 0.5
    assert drop.points == 25
    assert (drop.low, drop.high) == (pytest.approx(100 * (b - c - half)), pytest.approx(100 * (b - c + half)))
    same = Difference.between([1.0] * 50, [1.0] * 50)
    assert same.points == 0 and -8 < same.low < -4 and 4 < same.high < 8


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ({}, "names nothing to search"),
        ({"model": {"name": ["tiny"]}}, "unknown component in space: 'model'"),
        ({"decoder": ["threshold"]}, r"write space.decoder.name=\[...\]"),
        ({"decoder": {"name": []}}, "space.decoder.name=.* must be a list of names"),
        ({"decoder": {"name": ["treshold"]}}, "Did you mean 'threshold'"),
        ({"decoder": {"treshold": [1]}}, "unknown option in space of decoder: 'treshold'"),
        ({"decoder": {"steps": {"low": 8, "high": 4}}}, "with low < high"),
        ({"decoder": {"steps": []}}, "must be a list"),
        ({"decoder": {"steps": {"low": 1}}}, "must be a list"),
    ],
)
def test_a_space_that_makes_no_sense_is_refused(space: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_space(space, REFERENCE)
    for name in ("trials", "verify", "max_drop"):
        with pytest.raises(ValueError, match=f"{name}=-1 must be at least"):
            list(tune(Scripted(), SPACE, REFERENCE, **{name: -1}))


@pytest.mark.rest
def test_from_the_command_line_to_the_next_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = f"model.checkpoint={write_checkpoint(tmp_path / 'checkpoint')}"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["dinfer"])
    common = [checkpoint, "max_new_tokens=16", "iteration.block=8"]
    main([
        "tune", "--max-drop", "100", "goal=tpf", "trials=4", "count=2", "heldout=2", "families=[turns]", *common,
        "preset=conf/recipe/mine.yaml",
        "space.iteration=null", "space.decoder.name=[threshold]", "space.decoder.threshold.low=0.9",
    ])  # fmt: skip
    said, told = capsys.readouterr()
    path = tmp_path / "conf" / "recipe" / "mine.yaml"
    assert f"wrote {path.relative_to(tmp_path)}" in told and "95% interval" in path.read_text()
    report = json.loads((tmp_path / "tune.json").read_text())
    assert len(report["tried"]) <= 4 and report["settings"]["max_drop"] == 100
    assert "override /decoder: mine" in path.read_text() and report["parts"]["decoder"]["name"] == "threshold"
    same, *usage = said.split('"question" ')[1].splitlines()[0].split()
    assert (same, usage) == (checkpoint, ["--config-dir", "conf", "recipe=mine"])
    main(["generate", "a", checkpoint, "max_new_tokens=8", *usage])
    assert "tokens per forward" in capsys.readouterr().err
    # Its options may be changed, and its components exchanged: their options go with them.
    main(["generate", "a", checkpoint, "max_new_tokens=8", *usage, "decoder.threshold=0.95", "cache=none"])
    main(["generate", "a", checkpoint, "max_new_tokens=8", *usage, "decoder=fixed", "decoder.steps=4"])
    capsys.readouterr()
    for line, message in (
        ([*usage[:2], "recipe=mien"], "unknown recipe 'mien'. Did you mean 'mine'?"),
        ([*usage, "decoder.steps=3"], "unknown option of decoder 'threshold': 'steps'"),
    ):
        with pytest.raises(SystemExit):
            main(["generate", "a", checkpoint, *line])
        assert message in capsys.readouterr().err
    for line, message in (
        (["preset=../x"], "preset=../x must be FOLDER/recipe/NAME.yaml"),
        (["preset=elsewhere/recipe/careful.yaml"], "is a component or recipe"),
        (["preset=a/recipe/dual.yaml"], "is a component or recipe"),
        (["goal=speed"], "goal=speed must be tps"),
        (["count=0"], "count=0 must be at least 1"),
        (["--max-drop"], "--max-drop: expected one argument"),
    ):
        with pytest.raises(SystemExit):
            main(["tune", *common, *line])
        assert message in capsys.readouterr().err


def test_a_preset_holds_what_is_not_at_its_default(tmp_path: Path) -> None:
    path = preset_file(tmp_path / "recipe" / "fast.yaml")
    parts = {"decoder": {"name": "threshold", "threshold": 0.9, "least": 2}, "cache": {"name": "none"}}
    save_preset(path, parts, ["why"])
    assert path.read_text() == (
        "# @package _global_\n# why\ndefaults:\n  - override /decoder: fast\n  - override /cache: none\n"
    )
    assert (tmp_path / "decoder" / "fast.yaml").read_text() == "# why\ndefaults: [threshold, _self_]\nleast: 2\n"
