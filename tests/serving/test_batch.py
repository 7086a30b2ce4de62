"""A file of requests: every line is answered once, as the server answers it, whatever happens meanwhile."""

from __future__ import annotations

import gzip
import json
import os
import resource
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

from support.command_line import ROOT, CommandLine
from support.serving import QUESTION, tiny

from dinfer.core.engine.engine import Engine
from dinfer.core.engine.errors import RankFailed

QUICK = ("max_new_tokens=16", "device=cpu")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def dinfer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(monkeypatch, capsys)


def question(number: int) -> str:
    return QUESTION.replace("12", str(number + 12))


def line(number: int, **fields: Any) -> str:
    body = {"model": "tiny", "messages": [{"role": "user", "content": question(number)}], "max_tokens": 16}
    return json.dumps(
        {"custom_id": f"q{number}", "method": "POST", "url": "/v1/chat/completions", "body": body | fields}
    )


def write(*lines: str) -> None:
    Path("in.jsonl").write_text("".join(f"{line}\n" for line in lines))


def answers(path: str = "out.jsonl") -> dict[str, Any]:
    content = Path(path).read_text()
    assert content.endswith("\n")
    found = [json.loads(line) for line in content.splitlines()]
    assert len({answer["id"] for answer in found}) == len(found), "a line is answered twice"
    return {answer["custom_id"]: answer for answer in found}


def text(answer: dict[str, Any]) -> str:
    assert answer["error"] is None and answer["response"]["status_code"] == 200
    return answer["response"]["body"]["choices"][0]["message"]["content"]


def test_lines_are_answered_as_the_library_does(dinfer: CommandLine) -> None:
    write(line(0), "", line(1), line(2, dinfer={"threshold": 0.5}))
    said = dinfer("batch", "in.jsonl", "out.jsonl", *QUICK)
    assert said.status == 0 and said.out == "" and "3 answers, 0 errors among them, and 0 from before" in said.err
    got = answers()
    options = [{}, {}, {"threshold": 0.5}]
    asked = [[{"role": "user", "content": question(i)}] for i in range(3)]
    want = tiny().generate(asked, max_new_tokens=16, options=options)
    assert [text(got[f"q{i}"]) for i in range(3)] == [result.text for result in want]
    assert got["q0"]["response"]["request_id"].startswith("req-")


def test_what_is_wrong_with_a_line_is_its_answer(dinfer: CommandLine) -> None:
    good = json.loads(line(0))
    wrong = {
        "it is not JSON": "{", "custom_id is missing": json.dumps(good | {"custom_id": None}),
        "method='GET'": json.dumps(good | {"custom_id": "a", "method": "GET"}),
        "url='/v1/embeddings'": json.dumps(good | {"custom_id": "b", "url": "/v1/embeddings"}),
        "is that of line 1 too": line(0), "body.stream=True": line(1, stream=True),
        "temperature=-1": line(2, temperature=-1), "model='gpt'": line(3, model="gpt"),
        "a line must be one request in braces, not 7": "7",
    }  # fmt: skip
    wrong["custom_id"] = wrong.pop("custom_id is missing")
    write(line(0), *wrong.values())
    assert dinfer("batch", "in.jsonl", "out.jsonl", *QUICK).status == 0
    got = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    said = [answer["error"]["message"] for answer in got if answer["error"]]
    assert len(got) == 1 + len(wrong) and len(said) == len(wrong)
    for what in wrong:
        assert any(what in message for message in said), (what, said)
    statuses = {a["custom_id"]: a["response"] and a["response"]["status_code"] for a in got if a["error"]}
    assert statuses["q2"] == 400 and statuses["q3"] == 404 and statuses["a"] is None


