"""What users write and what they are told: the command line, in this process."""

from __future__ import annotations

import json
import os
import pty
import re
import sys
from argparse import Namespace
from pathlib import Path

import pytest
from support.command_line import CommandLine, loggers_kept, write_checkpoint

from dinfer.__main__ import main
from dinfer.cli.application import divided
from dinfer.cli.commands import generate
from dinfer.core.pipeline import Pipeline, load

COST = r"\d+\.\d\d tokens per forward \(TPF\), \d+\.\d positions per token, \d+\.\d\d s$"
SUMMARY = re.compile(rf"^(\d+) tokens, (\d+) forwards, {COST}", re.MULTILINE)
ESCAPE = "\x1b"

NASTY = [
    '"', "'", "a=b", "x=5, what is x?", "decoder", "decoder.x", "1,2,3", "{a: b}, [c", "${oc.env:HOME}", r"\${x}",
    "a\\", r"a\'b\"c", "ünïcødé 漢字 🍎", "$(ls) `ls` %s", "~decoder", "+x", "@", "#no comment", "two\nlines = 3",
    "null", "<user>?", "(1 + 2) * 3 = ?", " spaces ", "?", "glob(*)", "threshold is what?",
]  # fmt: skip
AFTER_DASHES = ["--watch", "-m", "--", "- 3 = x", "decoder=fixed", "--help me", "--help"]

