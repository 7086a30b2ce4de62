"""`dinfer eval`: a run, the same again, a sweep, and bad arguments."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest
from support.command_line import CommandLine

pytest.importorskip("lm_eval", reason="lm-eval is not installed")


def test_a_run_the_same_again_and_a_sweep(dinfer: CommandLine, checkpoint: str, elsewhere: Path) -> None:
    line = ["eval", "tasks=mini_turns", "limit=1", "max_new_tokens=8", checkpoint, "out=results"]
    first = dinfer(*line)
    assert first.status == 0 and "mini_turns" in first.out and "wrote results/mini_turns-llada-" in first.err, first.err
    again = dinfer(*line)
    assert again.status == 0 and again.out == first.out and "overwrite=true does it again" in again.err
    sweep = dinfer(*line, "-m", "cache=none,dual", "decoder.threshold=0.5")
    assert sweep.status == 0 and sweep.err.count("wrote results/") == 2
    rows = csv.DictReader((elsewhere / "results" / "runs.csv").read_text().splitlines())
    found = sorted((row["cache"], row["decoder.threshold"]) for row in rows)
    assert found == [("dual", "0.5"), ("dual", "0.9"), ("none", "0.5")]


def test_gaps_and_likelihoods(dinfer: CommandLine) -> None:
    said = dinfer("eval", "tasks=[mini_infill,mini_choice]", "limit=1", "likelihood.samples=2", "out=null")
    assert said.status == 0 and "mini_infill" in said.out and "masked, 2 samples" in said.out


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["tasks=mbpp_sanitized_llada"], "mbpp_sanitized_llada runs generated code. allow_code=true"),
        (["tasks=null"], "no tasks are given"),
        (["gen_kwargs={treshold: 0.5}", "limit=1"], "unknown name in gen_kwargs: 'treshold'. Did you mean 'threshold'"),
        (["likelihood.samples=0"], "likelihood.samples=0 must be at least 1"),
        (["likelihood.sample=3"], "Did you mean 'samples'"),
        (["+likelihood.sample=3"], "Did you mean 'samples'"),
        (["limits=3"], "Did you mean 'limit'"),
        (["limit=few"], "limit='few' must be"),
        (["tasks=3"], "tasks=3 must be a list"),
        (["chat=perhaps"], "chat='perhaps' must be true or false"),
    ],
)
def test_what_is_refused(settings: list[str], message: str, dinfer: CommandLine) -> None:
    said = dinfer("eval", *settings, "out=null")
    assert said.status == 2 and message in said.err


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("limit=0", "limit=0 must be above 0"), ("num_fewshot=-1", "num_fewshot=-1 must be 0 or more"),
        ("code.seconds=0", "code.seconds=0 must be at least 1"), ("overwrite=x", "overwrite='x' must be true or false"),
        ("gen_kwargs={treshold: 1}", "unknown name in gen_kwargs: 'treshold'"), ("out=/dev/null", "Not a directory"),
        ("gen_kwargs={max_tokens: 0}", "max_tokens=0 must be an integer, at least 1"), ("regex='('", "is not closed"),
        ("device=gpu", "device='gpu' is not known; use cpu"), ("dtype=int7", "dtype='int7' is not known"),
        ("quantize=foo", "quantize='foo' is not known"), ("runtime.rows=0", "runtime.rows=0 must be between"),
        ("cache=block", "cache=block"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_before_lm_eval_is_imported(
    setting: str, message: str, dinfer: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "evaluations.run", None)  # an import of it fails
    said = dinfer("eval", "tasks=mini_gsm", setting)
    assert said.status == 2 and message in said.err


@pytest.mark.rest  # a quarter of a minute
def test_lm_evals_own_command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from evaluations.harness import main

    line = "--model dinfer --model_args model=tiny,decoder.threshold=0.8,max_new_tokens=64 --tasks mini_gsm --limit 1"
    monkeypatch.setattr("sys.argv", ["dinfer-lm-eval", *line.split(), "--apply_chat_template"])
    main()
    said = capsys.readouterr().out
    assert "|mini_gsm|" in said and "exact_match" in said