@pytest.mark.rest
def test_lines_may_be_of_any_api(dinfer: CommandLine) -> None:
    turns = {"messages": [{"role": "user", "content": question(0)}]}
    asked = [{"type": "choice", "instructions": "Which?", "choices": [{"value": "a"}, {"value": "b"}]}]
    bodies: dict[str, Any] = {
        "messages": turns | {"max_tokens": 16, "temperature": 1.0},
        "responses": {"input": question(0), "max_output_tokens": 16},
        "decisions": {"input": question(0), "questions": asked}, "read": turns | {"choice": ["1", "2"]},
        "systemone": {"state": question(0), "questions": {"q": {"type": "noul", "instructions": "Is it so?"}}},
        "fim/completions": {"prompt": "1 + 1 =", "suffix": " done", "max_tokens": 4},
    }  # fmt: skip
    lines = [
        {"custom_id": path, "url": f"/v1/{path}", "body": {"model": "tiny"} | body} for path, body in bodies.items()
    ]
    lines.append({"custom_id": "wrong", "url": "/v1/messages", "body": {"model": "tiny", **turns}})
    write(*(json.dumps({"method": "POST"} | one) for one in lines))
    said = dinfer("batch", "in.jsonl", "out.jsonl", *QUICK)
    assert said.status == 0 and "7 answers, 1 error" in said.err, said.err
    got = answers()
    assert all(got[path]["error"] is None and got[path]["response"]["body"]["model"] == "tiny" for path in bodies), got
    wrong = got["wrong"]
    assert wrong["response"]["body"]["type"] == "error" and "max_tokens" in wrong["error"]["message"]
    formed = dinfer("batch", "in.jsonl", "formed.jsonl", "regex='[0-9]+'", *QUICK)
    assert formed.status == 0, formed.err
    assert "takes no form of the command" in answers("formed.jsonl")["responses"]["error"]["message"]
    assert answers("formed.jsonl")["fim/completions"]["response"]["body"]["choices"][0]["text"].isdecimal()


STOPS = """
import os, signal, sys
from dinfer.__main__ import main
from dinfer.lab.outputs import JsonLines

def write(output, line):
    before(output, line)
    written.append(line)
    if len(written) == 3:
        os.kill(os.getpid(), signal.SIGSTOP)

before, written, JsonLines.write = JsonLines.write, [], write
main(sys.argv[1:])
"""  # a command that stops, as if it were slow, when it has written three answers


def test_a_kill_loses_and_repeats_nothing(dinfer: CommandLine) -> None:
    write(*(line(i) for i in range(20)))
    with subprocess.Popen(
        [sys.executable, "-c", STOPS, "batch", "in.jsonl", "out.jsonl", "runtime.rows=1", *QUICK],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        try:
            assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1]), "it ended before it was killed"
            running = dinfer("batch", "in.jsonl", "out.jsonl", *QUICK)  # two at once
        finally:
            process.kill()
    assert running.status == 2 and "another process writes" in running.err
    out, kept = Path("out.jsonl"), 3
    whole = out.read_bytes()
    assert whole.count(b"\n") == kept and whole.endswith(b"\n")
    out.write_bytes(whole + whole[:50])  # as if it had been killed within a line
    said = dinfer("batch", "in.jsonl", "out.jsonl", *QUICK)
    assert said.status == 0 and f"{20 - kept} answers, 0 errors among them, and {kept} from before" in said.err
    assert out.read_bytes().startswith(whole)
    got = answers()
    want = tiny().generate([[{"role": "user", "content": question(i)}] for i in range(20)], max_new_tokens=16)
    assert [text(got[f"q{i}"]) for i in range(20)] == [result.text for result in want]


