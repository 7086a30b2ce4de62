"""Kernels are compiled beside each other before a step launches them; and what cannot be is left to the launch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.launches import path
from support.matrix import completions, engine_for, outcome, requests_for
from support.models import tiny_model

from dinfer.core.recipe.recipe import Recipe, compose
from dinfer.core.step.state import BatchState
from dinfer.speed.startup.kernel_compiler import KernelCompiler

pytest.importorskip("triton")


@pytest.mark.rest
def test_all_kernels_of_a_step_and_of_those_that_follow_are_compiled_in_threads(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": path(), "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "support.compiled_ahead"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert (found["prepares for cpu"], found["prepares for cuda"]) == (False, True)
    assert found["imported"], "a request does not wait for imports"
    assert found["heavy"] == [], "torch's compiler takes seconds and 145 MB"
    assert len(found["first"]["kernels"]) == found["first"]["loaded"] > 10
    assert "MainThread" not in found["first"]["threads"]
    assert found["again"]["kernels"] == []
    assert (found["first"]["noted"], found["next start"]["noted"], found["other sizes"]["noted"]) == (1, 1, 2)
    assert found["one core"]["kernels"] == [], "it gains nothing"
    cursors = {"_lane_columns", "_option_columns", "_window_positions", "_active_rows", "_commit", "_finish"}
    assert cursors <= {*found["first"]["kernels"]}
    assert not cursors & {*found["two rows"]["kernels"]}, "what reads cursors is one kernel for any number of rows"
    assert found["broken"]["kernels"] == [] != found["mended"]["kernels"], "one error spoils nothing that comes later"
    assert found["after an interrupt"]["noted"] == found["mended"]["noted"] + 1
    assert found["switch interval"] == sys.getswitchinterval()
    assert found["collects"] == [True, False]
    assert found["in gluon"] == ["_attend_wide"]
    assert found["steps"] == 0, "a step launches what was not compiled ahead"


LAUNCHER = """
#include <Python.h>
static PyObject *launch(PyObject *self, PyObject *args) { return PyLong_FromLong(NUMBER); }
static PyMethodDef methods[] = {{"launch", launch, METH_NOARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "__triton_launcher", "", -1, methods};
PyMODINIT_FUNC PyInit___triton_launcher(void) { return PyModule_Create(&module); }
"""


def test_a_launcher_keeps_its_functions_while_others_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel on an H200 once got the launcher of a kernel that another thread compiled."""
    from triton.runtime import build

    import dinfer.speed.startup.parallel_compiling  # noqa: F401 (it loads launchers from now on)

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def launcher(number: int) -> Any:
        return build.compile_module_from_src(LAUNCHER.replace("NUMBER", str(number)), "__triton_launcher")

    launcher(1)
    second = launcher(2)
    assert launcher(1).launch() == 1
    assert second.launch() == 2


def refuses(recipe: Recipe, device: torch.device) -> Any:
    raise RuntimeError("no memory")


@pytest.mark.parametrize("alloc", [refuses, BatchState.alloc])
def test_what_cannot_be_compiled_ahead_changes_nothing(alloc: Any) -> None:
    recipe = compose(tiny_model(), iteration={"name": "blockwise", "block": 8}, decoder="threshold", cache="dual")
    requests = requests_for(recipe)
    want = [outcome(completion) for completion in completions(engine_for(recipe), requests)]
    engine = engine_for(recipe)
    engine.runner.compiler = KernelCompiler(recipe, alloc, None)  # there is no card to compile for
    assert [outcome(completion) for completion in completions(engine, requests)] == want
