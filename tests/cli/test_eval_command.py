"""`dinfer eval` from an installed wheel: a run, the same again, a sweep, and bad arguments."""

from __future__ import annotations

import csv

import pytest
from support.command_line import CommandLine, install

from evaluations.harness import main

GSM = ["eval", "tasks=mini_gsm", "limit=1", "max_new_tokens=64", "device=cpu", "out=results"]


@pytest.fixture(scope="module")
def dinfer(tmp_path_factory: pytest.TempPathFactory) -> CommandLine:
    return install(tmp_path_factory.mktemp("installed"))


def test_the_whole_way_offline(dinfer: CommandLine) -> None:
    first, again, sweep, infill, unsafe, *wrong = dinfer.run_all(
        [
            GSM,
            GSM,
            [*GSM, "-m", "cache=none,dual", "decoder.threshold=0.5"],
            ["eval", "tasks=[mini_infill,mini_choice]", "limit=1", "likelihood.samples=2", "device=cpu", "out=null"],
            ["eval", "tasks=mbpp_sanitized_llada", "limit=1", "device=cpu"],
            ["eval", "tasks=null"],
            ["eval", "tasks=mini_gsm", "gen_kwargs={treshold: 0.5}", "limit=1", "out=null", "device=cpu"],
            ["eval", "tasks=mini_gsm", "likelihood.samples=0"],
            ["eval", "tasks=mini_gsm", "likelihood.sample=3"],
            ["eval", "tasks=mini_gsm", "limits=3"],
            ["eval", "tasks=mini_gsm", "limit=few"],
            ["eval", "tasks=3"],
            ["eval", "tasks=mini_gsm", "chat=perhaps"],
        ]
    )
    assert first.status == 0 and "mini_gsm" in first.out and "wrote results/mini_gsm-llada-" in first.err, first.err
    assert again.status == 0 and again.out == first.out and "overwrite=true does it again" in again.err
    assert sweep.status == 0 and sweep.err.count("wrote results/") == 2
    rows = list(csv.DictReader((dinfer.cwd / "results" / "runs.csv").open()))
    assert sorted((row["cache"], row["decoder.threshold"]) for row in rows) == [
        ("dual", "0.5"),
        ("dual", "0.9"),
        ("none", "0.5"),
    ]
    assert infill.status == 0 and "mini_infill" in infill.out and "masked, 2 samples" in infill.out
    assert unsafe.status == 2 and "mbpp_sanitized_llada runs generated code. allow_code=true" in unsafe.err
    messages = (
        "no tasks are given",
        "unknown name in gen_kwargs: 'treshold'. Did you mean 'threshold'",
        "likelihood.samples=0 must be at least 1",
        "Did you mean 'samples'",
        "Did you mean 'limit'",
        "limit='few' must be",
        "tasks=3 must be a list",
        "chat='perhaps' must be true or false",
    )
    for said, message in zip(wrong, messages, strict=True):
        assert said.status == 2 and message in said.err, (message, said.err)


def test_lm_evals_own_command_line(
    dinfer: CommandLine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (dinfer.site / "bin" / "dinfer-lm-eval").is_file()
    line = "--model dinfer --model_args model=tiny,decoder.threshold=0.8,max_new_tokens=64 --tasks mini_gsm --limit 1"
    monkeypatch.setattr("sys.argv", ["dinfer-lm-eval", *line.split(), "--apply_chat_template"])
    main()
    said = capsys.readouterr().out
    assert "|mini_gsm|" in said and "exact_match" in said