CHECKPOINT = "model.checkpoint=CHECKPOINT"
# Arguments, and what stderr must say. CHECKPOINT stands for one.
WRONG = [
    (["generat"], "unknown command 'generat'. Did you mean 'generate'? Known: audit, batch, chat, "),
    (["generate"], "a question is needed"),
    (["generate", ""], "the prompt is empty"),
    (["generate", " \n"], "the prompt is empty"),
    (["generate", "a", "b"], "put one question in quotes"),
    (["generate", "a", "prompt=b"], "given twice"),
    (["generate", "prompt=[a,b]"], "must be a text"),
    (["generate", "a", "decoder=fixed", "decoder=factor"], "decoder=fixed and decoder=factor both set decoder: leave"),
    (["generate", "a", "decoder.threshold=1", "+decoder.threshold=1"], "both set decoder.threshold"),
    (["generate", "a", "-m", "cache=dual", "cache=none,dual"], "cache=dual and cache=none,dual both set cache"),
    (["generate", "a", "runtime={rows:2,page:8}", "runtime.page=4"], "and runtime.page=4 both set runtime.page"),
    (["generate", "a", CHECKPOINT, CHECKPOINT], "both set model.checkpoint"),
    (["generate", "a", "--watch", "watch=false"], "watch=true and watch=false both set watch"),
    (["trace", "a", "compare.decoder=fixed", "compare.decoder=factor", CHECKPOINT], "and compare.decoder=factor both"),
    (["inspect", "tiny", "model.stop_ids=[1]", "model.stop_ids=[2]"], "both set model.stop_ids"),
    (["plot", "runs", "task=a", "task=b"], "task=a and task=b both set task"),
    (["generate", "a", "decoder=treshold"], "unknown decoder 'treshold'. Did you mean 'threshold'? Known: "),
    (["generate", "a", "cache=duel"], "unknown cache 'duel'. Did you mean 'dual'? Known: "),
    (["generate", "a", "iteration=blocks"], "unknown iteration 'blocks'. Did you mean 'blockwise'?"),
    (["generate", "a", "model=GSAI-ML/X"], "GSAI-ML/X is not in "),
    (["generate", "a", "decoder.treshold=1"], "unknown option of decoder 'threshold': 'treshold'. Did you mean 'thre"),
    (["generate", "a", "decoder=factor", "decoder.threshold=1"], "unknown option of decoder 'factor': 'threshold'"),
    (["generate", "a", "+decoder.foo=1"], "unknown option of decoder 'threshold': 'foo'"),
    (["generate", "a", "treshold=1"], "unknown setting 'treshold'. Did you mean 'decoder.threshold'? Known: cache,"),
    (["generate", "a", "foo=1"], "unknown setting 'foo'"),
    (["generate", "a", "seed=1"], "Did you mean 'sampling.seed'?"),
    (["generate", "a", "block=8"], "Did you mean 'iteration.block' or 'model.block'?"),
    (["generate", "a", "block_length=8"], "Did you mean 'iteration.block'?"),
    (["generate", "a", "gen_length=8"], "Did you mean 'max_new_tokens'?"),
    (["generate", "treshold=1"], "unknown setting 'treshold'"),
    (["generate", "a", "runtime.row=1"], "unknown setting of runtime: 'row'. Did you mean 'rows'?"),
    (["generate", "a", "--model", "tiny"], "--model is no flag. Settings have no dashes: model=tiny."),
    (["generate", "a", "--max-new-tokens=5"], "Settings have no dashes: max_new_tokens=5."),
    (["generate", "a", "--wach"], "unknown flag '--wach'. Did you mean '--watch'?"),
    (["generate", "a", "--cfg", "jobs"], "--cfg: unknown value 'jobs'. Did you mean 'job'?"),
    (["generate", "a", "--cfg"], "--cfg: expected one argument"),
    (["generate", "a", "--config-dir", "nowhere"], "there is no such folder"),
    (["generate", "a", "--config-dir", ".", "--config-dir", "nowhere"], "--config-dir nowhere: there is no such"),
    (["generate", "a", "decoder.threshold=[0.5"], "is not a valid override"),
    (["generate", "a", "decoder="], "decoder= names no decoder: choose one of calibrated,"),
    (["generate", "a", "max_new_tokens=${oops}"], "max_new_tokens: Interpolation key 'oops' not found. ${...} stands"),
    (["generate", "a", "runtime.rows=10000000"], "runtime.rows=10000000 must be"),
    (["generate", "a", "device=cpu:7", CHECKPOINT], "device='cpu:7' cannot be used; use cpu, cuda or cuda:0"),
    (["generate", "a", "decoder.threshold=0.5,0.9"], "has several values: add -m"),
    (["generate", "a", "hydra.run.foo=1"], "unknown setting of hydra.run: 'foo'. Known: dir"),
    (["generate", "a", "decoder.threshold=high"], "decoder.threshold='high' must be a number"),
    (["generate", "a", "decoder.threshold=1.5"], "must be between 0 and 1"),
    (["generate", "a", "decoder=fixed", "decoder.steps=0"], "decoder.steps=0 must be at least 1"),
    (["generate", "a", "iteration.block=0"], "iteration.block=0 must be at least 1"),
    (["generate", "a", "iteration.align=3"], "iteration.align=3 must be true or false"),
    (["generate", "a", "cache.interval=-1"], "cache.interval=-1 must be 0"),
    (["generate", "a", "runtime.rows=0"], "runtime.rows=0 must be between 1 and 65536"),
    (["generate", "a", "runtime.page=x"], "runtime.page='x' must be an integer"),
    (["generate", "a", "runtime.graphs=true", "device=cpu", CHECKPOINT], "runtime.graphs=True needs a CUDA device"),
    (["generate", "a", "device=gpu", CHECKPOINT], "device='gpu' is not known"),
    (["generate", "a", "device=cuda:99", CHECKPOINT], "device='cuda:99'"),
    (["generate", "a", "dtype=int8", CHECKPOINT], "dtype='int8' is not known; use one of float32"),
    (["generate", "a", "model.stop_ids=[x]"], "model.stop_ids=['x'] must be a list, each an integer"),
    (["generate", "a", "model.checkpoint=/no/such/folder"], "unknown checkpoint '/no/such/folder'"),
    (["generate", "a", "model.checkpoint=."], "has no config.json"),
    (["generate", "a", "max_new_tokens=0", CHECKPOINT], "max_new_tokens=0 must be at least 1"),
    (["generate", "a", "max_new_tokens=1.5", CHECKPOINT], "max_new_tokens=1.5 must be an integer"),
    (["generate", "a", "max_new_tokens=999", CHECKPOINT], "exceed the model's 256 positions"),
    (["generate", "word " * 99, CHECKPOINT], "exceed the model's 256 positions"),
    (["generate", "a", "watch=3", CHECKPOINT], "watch=3 must be true or false"),
    (["generate", "a", "--watch", "delay=-1", CHECKPOINT], "delay=-1.0 must not be negative"),
    (["generate", "a", "sampling.temperature=-1"], "sampling.temperature=-1.0 must be 0"),
    (
        ["generate", "a", "sampling.temperatur=1"],
        "unknown option of sampling 'standard': 'temperatur'. Did you mean 'temp",
    ),
    (["generate", "a", "decoder=remasking", "sampling.eos_last=1", CHECKPOINT], "cannot honour sampling.eos_last=1"),
    (["audit", ""], "the prompt is empty"),
    (["audit", "a", "prompt=b"], "given twice"),
    (["infill"], "a text with gaps is needed"),
    (["infill", "a", "text=b"], "given twice"),
    (["likelihood"], "a file is needed"),
    (["likelihood", "none.jsonl", "options=3"], "options=3 must be names and values"),
    (["likelihood", "none.jsonl", "batch_tokens=0"], "batch_tokens=0 must be at least 1"),
    (["read"], "a question is needed"),
    (["read", "a", "choice=[b]", CHECKPOINT], "give two or more"),
    (["read", "a", "choice=[b,c]", "steps=0"], "steps=0 must be at least 1"),
    (["infill", "no gap", CHECKPOINT], "has no gap"),
    (["infill", "a [MASK:0] b", CHECKPOINT], "'[MASK:0]' is no gap"),
    (["list", "decoders"], "unknown registry 'decoders'. Did you mean 'decoder'? Known: model, iteration, decoder"),
    (["trace"], "a question is needed"),
    (["trace", "a", "out=trace.txt"], "out=trace.txt must end in .html"),
    (["trace", "a", "out=[]"], "out=[] names no file"),
    (["trace", "a", "runtime.speculate=2", CHECKPOINT], "a trace shows each step by itself: leave it at 0"),
    (
        ["trace", "a", "compare.decodr=fixed", CHECKPOINT],
        "to compare: 'decodr'. Did you mean 'decoder'",
    ),
    (["trace", "a", "compare.decoder=fixd", CHECKPOINT], "unknown decoder 'fixd'. Did you mean 'fixed'"),
    (
        ["trace", "a", "compare.decoder=factor", "compare.decoder.threshold=1", CHECKPOINT],
        "option of decoder 'factor'",
    ),
    (["trace", "a", "compare=fixed"], "does not say what to change"),
    (["demo", "why?"], "this command takes no text"),
    (["demo", "count=0"], "count=0 must be at least 1"),
    (["demo", "count=few"], "count='few' must be an integer"),
    (["demo", "families=[cooking]"], "choose some of"),
    (["demo", "compare=[{name: treshold}]"], "unknown decoder 'treshold'"),
    (["demo", "compare=[3]"], "compare=[3] must be a list of decoders"),
    (["generate", "a", "schema=none.json"], "schema=none.json is not a file of text"),
    (["generate", "a", "image=none.png"], "image=none.png: 'none.png' cannot be read: No such file or directory"),
    (["read", "a", "choice=[b,c]", "image=none.png"], "image=none.png: 'none.png' cannot be read: No such file"),
    (["generate", "a", "image=[]"], "image=[] names no picture: give a file, or leave it out"),
    (["generate", "a", "image=[b.png]", "chat=false"], "image=b.png goes into a message, and chat=false asks"),
    (["generate", "a", "choice=yes"], "choice='yes' must be a list of texts"),
    (["generate", "a", "choice=[1,true]"], "Quote numbers and true or false: \"choice=['1','2']\""),
    (["generate", "a", "choice=[a]", "regex=b"], "regex and choice are both given"),
    (["infill", "a [MASK:1]", "regex=[a,5]", "scope=gap"], "regex=['a', 5] must be a text or a list, each a text"),
    (["infill", "a [MASK:1]", "schema=[none.json]", "scope=gap"], "schema=none.json is not a file of text"),
    (["generate", "a", "runtime=3"], "runtime=3 must be settings"),
    (["generate", "a", "decoder=fixed", "decoder.steps=99999999999999999999", CHECKPOINT], "is too large"),
]