def test_lines_without_a_form_of_their_own_take_the_command_s(dinfer: CommandLine) -> None:
    Path("form.json").write_text('{"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}')
    own, free = {"structured_outputs": {"choice": ["yes", "no"]}}, {"response_format": {"type": "text"}}
    call = {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required", "max_tokens": 64}
    write(line(0), line(1, **own), line(2, **free), line(3, **call))
    args = ("batch", "in.jsonl", "out.jsonl", *QUICK)
    assert dinfer(*args, "schema=form.json").status == 0
    got = answers()
    assert isinstance(json.loads(text(got["q0"]))["n"], int) and text(got["q1"]) in ("yes", "no")
    assert "structure" not in got["q2"]["response"]["body"]["usage"]["dinfer"]
    assert got["q3"]["response"]["body"]["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "f"
    said = dinfer(*args)
    assert said.status == 2 and "or of other settings" in said.err
    both = dinfer(*args, "overwrite=true", "schema=form.json", "regex=a")
    assert both.status == 2 and "regex and schema are both given" in both.err


def test_the_command_s_form_is_named_as_the_command_names_it(dinfer: CommandLine) -> None:
    Path("form.json").write_text('{"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}')
    Path("wrong.json").write_text('{"properties": {"n": {"$dynamicRef": "#m"}}}')
    write(line(0, ignore_eos=True), line(1, ignore_eos=True, guided_regex="a+"), line(2))
    args = ("batch", "in.jsonl", "out.jsonl", *QUICK)
    wrong = dinfer(*args, "schema=wrong.json")
    assert wrong.status == 2 and "schema: properties.n.$dynamicRef" in wrong.err and not Path("out.jsonl").exists()
    assert dinfer(*args, "schema=form.json", "posterior=true").status == 0
    got = answers()
    assert "contradicts schema," in got["q0"]["error"]["message"]
    assert "contradicts schema," in got["q0"]["response"]["body"]["error"]["message"]
    assert "contradicts guided_regex," in got["q1"]["error"]["message"]
    assert isinstance(json.loads(text(got["q2"]))["n"], int)


def test_a_run_goes_on_with_other_rows(dinfer: CommandLine) -> None:
    write(line(0), line(1, model="tiny:careful"))
    args = ("batch", "in.jsonl", "out.jsonl", "recipes=[careful]", *QUICK)
    assert dinfer(*args, "runtime.rows=1").status == 0
    said = dinfer(*args, "runtime.rows=2")
    assert said.status == 0 and "0 answers, 0 errors among them, and 2 from before" in said.err


def test_a_recipe_of_ones_own_is_a_model(dinfer: CommandLine) -> None:
    Path("presets/recipe").mkdir(parents=True)
    Path("presets/recipe/mine.yaml").write_text("# @package _global_\ndecoder:\n  threshold: 0.5\n")
    write(line(0, model="tiny:mine"))
    said = dinfer("batch", "in.jsonl", "out.jsonl", "--config-dir", "presets", "recipes=[mine]", *QUICK)
    assert said.status == 0 and "1 answer, 0 errors among them" in said.err, said.err
    (want,) = tiny().generate(
        [[{"role": "user", "content": question(0)}]], max_new_tokens=16, options={"threshold": 0.5}
    )
    assert text(answers()["q0"]) == want.text


@pytest.mark.parametrize(
    "command", [["batch", "in.jsonl", "out.jsonl"], ["serve", "replicas=1", "port=0"]], ids=" ".join
)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("decoder: {threshold: 3}", "decoder.threshold=3.0 must be between 0 and 1"),
        ("decoder: {nonsense: 3}", "unknown option of decoder 'threshold': 'nonsense'"),
        ("cache: {refresh: 3}", "unknown option of cache"),
    ],
)
def test_what_is_wrong_with_a_recipe_names_it(
    dinfer: CommandLine, command: list[str], options: str, message: str
) -> None:
    if command[0] == "serve":
        pytest.importorskip("ray")
    Path("presets/recipe").mkdir(parents=True)
    Path("presets/recipe/mine.yaml").write_text(f"# @package _global_\n{options}\n")
    write(line(0))
    said = dinfer(*command, "--config-dir", "presets", "recipes=[careful,mine]", *QUICK)
    assert said.status == 2 and f"dinfer: recipes: mine: {message}" in said.err


@pytest.mark.parametrize("own", ['{"mine": 1}', '{"id": "mine", "custom_id": "a"}'])
def test_a_file_of_another_kind_stays_as_it_is(dinfer: CommandLine, own: str) -> None:
    write(line(0))
    Path("out.jsonl").write_text(own)
    said = dinfer("batch", "in.jsonl", "out.jsonl", *QUICK)
    assert said.status == 2 and "line 1, is not an answer of dinfer batch" in said.err
    assert Path("out.jsonl").read_text() == own


def test_a_full_disk_keeps_whole_answers(dinfer: CommandLine) -> None:
    write(*(json.dumps(json.loads(line(i)) | {"custom_id": f"{i}" * 20_000}) for i in range(6)))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (70_000, limits[1]))  # bytes that a file may have
    try:
        said = dinfer("batch", "in.jsonl", "out.jsonl", "runtime.rows=1", *QUICK)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert said.status == 2 and "out.jsonl: File too large. " in said.err and "To go on: dinfer batch" in said.err
    assert 0 < len(answers()) < 6
    assert dinfer("batch", "in.jsonl", "out.jsonl", *QUICK).status == 0
    assert len(answers()) == 6


