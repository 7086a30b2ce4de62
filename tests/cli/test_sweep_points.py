"""Sweeps: which points there are, what becomes of those without a result, and launchers that are not Hydra's own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.command_line import write_checkpoint

from dinfer.cli.conf import Schema
from dinfer.cli.main import main
from dinfer.cli.names import spread
from dinfer.cli.sweep_points import points

SCHEMA = Schema("generate")


def product(*axes: list[str]) -> list[list[str]]:
    found: list[list[str]] = [[]]
    for axis in axes:
        found = [[*point, value] for point in found for value in axis]
    return found


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"model.checkpoint={write_checkpoint(tmp_path_factory.mktemp('checkpoint'))}"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["dinfer"])  # which Hydra reads
    return tmp_path


def test_an_option_goes_to_the_components_that_have_it(capsys: pytest.CaptureFixture[str]) -> None:
    decoders = ["decoder=threshold", "decoder=factor"]
    found = points(product(decoders, ["decoder.threshold=0.7", "decoder.threshold=0.9"], ["decoder.factor=8"]), SCHEMA)
    assert found == [
        ["decoder=threshold", "decoder.threshold=0.7"],
        ["decoder=threshold", "decoder.threshold=0.9"],
        ["decoder=factor", "decoder.factor=8"],
    ]
    said = capsys.readouterr().err
    assert "decoder.factor of decoder=threshold, decoder.threshold of decoder=factor" in said


def test_a_point_that_has_all_options_stays_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    axes = (["decoder=threshold", "decoder=credit", "decoder=hierarchical"], ["cache=none", "cache=dual"])
    whole = product(*axes, [f"decoder.threshold={value}" for value in (0.7, 0.8, 0.9)], ["max_new_tokens=8"])
    assert points(whole, SCHEMA) == whole and len(whole) == 18
    assert points([["decoder.threshold=0.5"], ["decoder.threshold=0.6"]], SCHEMA) == [
        ["decoder.threshold=0.5"],
        ["decoder.threshold=0.6"],
    ]
    assert capsys.readouterr().err == ""


def test_points_without_a_result_are_named_and_do_not_end_the_sweep(
    checkpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["generate", "a", checkpoint, "max_new_tokens=4", "-m", "decoder.threshold=2,0.5", "cache=block,none"])
    said = capsys.readouterr()
    assert ended.value.code == 1
    assert said.err.count("tokens per forward") == 1
    assert "left out, since the components cannot work together: 1 of 4" in said.err
    assert "failed: 2 of 4" in said.err
    assert f"{checkpoint} max_new_tokens=4 decoder.threshold=2 cache=none: decoder.threshold=2.0 must be" in said.err


def test_what_no_component_has_is_refused_before_anything_runs(
    checkpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["generate", "a", checkpoint, "-m", "decoder=threshold,factor", "decoder.treshold=0.5"])
    said = capsys.readouterr()
    assert (ended.value.code, said.out) == (2, "")
    assert "unknown option of decoder 'threshold' or 'factor': 'treshold'. Did you mean 'threshold'?" in said.err


def test_a_sweep_runs_as_jobs_of_a_cluster(
    checkpoint: str, elsewhere: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With submitit's local executor, which starts a process for each point as Slurm's would."""
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="hydra-submitit-launcher is not installed")
    root = str(Path(__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", root)
    line = ["generate", "a", checkpoint, "max_new_tokens=4", "-m", "decoder.threshold=0.5,2"]
    with pytest.raises(SystemExit):
        main([*line, "hydra/launcher=submitit_local", "hydra.launcher.timeout_min=5"])
    assert "failed: 1 of 2" in capsys.readouterr().err
    logs = sorted(path.read_text() for path in (elsewhere / "multirun").rglob("*_log.err"))
    assert sum("tokens per forward" in log for log in logs) == 1 and len(logs) == 2


def test_a_single_value_joins_the_product_where_components_are_swept(
    checkpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hydra would set it before there are points, in a component that may not have it."""
    assert spread(["decoder=threshold,factor", "decoder.factor=8", "cache.interval=3", "iteration.block=8"]) == [
        "decoder=threshold,factor", "decoder.factor=choice(8)", "cache.interval=3", "iteration.block=8",
    ]  # fmt: skip
    main(["generate", "a", checkpoint, "max_new_tokens=4", "-m", "decoder=threshold,factor", "decoder.factor=2"])
    said = capsys.readouterr()
    assert [line.split()[3:] for line in said.out.splitlines() if line.startswith("#")] == [
        ["decoder=threshold"], ["decoder=factor", "decoder.factor=2"],
    ]  # fmt: skip
