"""What goes to stdout and what to stderr, streams that are full or closed, text that is no UTF-8, and Ctrl-C."""

from __future__ import annotations

import errno
import io
import os
import re
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.command_line import loggers_kept

import dinfer
from dinfer.__main__ import main
from dinfer.cli.terminal import Report, reported


def ended(args: list[str]) -> int | str | None:
    with pytest.raises(SystemExit) as end:
        main(args)
    return end.value.code


@pytest.mark.parametrize("more", [[], ["--watch"]])
def test_an_edited_answer_is_printed_once(folder: Path, more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    decoder = {"name": "joint_threshold", "threshold": 0.0, "edit_threshold": 0.0}
    pipe = dinfer.load(str(folder), decoder=decoder, cache="none", device="cpu")
    result = pipe.generate("How many?", max_new_tokens=12, trace=True)
    drafts = [pipe.decode(canvas[len(result.prompt_ids) :]) for canvas in result.trace]
    options = ["decoder=joint_threshold", "decoder.threshold=0", "decoder.edit_threshold=0", "cache=none", "device=cpu"]
    main(["generate", "How many?", "max_new_tokens=12", f"model.checkpoint={folder}", *options, *more])
    said = capsys.readouterr()
    assert len(set(drafts)) > 1 and said.out == f"{result.text}\n"
    assert re.search(r"^\d+ tokens, \d+ forwards", said.err, re.MULTILINE)


def test_a_full_stdout_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert ended(["list", "cache"]) == 2
    assert capsys.readouterr().err == "dinfer: standard output: No space left on device\n"


@contextmanager
def unread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A standard output whose reader has gone."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as pipe, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", pipe)
        yield


