"""The command line, as a subprocess from an installed wheel, outside the checkout."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
from pathlib import Path

import pytest
from support.command_line import CommandLine, install, write_checkpoint

from dinfer.demo.problems import generate
from dinfer.loading.hub import boxed

SUMMARY = re.compile(r"^(\d+) tokens, (\d+) forwards, \d+\.\d\d tokens per forward \(TPF\), \d+\.\d\d s$", re.MULTILINE)
ESCAPE = "\x1b"

NASTY = [
    '"', "'", "a=b", "x=5, what is x?", "decoder", "decoder.x", "1,2,3", "{a: b}, [c", "${oc.env:HOME}", r"\${x}",
    "a\\", r"a\'b\"c", "ünïcødé 漢字 🍎", "$(ls) `ls` %s", "~decoder", "+x", "@", "#no comment", "two\nlines = 3",
    "null", "<user>?", "(1 + 2) * 3 = ?", " spaces ", "?", "glob(*)", "threshold is what?",
]  # fmt: skip
AFTER_DASHES = ["--watch", "-m", "--", "- 3 = x", "decoder=fixed", "--help me", "--help"]

# Arguments, and what stderr must say. CHECKPOINT is filled in.
WRONG = [
    (["generat"], "unknown command 'generat'. Did you mean 'generate'? Known: audit, demo, "),
    (["generate"], "a question is needed"),
    (["generate", ""], "the prompt is empty"),
    (["generate", " \n"], "the prompt is empty"),
    (["generate", "a", "b"], "put one question in quotes"),
    (["generate", "a", "prompt=b"], "given twice"),
    (["generate", "prompt=[a,b]"], "must be a text"),
    (["generate", "a", "decoder=treshold"], "unknown decoder 'treshold'. Did you mean 'threshold'? Known: "),
    (["generate", "a", "cache=duel"], "unknown cache 'duel'. Did you mean 'dual'? Known: "),
    (["generate", "a", "iteration=blocks"], "unknown iteration 'blocks'. Did you mean 'blockwise'?"),
    (["generate", "a", "model=GSAI-ML/X"], "given as model.checkpoint=GSAI-ML/X"),
    (["generate", "a", "decoder.treshold=1"], "unknown option of decoder 'threshold': 'treshold'. Did you mean 'thre"),
    (["generate", "a", "decoder=factor", "decoder.threshold=1"], "unknown option of decoder 'factor': 'threshold'"),
    (["generate", "a", "+decoder.foo=1"], "unknown option of decoder 'threshold': 'foo'"),
    (["generate", "a", "treshold=1"], "unknown setting 'treshold'. Did you mean 'decoder.threshold'? Known: cache,"),
    (["generate", "a", "foo=1"], "unknown setting 'foo'"),
    (["generate", "treshold=1"], "unknown setting 'treshold'"),
    (["generate", "a", "runtime.row=1"], "unknown setting of runtime: 'row'. Did you mean 'rows'?"),
    (["generate", "a", "--wach"], "unknown flag '--wach'. Did you mean '--watch'?"),
    (["generate", "a", "--cfg", "jobs"], "unknown value of --cfg: 'jobs'. Did you mean 'job'?"),
    (["generate", "a", "--cfg"], "--cfg needs a value"),
    (["generate", "a", "--config-dir", "nowhere"], "there is no such folder"),
    (["generate", "a", "decoder.threshold=[0.5"], "is not a valid override"),
    (["generate", "a", "decoder.threshold=0.5,0.9"], "has several values: add -m"),
    (["generate", "a", "hydra.run.foo=1"], "hydra.run.foo"),
    (["generate", "a", "decoder.threshold=high"], "decoder.threshold='high' must be a number"),
    (["generate", "a", "decoder.threshold=1.5"], "must be a probability, between 0 and 1"),
    (["generate", "a", "decoder=fixed", "decoder.steps=0"], "decoder.steps=0 must be at least 1"),
    (["generate", "a", "iteration.block=0"], "iteration.block=0 must be at least 1"),
    (["generate", "a", "iteration.align=3"], "iteration.align=3 must be true or false"),
    (["generate", "a", "cache.interval=-1"], "cache.interval=-1 must be 0"),
    (["generate", "a", "runtime.rows=0"], "runtime.rows=0 must be at least 1"),
    (["generate", "a", "runtime.page=x"], "runtime.page='x' must be an integer"),
    (["generate", "a", "runtime.graphs=true", "device=cpu", "CHECKPOINT"], "runtime.graphs=True needs a CUDA device"),
    (["generate", "a", "device=gpu", "CHECKPOINT"], "device='gpu' is not known"),
    (["generate", "a", "device=cuda:99", "CHECKPOINT"], "device='cuda:99'"),
    (["generate", "a", "dtype=int8", "CHECKPOINT"], "dtype='int8' is not known; use one of float32"),
    (["generate", "a", "model.stop_ids=[x]"], "model.stop_ids=['x'] must be a list, each an integer"),
    (["generate", "a", "model.checkpoint=/no/such/folder"], "unknown checkpoint '/no/such/folder'"),
    (["generate", "a", "model.checkpoint=."], "has no config.json"),
    (["generate", "a", "max_new_tokens=0", "CHECKPOINT"], "max_new_tokens=0 must be at least 1"),
    (["generate", "a", "max_new_tokens=1.5", "CHECKPOINT"], "max_new_tokens=1.5 must be an integer"),
    (["generate", "a", "max_new_tokens=999", "CHECKPOINT"], "exceed the model's 256 positions"),
    (["generate", "word " * 99, "CHECKPOINT"], "exceed the model's 256 positions"),
    (["generate", "a", "watch=3", "CHECKPOINT"], "watch=3 must be true or false"),
    (["generate", "a", "--watch", "delay=-1", "CHECKPOINT"], "delay=-1.0 must not be negative"),
    (["generate", "a", "sampling.temperature=-1"], "sampling.temperature=-1.0 must be 0"),
    (
        ["generate", "a", "sampling.temperatur=1"],
        "unknown option of sampling 'standard': 'temperatur'. Did you mean 'temp",
    ),
    (["generate", "a", "decoder=remasking", "sampling.temperature=1", "CHECKPOINT"], "cannot honour sampling.temperat"),
    (["audit", ""], "the prompt is empty"),
    (["audit", "a", "prompt=b"], "given twice"),
    (["infill"], "a text with gaps is needed"),
    (["infill", "a", "text=b"], "given twice"),
    (["infill", "no gap", "CHECKPOINT"], "has no gap"),
    (["infill", "a [MASK:0] b", "CHECKPOINT"], "'[MASK:0]' is no gap"),
    (["list", "decoders"], "unknown registry 'decoders'. Did you mean 'decoder'? Known: model, iteration, decoder"),
    (["trace"], "a question is needed"),
    (["trace", "a", "out=trace.txt"], "out=trace.txt must end in .html"),
    (["trace", "a", "out=[]"], "out=[] names no file"),
    (
        ["trace", "a", "compare.decodr=fixed", "CHECKPOINT"],
        "to compare: 'decodr'. Did you mean 'decoder'",
    ),
    (["trace", "a", "compare.decoder=fixd", "CHECKPOINT"], "unknown decoder 'fixd'. Did you mean 'fixed'"),
    (
        ["trace", "a", "compare.decoder=factor", "compare.decoder.threshold=1", "CHECKPOINT"],
        "option of decoder 'factor'",
    ),
    (["trace", "a", "compare=fixed"], "does not say what to change"),
    (["demo", "why?"], "this command takes no text"),
    (["demo", "count=0"], "count=0 must be at least 1"),
    (["demo", "count=few"], "count='few' must be an integer"),
    (["demo", "families=[cooking]"], "choose some of"),
    (["demo", "compare=[{name: treshold}]"], "unknown decoder 'treshold'"),
    (["demo", "compare=[3]"], "compare=[3] must be a list of decoders"),
    (["generate", "a", "runtime=3"], "runtime=3 must be settings"),
    (["generate", "a", "decoder=fixed", "decoder.steps=99999999999999999999", "CHECKPOINT"], "is too large"),
]


@pytest.fixture(scope="module")
def dinfer(tmp_path_factory: pytest.TempPathFactory) -> CommandLine:
    return install(tmp_path_factory.mktemp("installed"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"model.checkpoint={write_checkpoint(tmp_path_factory.mktemp('a checkpoint'))}"


def in_terminal(dinfer: CommandLine, *args: str, interrupt_after: str = "", **environment: str) -> tuple[int, str]:
    """Runs a command line in a pseudo-terminal; sends Ctrl-C once it has printed `interrupt_after`."""
    parent, child = pty.openpty()
    process = subprocess.Popen(
        [*dinfer.program, *args], cwd=dinfer.cwd, stdin=child, stdout=child, stderr=child, start_new_session=True,
        env=dinfer.environment(TERM="xterm-256color", LINES="40", **environment),
        # A shell starts background jobs, such as this test run may be, deaf to Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    os.close(child)
    seen = b""
    try:
        while chunk := os.read(parent, 4096):
            seen += chunk
            if interrupt_after and interrupt_after.encode() in seen:
                process.send_signal(signal.SIGINT)
                interrupt_after = ""
    except OSError:  # how Linux says that the other end is closed
        pass
    os.close(parent)
    return process.wait(timeout=60), seen.decode(errors="replace")


def test_help_version_and_list_need_no_checkpoint_and_no_transformers(dinfer: CommandLine) -> None:
    for args, expected in (
        ((), ["generate", "demo", "list", "usage: dinfer"]),
        (("--help",), ["usage: dinfer", "decoder.threshold=0.8"]),
        (("--version",), ["dinfer 0."]),
        (("generate", "--help"), ["--watch", "max_new_tokens", "usage: dinfer generate"]),
        (("list", "decoder"), ["threshold *", "0.9", "Fast-dLLM, arXiv:2505.22618", "steps *"]),
    ):
        said = dinfer.run(*args, PYTHONPROFILEIMPORTTIME="1")
        assert said.status == 0, said.err
        for text in expected:
            assert text in said.out
        assert ESCAPE not in said.out
        assert not re.search(r"\| +transformers", said.err), args


def test_list_shows_every_registry_within_80_columns(dinfer: CommandLine) -> None:
    said = dinfer.run("list")
    assert said.status == 0 and said.err == ""
    for word in ("llada", "blockwise", "threshold", "fixed", "none", "prefix", "dual", "llada_8b_instruct", "tiny"):
        assert word in said.out
    assert max(map(len, said.out.splitlines())) <= 80


def test_generate_streams_an_answer_and_its_counts(dinfer: CommandLine, checkpoint: str) -> None:
    said = dinfer.run("generate", "How many?", checkpoint, "max_new_tokens=40", "iteration.block=16")
    found = SUMMARY.fullmatch(said.err.strip())
    assert said.status == 0 and found and 0 < int(found[2]) <= 40
    for way in ("max_new_tokens=40", "--watch"):
        again = dinfer.run(
            "generate", "-", checkpoint, way, "iteration.block=16", "max_new_tokens=40", stdin="How many?\n"
        )
        assert (again.status, again.out) == (0, said.out), "steps that are watched go to stderr"


def test_nothing_is_left_in_the_working_directory(dinfer: CommandLine, checkpoint: str) -> None:
    said = dinfer.run(
        "generate", "a", checkpoint, "max_new_tokens=4", "-m", "decoder.threshold=0.1,0.9", "cache=none,dual"
    )
    assert said.status == 0 and len(SUMMARY.findall(said.err)) == 4
    headings = [line for line in said.out.splitlines() if line.startswith("# ")]
    assert [("decoder.threshold=0.1" in h, "cache=none" in h) for h in headings] == [
        (True, True),
        (True, False),
        (False, True),
        (False, False),
    ]
    assert list(dinfer.cwd.iterdir()) == []


def test_any_question_reaches_the_model_unchanged(dinfer: CommandLine, checkpoint: str) -> None:
    settings = [checkpoint, "max_new_tokens=2"]
    lines = [["generate", text, *settings] for text in NASTY]
    lines += [["generate", *settings, "--", text] for text in AFTER_DASHES]
    for text, said in zip([*NASTY, *AFTER_DASHES], dinfer.run_all(lines), strict=True):
        assert said.status == 0 and SUMMARY.fullmatch(said.err.strip()), (text, said.err)
        assert set(said.asked) == {text}, text


def test_a_text_on_standard_input_is_the_text(dinfer: CommandLine, checkpoint: str) -> None:
    lines = [["infill", "-"], ["generate", "-", "max_new_tokens=2"]]
    for (command, *rest), text in zip(lines, ("a=b [MASK:2]\nc", "decoder=x"), strict=True):
        piped = dinfer.run(command, *rest, checkpoint, stdin=f"{text}\n")
        given = dinfer.run(command, checkpoint, *rest[1:], "--", text)
        assert (piped.status, piped.out) == (0, given.out) and SUMMARY.search(piped.err)
    twice = dinfer.run("generate", "a", "-", checkpoint, stdin="b")
    assert twice.status == 2 and "2 texts are given, 'a' and 'b'" in twice.err


def test_gaps_are_filled(dinfer: CommandLine, checkpoint: str) -> None:
    lines = [
        ["infill", r"ab [MASK:3]cd \[MASK:9] [MASK:2]", checkpoint, "sampling.temperature=0.5", "sampling.seed=4"],
        ["infill", "text='[MASK:4]'", checkpoint],
    ]
    for said, gaps in zip(dinfer.run_all([*lines, *lines]), (2, 1, 2, 1), strict=True):
        assert said.status == 0 and SUMMARY.search(said.err), said
        assert re.findall(r"^\[(\d)\] ", said.err, re.MULTILINE) == [str(i + 1) for i in range(gaps)]
        assert gaps == 1 or ("[MASK:9]" in said.out and said.out.startswith("ab "))


def test_a_wrong_input_is_answered_with_one_line_and_status_2(dinfer: CommandLine, checkpoint: str) -> None:
    lines = [[checkpoint if arg == "CHECKPOINT" else arg for arg in args] for args, _ in WRONG]
    for (args, expected), said in zip(WRONG, dinfer.run_all(lines), strict=True):
        assert said.status == 2, (args, said)
        assert said.err.startswith("dinfer: ") and expected in said.err, (args, said.err)
        assert "Traceback" not in said.err and said.out == "", (args, said.out)
        assert len(said.err.splitlines()) <= 2, (args, said.err)


def test_a_wrong_input_has_a_traceback_when_debugging(dinfer: CommandLine) -> None:
    said = dinfer.run("generate", "a", "decoder.threshold=2", HYDRA_FULL_ERROR="1")
    assert said.status == 1 and "Traceback" in said.err and "must be a probability" in said.err


def test_a_broken_checkpoint_is_named(dinfer: CommandLine, tmp_path: Path) -> None:
    def broken(name: str, change: str) -> list[str]:
        folder = write_checkpoint(tmp_path / name)
        if change == "weights":
            (folder / "model.safetensors").write_bytes(b"no tensors")
        else:
            (folder / "config.json").write_text(change)
        return ["generate", "a", f"model.checkpoint={folder}"]

    said = dinfer.run_all(
        [
            broken("a", "weights"),
            broken("b", "{"),
            broken("c", '{"model_type": "gpt2"}'),
            broken("d", '{"model_type": "llada"}'),
        ]
    )
    assert [(s.status, len(s.err.splitlines())) for s in said] == [(2, 1)] * 4, said
    for text, one in zip(("header", "is not JSON", "gpt2", "config.json"), said, strict=True):
        assert text in one.err


def test_the_configuration_can_be_shown_and_extended(dinfer: CommandLine, checkpoint: str, tmp_path: Path) -> None:
    (tmp_path / "decoder").mkdir()
    (tmp_path / "decoder" / "bold.yaml").write_text("defaults: [threshold, _self_]\nthreshold: 0.25\n")
    shown, ran, wrong, joined = dinfer.run_all([
        ["generate", "a", "decoder=bold", "--config-dir", str(tmp_path), "--cfg", "job"],
        ["generate", "a", "decoder=bold", "--config-dir", str(tmp_path), checkpoint, "max_new_tokens=2"],
        ["generate", "a", "decoder=bald", "--config-dir", str(tmp_path)],
        ["generate", "a", "decoder=bold", f"--config-dir={tmp_path}", "--cfg=job"],
    ])  # fmt: skip
    assert shown.status == 0 and "threshold: 0.25" in shown.out and "max_new_tokens: 128" in shown.out
    assert ran.status == 0 and SUMMARY.search(ran.err)
    assert "Did you mean 'bold'?" in wrong.err
    assert joined == shown


def test_watching_paints_on_a_terminal(dinfer: CommandLine, checkpoint: str) -> None:
    args = ("generate", "How many?", "--watch", checkpoint, "max_new_tokens=12", "iteration.block=8", "delay=0")
    status, seen = in_terminal(dinfer, *args)
    assert status == 0, seen
    assert "step   1" in seen and "How many?" in seen and "░" in seen and "active block" in seen
    assert f"{ESCAPE}[1;30;42m" in seen, "fresh tokens have a colour of their own"
    assert SUMMARY.search(seen.replace("\r\n", "\n"))


def test_watching_without_a_terminal_or_colours_prints_a_line_a_step(dinfer: CommandLine, checkpoint: str) -> None:
    args = ("generate", "How many?", "--watch", checkpoint, "max_new_tokens=12", "iteration.block=8", "delay=9")
    plain = dinfer.run(*args)
    status, seen = in_terminal(dinfer, *args, NO_COLOR="1")
    assert plain.status == status == 0
    for text in (plain.err, seen.replace("\r\n", "\n")):
        found = SUMMARY.search(text)
        steps = re.findall(r"^step +(\d+) \w+ +\+\d+ +\d+/12 \|", text, re.MULTILINE)
        assert found and [int(step) for step in steps] == list(range(1, int(found[2]) + 1))
        assert ESCAPE not in text and max(map(len, text.splitlines())) <= 80


def test_ctrl_c_ends_it_quietly(dinfer: CommandLine, checkpoint: str) -> None:
    args = ("generate", "a", "--watch", checkpoint, "delay=0.5")
    status, seen = in_terminal(dinfer, *args, interrupt_after="step   2")
    assert status == 130 and "Traceback" not in seen
    assert f"{ESCAPE}[?25h" in seen, "the cursor is back"


def test_a_reader_that_goes_away_is_no_error(dinfer: CommandLine) -> None:
    line = " ".join(f"'{part}'" for part in [*dinfer.program, "list"])
    done = subprocess.run(
        f"{line} | true",
        shell=True,
        cwd=dinfer.cwd,
        env=dinfer.environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr == ""


def test_the_demo_prints_an_example_and_a_table(dinfer: CommandLine, checkpoint: str) -> None:
    said = dinfer.run("demo", "count=3", checkpoint, "max_new_tokens=24", "decoder=fixed", "decoder.steps=4")
    assert (said.status, said.err) == (0, "")
    assert "the answer is" in said.out and ESCAPE not in said.out
    for row in ("fixed steps=32", "threshold 0.9", "threshold 0.5", "fixed steps=4"):
        assert re.search(rf"^{row} +\d+\.\d% +\d/3 +\d", said.out, re.MULTILINE), row
    assert max(map(len, said.out.splitlines())) <= 120


@pytest.mark.skipif("tiny" not in boxed(), reason="the model in the box is not here yet")
def test_the_model_in_the_box_answers_from_the_wheel(dinfer: CommandLine) -> None:
    problem = generate("heldout", 1, 0)[0]
    said = dinfer.run("generate", problem.question, "decoder=fixed")
    assert said.status == 0 and "Answer:" in said.out and SUMMARY.fullmatch(said.err.strip())


def test_trace_writes_a_page_and_its_data_for_two_recipes(dinfer: CommandLine, checkpoint: str, tmp_path: Path) -> None:
    settings = [checkpoint, "max_new_tokens=16", "decoder.threshold=0.5", "iteration.block=8"]
    files = f"out=[{tmp_path}/a.html,{tmp_path}/a.json]"
    said = dinfer.run("trace", "</script> a=b", *settings, files, "compare.decoder=fixed", "compare.decoder.steps=4")
    assert (said.status, said.out) == (0, "") and f"wrote {tmp_path}/a.html" in said.err
    found = json.loads((tmp_path / "a.json").read_text())
    assert found["prompt"] == "</script> a=b"
    first, second = (run["recipe"] for run in found["runs"])
    assert (first["decoder"]["name"], first["decoder"]["threshold"]) == ("threshold", 0.5)
    assert (second["decoder"]["name"], second["decoder"]["steps"]) == ("fixed", 4)
    assert first["cache"] == second["cache"] and second["iteration"]["block"] == 8
    assert "<!doctype html>" in (tmp_path / "a.html").read_text()
    swept = dinfer.run("trace", "a", *settings, f"out={tmp_path}/b.json", "-m", "cache=none,dual")
    assert swept.status == 0
    caches = [json.loads((tmp_path / f"b-{i}.json").read_text())["runs"][0]["recipe"]["cache"]["name"] for i in (0, 1)]
    assert caches == ["none", "dual"]