def test_an_engine_that_hangs_ends_the_command(dinfer: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    awake = threading.Event()

    def hang(engine: Engine) -> list[Any]:
        if not awake.wait(120):
            raise RuntimeError("nobody has noticed")
        return []

    monkeypatch.setattr(Engine, "step", hang)
    write(line(0), line(1))
    try:
        said = dinfer("batch", "in.jsonl", "out.jsonl", "round_timeout=0.2", *QUICK)
    finally:
        awake.set()
    assert said.status == 1 and "longer than 0.2 seconds" in said.err and "out.jsonl keeps 0 answers" in said.err


def test_a_lost_rank_ends_the_command_with_one_error(dinfer: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(engine: Engine) -> list[Any]:
        raise RankFailed("rank 1 was killed")

    monkeypatch.setattr(Engine, "step", lose)
    write(line(0), line(1))
    said = dinfer("batch", "in.jsonl", "out.jsonl", *QUICK)
    assert said.status == 1 and "out.jsonl keeps 0 answers" in said.err and "To go on: dinfer batch" in said.err
    assert said.err.count("rank 1 was killed") == 1 and "Traceback" not in said.err


def test_a_pipe_goes_in_and_out(dinfer: CommandLine, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.write(writer, f"{line(0)}\n".encode())
    os.close(writer)
    out, into = os.pipe()
    said = dinfer("batch", f"/dev/fd/{reader}", f"/dev/fd/{into}", *QUICK)
    os.close(into)
    with os.fdopen(out) as file:
        assert text(json.loads(file.read())), said.err
    os.close(reader)


def test_a_named_pipe_is_opened_once(dinfer: CommandLine) -> None:
    write(line(0))
    os.mkfifo("out.jsonl")
    with ThreadPoolExecutor(1) as thread:
        read = thread.submit(Path("out.jsonl").read_text)
        assert dinfer("batch", "in.jsonl", "out.jsonl", *QUICK).status == 0
        assert text(json.loads(read.result()))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["in.jsonl"], "give two files, not 1"),
        (["in.jsonl.gz", "new.jsonl"], "in.jsonl.gz is no text in UTF-8, since it begins with b'\\x1f\\x8b"),
        (["utf16.jsonl", "new.jsonl"], "utf16.jsonl is no text in UTF-8"),
        (["nowhere.jsonl", "new.jsonl"], "nowhere.jsonl: No such file"),
        (["in.jsonl", "in.jsonl"], "is IN and OUT"),
        (["in.jsonl", "old.jsonl"], "old.jsonl, line 1, is not an answer of dinfer batch"),
        (["in.jsonl", "other.jsonl"], "has answers to other lines, or of other settings, such as custom_id='x'"),
        (["in.jsonl", "."], "Is a directory"),
        (["in.jsonl", "new.jsonl", "-m", "max_new_tokens=1,2"], "-m would write one file several times"),
        (["in.jsonl", "new.jsonl", "max_new_tokens=0"], "max_new_tokens=0 must be at least 1"),
        (["in.jsonl", "new.jsonl", "recipes=[nothing]"], "unknown recipe 'nothing'"),
    ],
)
def test_files_that_cannot_be_meant_are_refused(dinfer: CommandLine, args: list[str], message: str) -> None:
    write(line(0))
    Path("in.jsonl.gz").write_bytes(gzip.compress(line(0).encode()))
    Path("utf16.jsonl").write_text(line(0), encoding="utf-16-le")
    Path("old.jsonl").write_text("something of mine\n")
    Path("other.jsonl").write_text('{"id": "batch_req_1", "custom_id": "x"}\n')
    said = dinfer("batch", *args)
    assert said.status == 2 and message in said.err
    assert Path("old.jsonl").read_text() == "something of mine\n"


def test_lines_differ_and_a_file_of_errors_alone_fails(dinfer: CommandLine) -> None:
    same = json.loads(line(0, temperature=1.0))
    write(*(json.dumps(same | {"custom_id": f"q{i}"}) for i in range(2)))
    said = []
    for out in ("a.jsonl", "b.jsonl"):
        dinfer("batch", "in.jsonl", out, *QUICK)
        found = answers(out)
        said.append([found[name]["response"]["body"]["choices"][0]["message"]["content"] for name in ("q0", "q1")])
    assert said[0] == said[1] and said[0][0] != said[0][1], "seeds are those of the lines"
    write(line(0, top_p=7))
    failed = dinfer("batch", "in.jsonl", "c.jsonl", *QUICK)
    assert failed.status == 1 and "every line ended with an error; the first says: top_p=7" in failed.err
