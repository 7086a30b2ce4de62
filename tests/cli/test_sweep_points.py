"""Sweeps: which points there are, what becomes of those without a result, and launchers that are not Hydra's own."""

from __future__ import annotations

from pathlib import Path

import hydra
import pytest
from hydra.core.config_store import ConfigStore

from dinfer.__main__ import main
from dinfer.cli import application, conf


def points(*arguments: str) -> list[list[str]]:
    with conf.session() as loader:
        return application.points(list(arguments), loader, hydra.compose("generate", return_hydra_config=True))


def test_an_option_goes_to_the_components_that_have_it(capsys: pytest.CaptureFixture[str]) -> None:
    """A single value too: Hydra would set it in the default component."""
    assert points("decoder=threshold,factor", "decoder.threshold=0.7,0.9", "decoder.factor=8") == [
        ["decoder=threshold", "decoder.threshold=0.7"],
        ["decoder=threshold", "decoder.threshold=0.9"],
        ["decoder=factor", "decoder.factor=8"],
    ]
    said = capsys.readouterr().err
    assert "decoder.factor of decoder=threshold, decoder.threshold of decoder=factor" in said


def test_a_sweep_over_models_gives_options_to_the_components_they_bring(capsys: pytest.CaptureFixture[str]) -> None:
    assert points("model=tiny,llada2_1_mini", "decoder.horizon=0,8") == [
        ["model=tiny", "decoder.horizon=0"], ["model=tiny", "decoder.horizon=8"],
        ["model=llada2_1_mini"],
    ]  # fmt: skip
    assert "decoder.horizon of decoder=joint_threshold" in capsys.readouterr().err


def test_a_point_that_has_all_options_stays_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    axes = ("decoder=threshold,credit,hierarchical", "cache=none,dual", "decoder.threshold=0.7,0.8,0.9")
    found = points(*axes, "max_new_tokens=8")
    assert len(found) == 18 and {len(point) for point in found} == {4}
    assert points("decoder.threshold=0.5,0.6") == [["decoder.threshold=0.5"], ["decoder.threshold=0.6"]]
    assert points("decoder=glob(thr*)", "iteration.block=range(8,11)") == [
        [decoder, f"iteration.block={block}"]
        for decoder in ("decoder=threshold", "decoder=threshold_70", "decoder=threshold_76", "decoder=threshold_95")
        for block in (8, 9, 10)
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
    assert " max_new_tokens=4 decoder.threshold=2 cache=none: decoder.threshold=2.0 must be" in said.err


@pytest.mark.rest(but=4)
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["decoder=threshold,factor", "decoder.treshold=0.5"], "of decoder 'threshold' or 'factor': 'treshold'. Did"),
        (["decoder.treshold=0.5,0.6"], "unknown option of decoder 'threshold': 'treshold'. Did you mean 'threshold'?"),
        (["decoder=threshold,factr"], "unknown decoder 'factr'. Did you mean 'factor'?"),
        (["decoder.threshold="], "decoder.threshold='' must be a number"),
        (["decoder.threshold=0.5,high"], "decoder.threshold='high' must be a number"),
        (["decoder.threshold=interval(0,1)"], "an interval has no steps. Write range(START,STOP,STEP), or values"),
        (["max_new_token=8,16"], "unknown setting 'max_new_token'. Did you mean 'max_new_tokens'?"),
        (["hydra/sweeper=basi"], "unknown hydra/sweeper 'basi'. Did you mean 'basic'?"),
        (["hydra/sweeper=other"], "hydra/sweeper=other: dinfer has a sweeper of its own. Leave it out"),
    ],
)  # fmt: skip
def test_what_cannot_be_swept_is_refused_before_anything_runs(
    overrides: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ConfigStore.instance().store(group="hydra/sweeper", name="other", node={})  # as a plugin does
    with pytest.raises(SystemExit) as ended:
        main(["generate", "a", "-m", *overrides])
    said = capsys.readouterr()
    assert (ended.value.code, said.out) == (2, "") and message in said.err


def test_a_sweep_may_stand_in_a_preset_and_be_launched_a_few_points_at_a_time(
    checkpoint: str, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (elsewhere / "study").mkdir()
    swept = "hydra: { sweeper: { max_batch_size: 2, params: { cache: 'none,dual,prefix' } } }"
    (elsewhere / "study" / "mine.yaml").write_text(f"# @package _global_\n{swept}\nmax_new_tokens: 2\n")
    main(["generate", "a", checkpoint, "-m", "+study=mine", "-cd", str(elsewhere)])
    said = capsys.readouterr()
    headings = [line.split() for line in said.out.splitlines() if line.startswith("# ")]
    assert [heading[1] for heading in headings] == ["cache=none", "cache=dual", "cache=prefix"]
    assert all(heading[-1] == "+study=mine" for heading in headings)
    assert said.err.count("tokens per forward") == 3


@pytest.mark.rest  # seven seconds
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