@pytest.fixture(scope="module")
def pipe(folder: Path) -> Pipeline:
    return load(str(folder), device="cpu")


def test_list_shows_every_registry_within_80_columns_of_a_terminal(dinfer: CommandLine) -> None:
    said = dinfer("list", TTY_COMPATIBLE="1", TERM="dumb")
    assert (said.status, said.err) == (0, "")
    for text in ("llada", "blockwise", "threshold *", "fixed", "prefix", "dual", "llada_8b_instruct", "tiny",
                 "Fast-dLLM, arXiv:2505.22618"):  # fmt: skip
        assert text in said.out
    assert max(map(len, said.out.splitlines())) <= 80
    assert max(map(len, dinfer("list").out.splitlines())) > 80, "a pipe is never wrapped"


def test_an_answer_goes_to_stdout_and_its_counts_to_stderr(dinfer: CommandLine, checkpoint: str) -> None:
    settings = (checkpoint, "iteration.block=16", "max_new_tokens=40")
    said = dinfer("generate", "How many?", *settings)
    found = SUMMARY.fullmatch(said.err.strip())
    assert said.status == 0 and found and 0 < int(found[2]) <= 40
    for way in ("chat=null", "--watch"):
        again = dinfer("generate", "-", way, *settings, stdin="How many?\n")
        assert (again.status, again.out) == (0, said.out), "steps that are watched go to stderr"


