"""Generated code: what passes, what does not, and what it cannot do."""

from __future__ import annotations

import os
import re
import socket
import time
from pathlib import Path

import evaluate
import pytest

from evaluations.sandbox import (
    CODE_EVAL,
    WAYS,
    Limits,
    blocks,
    filled,
    in_sandbox,
    pass_at,
    pass_at_1,
    run,
    warn_of_gaps,
)

USUAL = Limits(seconds=60, megabytes=512)  # which nothing here takes, however busy the machine
SHORT = Limits(seconds=1, megabytes=512)


@pytest.mark.parametrize(
    ("program", "remark"),
    [
        ("assert 1 + 1 == 3, 'no'", "AssertionError: no"),
        ("this is no Python", "SyntaxError: invalid syntax"),
        ("import sys\nsys.exit(0)", "ended early, status 0"),
        ("import os\nos._exit(0)", "ended early, status 0"),
        ("while True: pass", "timed out"),
        ("x = bytearray(1 << 30)", "MemoryError"),
        ("open('big', 'wb').write(bytes(1 << 26))", "OSError: .*too large"),
        ("input()", "EOFError"),
        ("import os\nos.kill(os.getpid(), 9)", "ended early, status -9"),
    ],
)
def test_what_fails(program: str, remark: str) -> None:
    found = run(program, SHORT if remark == "timed out" else USUAL)
    assert not found.passed
    assert re.search(remark, found.remark), found.remark


def test_what_passes() -> None:
    assert run("def f(x):\n    return x + 1\nassert f(1) == 2\nprint('noise')", USUAL).passed
    assert run("import math, re, collections\nassert __name__ == '__main__'", USUAL).passed


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    """Its folder goes, the environment stays outside, and processes that it started are ended."""
    secret = tmp_path / "alive"
    code = "import os\nassert 'SECRET' not in os.environ\nopen('here', 'w').write('x')\nprint(os.getcwd())"
    os.environ["SECRET"] = "1"
    try:
        assert run(code, USUAL).passed
    finally:
        del os.environ["SECRET"]
    later = f"import time; time.sleep(1); open({str(secret)!r}, 'w')"
    assert run(f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {later!r}])", USUAL).passed
    time.sleep(1.3)
    assert not secret.exists()


@pytest.mark.parametrize("way", WAYS)
def test_the_file_system_is_read_only_but_for_its_own_folder(way: str, tmp_path: Path) -> None:
    outside, old = tmp_path / "new", tmp_path / "old"
    old.write_text("kept")
    harmless = (
        "import os, tempfile\nopen('here', 'w').write('x')\nos.remove('here')\nos.mkdir('folder')\n"
        "tempfile.TemporaryFile().write(b'x')\nopen(os.devnull, 'w').write('x')"
    )
    assert run(harmless, USUAL, ways=(way,)).passed
    for harm in (
        f"open({str(outside)!r}, 'w')", f"open({str(old)!r}, 'a')", f"os.remove({str(old)!r})",
        f"os.truncate({str(old)!r}, 0)", f"os.mkdir({str(outside)!r})",
        f"os.rename({str(old)!r}, 'mine')", f"os.symlink('x', {str(outside)!r})",
    ):  # fmt: skip
        found = run(f"import os\n{harm}", USUAL, ways=(way,))
        if found.passed and harm.startswith("open"):
            pytest.skip(f"this kernel has no {way}")
        assert re.search("Permission denied|Read-only|cross-device", found.remark), (harm, found.remark)
    assert old.read_text() == "kept" and not outside.exists()


def test_what_is_not_guarded_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        warn_of_gaps(())
    assert caplog.text.count("generated code can write any file that you can") == 1
    assert "container" in caplog.text


def test_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        found = run(f"import socket\nsocket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 1)", USUAL)
    if found.passed:
        pytest.skip("this system lets no process give its network up")
    assert "unreachable" in found.remark


def test_limits_that_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"code\.seconds=0"):
        Limits(seconds=0)


def test_the_hubs_metric_is_replaced() -> None:
    """As lm-eval's code tasks use it."""
    usual = evaluate.load
    with in_sandbox(USUAL):
        metric = evaluate.load("code_eval")
        good, bad = "def add(a, b): return a + b", "def add(a, b): return a * b"
        tests = ["assert add(2, 3) == 5", "assert add(1, 1) == 2"]
        scores, runs = metric.compute(references=tests, predictions=[[good, bad], [bad, bad]], k=[1, 2, 3])
    assert evaluate.load is usual and CODE_EVAL.limits == USUAL
    assert scores == {"pass@1": 0.25, "pass@2": 0.5}
    assert [[outcome["passed"] for _, outcome in runs[i]] for i in (0, 1)] == [[True, False], [False, False]]


def test_pass_at_k() -> None:
    assert pass_at(1, 4, 1) == 0.25 and pass_at(2, 4, 1) == 0.5 and pass_at(4, 4, 1) == 1.0 and pass_at(2, 4, 0) == 0.0


def test_programs_are_taken_out_of_answers() -> None:
    fenced = "Here:\n```python\nx = 1\ny = 2\n```\nDone. ```z```"
    assert blocks([[fenced, "```\nx = 3", "x = 4"]], [{}]) == [["x = 1\ny = 2", "x = 3", "x = 4"]]
    assert filled([["B"]], [{"prompt": "A", "suffix": "C"}]) == [["ABC"]]
    assert pass_at_1(["assert x == 1"], [["x = 1"]]) == 1.0