@pytest.mark.rest(but=7)
@pytest.mark.parametrize(
    ("line", "status"),
    [
        (["list", "cache"], 0), (["models", "llada2"], 0), (["models", "--json"], 0), (["help"], 0),
        (["inspect", "tiny"], 0), (["inspect", "FOLDER"], 3), (["generate", "--cfg", "job"], 0),
        (["generate", "a", "max_new_tokens=4", "MODEL"], 0), (["infill", "a [MASK:2]", "MODEL"], 0),
        (["audit", "a", "max_new_tokens=4", "MODEL", "out=FOLDER/audit"], 0), (["likelihood", "FILE", "MODEL"], 0),
        (["read", "a", "choice=[b,c]", "MODEL"], 0), (["demo", "MODEL"], 0),
    ],
)  # fmt: skip
def test_a_reader_that_goes_away_is_no_error(
    line: list[str], status: int, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    shutil.copy(folder / "config.json", tmp_path)  # without weights nobody knows whether it loads
    words = {"MODEL": f"model.checkpoint={folder}", "FILE": f"{tmp_path}/pairs.jsonl"}
    with pytest.raises(SystemExit) as end, unread(monkeypatch):
        main([words.get(word, word.replace("FOLDER", str(tmp_path))) for word in line])
        raise SystemExit(0)
    said = capsys.readouterr().err
    assert end.value.code == status and "Broken pipe" not in said and "Traceback" not in said
    if line[0] == "audit":
        assert (tmp_path / "audit.json").is_file()


def test_a_sweep_that_nobody_reads_says_where_it_ends(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with unread(monkeypatch):
        assert ended(["generate", "a", f"model.checkpoint={folder}", "-m", "cache=none,dual", "max_new_tokens=4"]) == 1
    assert re.search("nobody reads standard output any more: the sweep ends at .*cache=none", capsys.readouterr().err)


def test_a_pipe_that_is_not_standard_output_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end, reported():
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")
    assert end.value.code == 2 and "Broken pipe" in capsys.readouterr().err


def test_a_closed_stdout_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", None)
        assert ended(["list", "cache"]) == 2 and sys.stdout is None
    assert capsys.readouterr().err == "dinfer: standard output: it is closed\n"


def test_other_streams_that_are_closed_are_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdin", "stderr"):
        monkeypatch.setattr(sys, name, None)
    main(["list", "cache"])
    assert sys.stderr is None


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # as in UTF-8, and as in the C locale
def test_a_text_that_is_no_utf8(
    errors: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9"), "utf-8", errors))
    assert ended(["generate", "-"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and re.fullmatch("dinfer: standard input is not UTF-8: .*\n", said.err)
    for args in (["generate", "caf\udce9"], ["plot", "caf\udce9"]):
        assert ended(args) == 2
        assert capsys.readouterr().err == "dinfer: the argument 'caf\\udce9' is not UTF-8\n"
    assert ended(["generate", "caf\udcc3\udca9"]) == 2
    assert re.search("is UTF-8, but the locale is .*: set LC_ALL=C.UTF-8, or PYTHONUTF8=1", capsys.readouterr().err)


def test_the_second_interrupt_kills() -> None:
    with pytest.raises(SystemExit) as end, reported():
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    assert end.value.code == 130 and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupted_evaluation_says_how_to_go_on(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("lm_eval")
    monkeypatch.chdir(tmp_path)
    checkpoint = f"model.checkpoint={folder}"
    line = ["eval", "tasks=mini_turns", "limit=4", "max_new_tokens=8", checkpoint, "out=my runs", "overwrite=true"]
    usual = Report.at

    def at(self: Report, what: str, done: int = 0, *rest: object) -> None:
        if done == 2:
            signal.raise_signal(signal.SIGINT)
        usual(self, what, done, *rest)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(Report, "at", at)
        assert ended(line) == 130
    said = capsys.readouterr()
    assert said.out == "" and "interrupted; my runs keeps 2 answers. To go on: dinfer eval" in said.err
    again = shlex.split(said.err.strip().rpartition("To go on: ")[2])
    assert again == ["dinfer", *line[:-1]], "with overwrite=true it would begin anew"
    capsys.readouterr()
    main(again[1:])
    said = capsys.readouterr()
    assert "my runs keeps 2 answers of an earlier session, so only the others are computed" in said.err
    assert "are those of 2 sessions together" in said.out
    answers = next((tmp_path / "my runs").glob("*.answers-0.jsonl")).read_text()
    assert answers.count('"key"') == 4 and answers.count('"setup"') == 2


def test_what_is_wrong_is_told_before_anything_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def loaded(*given: object, **named: object) -> None:
        raise AssertionError("a model is loaded")

    monkeypatch.setattr("dinfer.core.pipeline.pipeline.load_network", loaded)
    (tmp_path / "file").write_text("")
    tune, serve = ["tune", f"preset={tmp_path}/conf/recipe/mine.yaml"], ["serve", "port=0"]
    batch = ["batch", f"{tmp_path}/file", f"{tmp_path}/out"]
    wrong: list[tuple[list[str], str]] = [
        (["trace", "a", f"out={tmp_path}/file/a.html"], "file: Not a directory"),
        (["audit", "a", f"out={tmp_path}/file/a"], "file: Not a directory"),
        (["eval", f"out={tmp_path}/file"], "file: Not a directory"),
        (["tune", f"preset={tmp_path}/file/recipe/mine.yaml"], "file/recipe: Not a directory"),
        ([*tune, f"out={tmp_path}"], f"{tmp_path}: Is a directory"),
        ([*tune, "trials=0"], "trials=0 must be at least 1"),
        ([*tune, "max_drop=-1"], "max_drop=-1.0 must be at"),
        ([*tune, "max_new_tokens=0"], "max_new_tokens=0 must be at least 1"),
        ([*tune, "space={decoder:3}"], "space.decoder=3 must say what of it"),
        ([*tune, "tasks=mini_gsm", "metric=foo"], "metric='foo': the task mini_gsm has"),
        (["audit", "a", "max_new_tokens=0"], "max_new_tokens=0 must be at least 1"),
        ([*batch, "adapters=3"], "adapters=3 must be names and values or null"),
        ([*batch, "adapters={a:/nowhere}"], "adapters: unknown checkpoint '/nowhere'"),
        ([*batch, "round_timeout=0"], "round_timeout=0.0 must be more than 0"),
        ([*batch, "name=a:b"], "without a colon"),
        ([*serve, "aliases=3"], "aliases=3 must be names and values or null"),
        ([*serve, "aliases={a:b}"], "aliases: 'a' stands for 'b', which is not served. Served: tiny"),
        ([*serve, "adapters={a:/nowhere}"], "adapters: unknown checkpoint '/nowhere'"),
        ([*serve, "calibration=3"], "calibration=3 must be names and values or null"),
        ([*serve, "cache=block", "recipes=[]"], "cache=block"),
        ([*serve, "quantize=foo"], "quantize='foo' is not known"),
    ]
    with loggers_kept():  # a server writes lines of JSON
        for args, message in wrong:
            assert ended(args) == 2
            assert message in capsys.readouterr().err


def test_progress_is_a_line_now_and_then_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with Report(every=0.01) as report:
        report.at("mini_gsm", 3, 50, "12 steps")
        deadline = time.monotonic() + 240
        said = ""
        while said.count("\n") < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
            said += capsys.readouterr().err
    assert "mini_gsm 3 of 50 12 steps, 0 s\n" in said