def test_an_answer_is_held_to_a_form(dinfer: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text('{"type": "object", "properties": {"n": {"enum": [1]}}, "required": ["n"]}')
    said = dinfer("generate", "A question", "device=cpu", f"schema={tmp_path}/schema.json")
    assert (said.status, json.loads(said.out)) == (0, {"n": 1})
    assert dinfer("generate", "A question", "device=cpu", "choice=[yes,no]").out in ("yes\n", "no\n")


def test_each_gap_is_held_to_a_form_of_its_own(dinfer: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text('{"enum": [1, 2]}')
    one, two = f"{tmp_path}/schema.json", "choice=[[abc,xyz],[de,fg]]"
    for form, pattern in ((f"schema=[{one},{one}]", "[12] is [12]"), (two, "(abc|xyz) is (de|fg)")):
        said = dinfer("infill", "[MASK:1] is [MASK:1]" if one in form else "[MASK:3] is [MASK:2]", form, "scope=gap")
        assert said.status == 0 and re.fullmatch(pattern, said.out.strip()), said
    said = dinfer("generate", "a", f"schema=[{one}]")
    assert said.status == 2 and "schema: a list is of gaps, one for each" in said.err


def test_an_empty_answer_is_explained(dinfer: CommandLine) -> None:
    said = dinfer("generate", "A question", "device=cpu", "max_new_tokens=32")
    counts, note = said.err.splitlines()
    assert (said.status, said.out) == (0, "\n") and counts.startswith("0 tokens, ")
    assert "the model ended it at once" in note and "trained on: word problems of eight kinds" in note


def test_a_sweep_says_its_points_and_leaves_nothing_behind(
    dinfer: CommandLine, checkpoint: str, elsewhere: Path
) -> None:
    said = dinfer("generate", "a", checkpoint, "max_new_tokens=4", "-m", "decoder.threshold=0.1,0.9", "cache=none,dual")
    assert said.status == 0 and len(SUMMARY.findall(said.err)) == 4
    headings = [line.split()[-2:] for line in said.out.splitlines() if line.startswith("# ")]
    assert headings == [
        [f"decoder.threshold={bar}", f"cache={cache}"] for bar in (0.1, 0.9) for cache in ("none", "dual")
    ]
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize("text", NASTY)
def test_any_question_is_a_text(text: str) -> None:
    args = Namespace(words=["cache=dual", text, "decodr=x"], literal=[], overrides=["watch=true"])
    names = {"cache", "decoder", "prompt"}
    assert divided(args, lambda: names, takes_text=True) == (text, ["watch=true", "cache=dual", "decodr=x"])


@pytest.mark.rest(but=5)
@pytest.mark.parametrize("text", ["${oc.env:HOME}", "a=b", " 'spaces' \\\n", *AFTER_DASHES])
def test_a_text_reaches_the_model_unchanged(
    text: str, dinfer: CommandLine, pipe: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, encode = [], Pipeline.encode

    def recorded(self, prompt, **given):  # type: ignore[no-untyped-def]
        asked.append(prompt)
        return encode(self, prompt, **given)

    monkeypatch.setattr(Pipeline, "encode", recorded)
    monkeypatch.setattr(generate, "pipeline", lambda config: pipe)
    literal = ["--", text] if text in AFTER_DASHES else [text]
    said = dinfer("generate", "max_new_tokens=2", *literal)
    assert said.status == 0 and SUMMARY.fullmatch(said.err.strip()), said.err
    assert {*asked} == {text}


def test_a_text_on_standard_input_is_the_text(dinfer: CommandLine, checkpoint: str) -> None:
    lines = [["infill", "-"], ["generate", "-", "max_new_tokens=2"]]
    for (command, *rest), text in zip(lines, ("a=b [MASK:2]\nc", "decoder=x"), strict=True):
        piped = dinfer(command, *rest, checkpoint, stdin=f"{text}\n")
        given = dinfer(command, checkpoint, *rest[1:], "--", text)
        assert (piped.status, piped.out) == (0, given.out) and SUMMARY.search(piped.err)
    twice = dinfer("generate", "a", "-", checkpoint, stdin="b")
    assert twice.status == 2 and "2 texts are given, 'a' and 'b'" in twice.err


def test_gaps_are_filled(dinfer: CommandLine, checkpoint: str) -> None:
    for line, gaps in (
        ((r"ab [MASK:3]cd \[MASK:9] [MASK:2]", checkpoint, "sampling.temperature=0.5", "sampling.seed=4"), 2),
        (("text='[MASK:4]'", checkpoint), 1),
    ):
        said = dinfer("infill", *line)
        assert said.status == 0 and SUMMARY.search(said.err), said
        assert re.findall(r"^\[(\d)\] ", said.err, re.MULTILINE) == [str(i + 1) for i in range(gaps)]
        assert gaps == 1 or ("[MASK:9]" in said.out and said.out.startswith("ab "))


def test_likelihoods_of_a_file(dinfer: CommandLine, checkpoint: str, tmp_path: Path) -> None:
    file, lines = tmp_path / "pairs.jsonl", [{"prompt": "a b", "answer": "c d"}, {"prompt": [3, 4], "answer": [5]}]
    file.write_text("\n".join(map(json.dumps, lines)))
    line = ("likelihood", str(file), "options={samples:4}", "per_token=true", checkpoint)
    first, again = dinfer(*line), dinfer(*line)
    assert first.status == 0 and first.out == again.out and first.err.startswith("2 answers by elbo"), first
    found = [json.loads(text) for text in first.out.splitlines()]
    assert [each["tokens"] for each in found] == [len(each["per_token"]) for each in found] and found[1]["tokens"] == 1
    assert all(each["likelihood"] == pytest.approx(sum(each["per_token"])) and each["likelihood"] < 0 for each in found)
    for wrong, message in (
        ([*lines, {"prompt": "a"}], "line 3 must be an object with prompt and answer"),
        ([{"prompt": 3, "answer": "a"}], "line 1: prompt must be a text or a list of token ids"),
        ([], "has no lines"),
    ):
        file.write_text("\n".join(map(json.dumps, wrong)))
        said = dinfer(*line)
        assert said.status == 2 and message in said.err, said
    file.write_text(json.dumps(lines[1]))
    for name, message in (("ebpo", "is bidirectional"), ("tracerl", "`steps`"), ("elbow", "Did you mean 'elbo'")):
        said = dinfer("likelihood", str(file), f"estimator={name}", checkpoint)
        assert said.status == 2 and message in said.err and not said.out, said


def test_slots_are_read(dinfer: CommandLine, checkpoint: str) -> None:
    said = dinfer("read", "a", "answer='b [SLOT:x]'", "slots={x:[c,d]}", checkpoint)
    assert said.status == 0 and re.match("1 slot, 1 forward,", said.err), said
    found = json.loads(said.out)
    assert found["text"] == f"b {found['slots']['x']['choice']}" and [*found["slots"]["x"]["probabilities"]] == [
        "c",
        "d",
    ]


@pytest.mark.rest(but=15)
@pytest.mark.parametrize(("args", "expected"), WRONG, ids=[" ".join(args)[:60] for args, _ in WRONG])
def test_a_wrong_input_is_answered_with_one_line_and_status_2(
    args: list[str], expected: str, dinfer: CommandLine, checkpoint: str
) -> None:
    said = dinfer(*(checkpoint if arg == CHECKPOINT else arg for arg in args))
    assert (said.status, said.out) == (2, "")
    assert said.err.startswith("dinfer: ") and expected in said.err
    assert len(said.err.splitlines()) == 1


def test_a_wrong_input_has_a_traceback_when_debugging(dinfer: CommandLine) -> None:
    with pytest.raises(ValueError, match="must be between 0 and 1"):
        dinfer("generate", "a", "decoder.threshold=2", DINFER_DEBUG="1")


def test_processes_of_torchrun_do_not_all_answer(dinfer: CommandLine) -> None:
    said = dinfer("generate", "What?", WORLD_SIZE="2", RANK="1")
    assert said.status == 2 and said.out == "" and "set runtime.tensor_parallel=2, or start without" in said.err


def test_a_launcher_of_a_cluster_names_the_extra(dinfer: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where it is not installed, when Hydra knows of no such choice."""
    said = dinfer("generate", "a", "-m", "hydra/launcher=submitit_remote")
    assert said.status == 2 and "pip install 'dinfer[cluster]'" in said.err


@pytest.mark.parametrize(
    ("change", "message"),
    [(None, "header"), ("{", "is not JSON"), ('{"model_type": "gpt2"}', "gpt2"), ('{"model_type": "llada"}', "json")],
)  # fmt: skip
def test_a_broken_checkpoint_is_named(change: str | None, message: str, dinfer: CommandLine, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "broken")
    if change is None:
        (folder / "model.safetensors").write_bytes(b"no tensors")
    else:
        (folder / "config.json").write_text(change)
    said = dinfer("generate", "a", f"model.checkpoint={folder}")
    assert (said.status, len(said.err.splitlines())) == (2, 1) and message in said.err


def test_the_configuration_can_be_shown_and_extended(dinfer: CommandLine, checkpoint: str, tmp_path: Path) -> None:
    own = tmp_path / "it's mine"
    (own / "decoder").mkdir(parents=True)
    (own / "decoder" / "bold.yaml").write_text("defaults: [threshold, _self_]\nthreshold: 0.25\n")
    line = ["generate", "a", "decoder=bold"]
    shown = dinfer(*line, "--config-dir", str(own), "--cfg", "job")
    assert shown.status == 0 and "threshold: 0.25" in shown.out and "max_new_tokens: 128" in shown.out
    assert dinfer(*line, f"--config-dir={own}", "--cfg=job") == shown
    assert "threshold: 0.25" in dinfer(*line, "-cd", str(own), "-c", "job", "-p", "decoder").out
    ran = dinfer(*line, "--config-dir", str(own), checkpoint, "max_new_tokens=2")
    assert ran.status == 0 and SUMMARY.search(ran.err)
    assert "Did you mean 'bold'?" in dinfer("generate", "a", "decoder=bald", "--config-dir", str(own)).err
    (tmp_path / "other" / "cache").mkdir(parents=True)
    (tmp_path / "other" / "cache" / "cool.yaml").write_text("defaults: [none, _self_]\n")
    both = ("--config-dir", str(own), "--config-dir", str(tmp_path / "other"), "cache=cool")
    assert "threshold: 0.25" in dinfer(*line, *both, "--cfg", "job").out
    files = (f"out={tmp_path}/trace.json", "compare.decoder=bold")
    traced = dinfer("trace", "a", "--config-dir", str(own), checkpoint, "max_new_tokens=2", *files)
    assert traced.status == 0, traced.err
    preset = (f"out={tmp_path}/two.json", "cache=dual", "compare.recipe=careful")
    beside = dinfer("trace", "a", checkpoint, "max_new_tokens=2", *preset)
    assert beside.status == 0 and "dual" in beside.out + beside.err and "none" in beside.out + beside.err, beside.err
    for way in ("defaults", "searchpath", "plugins"):
        assert dinfer("generate", "--info", way).status == 0
    linked = "runtime.page=${max_new_tokens}", "--cfg", "job"
    assert "page: ${max_new_tokens}" in dinfer("generate", *linked).out
    assert "page: 128" in dinfer("generate", *linked, "--resolve").out


def test_a_preset_may_say_how_it_is_run_but_not_beside_others(dinfer: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text("# @package _global_\nruntime: {rows: 3}\n")
    own = ("--config-dir", str(tmp_path))
    assert "rows: 3\n" in dinfer("generate", "a", "recipe=mine", *own, "--cfg", "job").out
    assert "rows: 5\n" in dinfer("generate", "a", "recipe=mine", "runtime.rows=5", *own, "--cfg", "job").out
    (tmp_path / "in.jsonl").write_text("")
    said = dinfer("batch", str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"), "recipes=[mine]", *own)
    assert said.status == 2 and "mine sets runtime" in said.err


@pytest.mark.parametrize("line", [["--hydra-help"], ["eval", "--hydra-help"]])
def test_hydras_own_help(line: list[str], dinfer: CommandLine) -> None:
    said = dinfer(*line)
    assert said.status == 0 and "hydra/launcher: basic" in said.out


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_names(shell: str, dinfer: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/dinfer"])
    script = dinfer("-sc", f"install={shell}")
    assert script.status == 0 and "complete" in script.out and "dinfer" in script.out
    assert dinfer("-sc", f"uninstall={shell}").status == 0
    assert "unknown completion 'install=bsh'. Did you mean 'install=bash'?" in dinfer("-sc", "install=bsh").err
    for typed, expected, other in (
        ("dinfer gen", {"generate", "list"}, "decoder="),
        ("dinfer generate ", {"decoder=", "max_new_tokens=", "runtime."}, "generate"),
        ("dinfer generate decoder=thr", {"decoder=threshold", "decoder=threshold_95"}, "decoder=fixed"),
        ("dinfer generate 'a question?' --watch decoder=fixed decoder.st", {"decoder.steps="}, "decoder.threshold="),
        ("dinfer generate --wa", {"--watch", "--cfg"}, "watch"),
        ("dinfer generate decoder=[ ", set(), "decoder="),
        ("dinfer list dec", set(), "decoder="),
        ("dinfer nosuch dec", set(), "decoder="),
    ):
        said = dinfer("-sc", f"query={shell}", COMP_LINE=typed, COMP_POINT=str(len(typed)))
        assert (said.status, said.err) == (0, ""), typed
        assert expected <= {*said.out.split()} and other not in said.out.split(), typed


def test_the_log_level(caplog: pytest.LogCaptureFixture) -> None:
    import logging

    log = logging.getLogger("dinfer.core.loading.checkpoint")
    for flags, seen in (([], "w"), (["-v"], "iw"), (["-vv"], "diw"), (["-v", "--verbose"], "diw"), (["-q"], "")):
        for line in (["list", "cache", *flags], [*flags, "list", "cache"]):
            with loggers_kept():
                main(line)
                caplog.clear()
                for level, text in ((logging.DEBUG, "d"), (logging.INFO, "i"), (logging.WARNING, "w")):
                    log.log(level, text)
            assert "".join(record.message for record in caplog.records) == seen, line


def test_watching_paints_on_a_terminal(dinfer: CommandLine, checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without colours it prints a line a step, to stderr."""
    line = ("generate", "How many?", "--watch", checkpoint, "max_new_tokens=12", "iteration.block=8", "delay=0")
    parent, child = pty.openpty()
    with open(child, "w") as terminal, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        patch.delenv("NO_COLOR", raising=False)
        painted = dinfer(*line, TERM="xterm-256color")
        plain = dinfer(*line, NO_COLOR="1")
    seen = os.read(parent, 1 << 16).decode()
    assert painted.status == plain.status == 0
    assert "step   1" in seen and "How many?" in seen and "░" in seen and "active block" in seen
    assert f"{ESCAPE}[1;30;42m" in seen, "fresh tokens have a colour of their own"
    assert SUMMARY.fullmatch(painted.err.strip())
    found = SUMMARY.search(plain.err)
    steps = re.findall(r"^step +(\d+) \w+ +\+\d+ +\d+/12 \|", plain.err, re.MULTILINE)
    assert found and [int(step) for step in steps] == list(range(1, int(found[2]) + 1))
    assert ESCAPE not in plain.err


def test_the_demo_prints_an_example_and_a_table(dinfer: CommandLine, checkpoint: str) -> None:
    said = dinfer("demo", "count=3", checkpoint, "max_new_tokens=24", "decoder=fixed", "decoder.steps=4", COLUMNS="40")
    assert said.status == 0
    assert "the answer is" in said.out and ESCAPE not in said.out
    for row in ("fixed steps=32", "threshold 0.9", "threshold 0.5", "fixed steps=4"):
        assert re.search(rf"^{row} +\d+\.\d% +\d/3 +\d", said.out, re.MULTILINE), row


def test_trace_writes_a_page_and_its_data_for_two_recipes(dinfer: CommandLine, checkpoint: str, tmp_path: Path) -> None:
    settings = [checkpoint, "max_new_tokens=16", "decoder.threshold=0.5", "iteration.block=8"]
    files = f"out=[{tmp_path}/a.html,{tmp_path}/a.json]"
    said = dinfer("trace", "</script> a=b", *settings, files, "compare.decoder=fixed", "compare.decoder.steps=4")
    assert (said.status, said.out) == (0, "") and f"wrote {tmp_path}/a.html" in said.err
    found = json.loads((tmp_path / "a.json").read_text())
    assert found["prompt"] == "</script> a=b"
    first, second = (run["recipe"] for run in found["runs"])
    assert (first["decoder"]["name"], first["decoder"]["threshold"]) == ("threshold", 0.5)
    assert (second["decoder"]["name"], second["decoder"]["steps"]) == ("fixed", 4)
    assert first["cache"] == second["cache"] and second["iteration"]["block"] == 8
    assert "<!doctype html>" in (tmp_path / "a.html").read_text()
    swept = dinfer("trace", "a", *settings, f"out={tmp_path}/b.json", "-m", "cache=none,dual", "compare.decoder=fixed")
    assert swept.status == 0
    runs = [json.loads((tmp_path / f"b-{index}.json").read_text())["runs"] for index in (0, 1)]
    assert [[run["recipe"]["cache"]["name"] for run in pair] for pair in runs] == [["none"] * 2, ["dual"] * 2]
    assert [[run["recipe"]["decoder"]["name"] for run in pair] for pair in runs] == [["threshold", "fixed"]] * 2
