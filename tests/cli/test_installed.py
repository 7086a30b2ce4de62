"""What needs a process of its own: the command of an installed wheel, what it imports, and Ctrl-C."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from filelock import FileLock
from support.command_line import Installed, Said, install

from dinfer.demo.problems import generate

# Command lines in one process: their exit statuses, and what they have imported.
QUICK = """
import contextlib, io, json, sys
from dinfer.__main__ import main
for line in json.loads(sys.argv[1]):
    status = 0
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            main(line)
        except SystemExit as end:
            status = end.code
    assert bool(err.getvalue()) == bool(status) and bool(out.getvalue()) != bool(status), (line, out, err)
    heavy = [name for name in ("torch", "transformers", "numpy", "triton") if name in sys.modules]
    print(json.dumps([line, status, heavy]))
"""
LINES = [
    [],
    ["--help"],
    ["--version"],
    ["list"],
    ["models"],
    ["models", "--json"],
    *(
        [command, "--help"]
        for command in ("audit", "batch", "chat", "demo", "eval", "generate", "infill", "list", "plot", "tune")
    ),
    ["generate", "a", "--cfg", "job"],
    ["tune", "--cfg", "hydra"],
    ["generate", "--hydra-help"],
    ["-sc", "install=bash"],
]
WRONG = [
    ["generat"], ["generate"],
    ["generate", "a", "decoder=treshold"], ["generate", "a", "decoder.treshold=1"], ["generate", "a", "treshold=1"],
    ["generate", "a", "+decoder.foo=1"], ["generate", "a", "decoder.threshold=high"], ["generate", "a", "--wach"],
    ["generate", "a", "-m", "decoder=threshold,factr"], ["generate", "a", "-m", "decoder.threshold="],
    ["plot", "nowhere"],
    *([*line, "model.checkpoint=/no/where"] for line in (["generate", "a"], ["infill", "[MASK:1]"], ["trace", "a"])),
    *([name, "model.checkpoint=/no/where"] for name in ("audit", "demo", "eval", "tune")),
]  # fmt: skip
# A module that takes long to import, and Ctrl-C while it does.
INTERRUPTED = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n"


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """One for all processes of a test run, since building it takes a while."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "installed"
    with FileLock(f"{folder}.lock"):
        return Installed(folder / "site", folder / "elsewhere") if folder.exists() else install(folder)


def test_torch_is_imported_only_when_something_is_computed(installed: Installed) -> None:
    said = installed.python("-c", QUICK, json.dumps([*LINES, *WRONG]))
    assert (said.status, said.err) == (0, ""), said.out
    expected = [[line, 0, []] for line in LINES] + [[line, 2, []] for line in WRONG]
    assert [json.loads(line) for line in said.out.splitlines()] == expected


@pytest.mark.rest  # the test of Ctrl-C runs it, too
def test_the_model_in_the_box_answers(installed: Installed) -> None:
    problem = generate("heldout", 1, 0)[0]
    said = installed("generate", problem.question)
    assert said.status == 0 and "Answer:" in said.out, said.err
    assert list(installed.cwd.iterdir()) == []


def test_python_without_docstrings_has_the_help_and_the_package_is_a_program(installed: Installed) -> None:
    usual = installed("--help")
    assert usual.status == 0 and "fills gaps in a text" in usual.out
    assert installed.python("-m", "dinfer", "--help") == usual == installed("--help", PYTHONOPTIMIZE="2")


def test_what_the_wheel_holds(installed: Installed) -> None:
    """No plugin, which every other program of Hydra's would import; lm-eval's command."""
    assert not (installed.site / "hydra_plugins").exists()
    assert (installed.site / "bin" / "dinfer-lm-eval").is_file()
    assert (installed.site / "dinfer" / "conf" / "presets.yaml").is_file()


def test_ctrl_c_ends_it_quietly(installed: Installed) -> None:
    said = installed.in_terminal("generate", "a", "--watch", "delay=2", "device=cpu", interrupt_after="step   2")
    assert said.status == 130 and "Traceback" not in said.out
    assert "\x1b[?25h" in said.out, "the cursor is back"


@pytest.mark.parametrize("module", ["hydra", "torch"])
def test_ctrl_c_while_modules_are_imported(module: str, installed: Installed, tmp_path: Path) -> None:
    (tmp_path / f"{module}.py").write_text(INTERRUPTED)
    said = installed("generate", "a", PYTHONPATH=f"{tmp_path}:{installed.site}")
    assert said == Said(130, "", "")
