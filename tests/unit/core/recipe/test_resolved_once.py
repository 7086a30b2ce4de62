"""An option is checked once on its way: its type, its range, what it cannot go with, and whom it makes."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from support.command_line import CommandLine, write_checkpoint
from support.serving import served

import dinfer
from dinfer.core import refusals, registry
from dinfer.core.decoders.threshold import Threshold
from dinfer.core.recipe.recipe import Recipe

ONCE = {"type", "range", "made", "search"}


def of_threshold(values: Any) -> bool:
    return "threshold" in values


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """How often the option `decoder.threshold` is looked at, in this thread and those that begin meanwhile."""
    found = Counter[str]()
    looks: dict[Any, tuple[str, Callable[[Any], bool]]] = {
        registry.typed.__code__: ("type", lambda its: its["prefix"] == "decoder." and of_threshold(its["values"])),
        registry.check_range.__code__: ("range", lambda its: its["kind"] == "decoder" and of_threshold(its["names"])),
        Threshold.__init__.__code__: ("made", lambda its: True),
        refusals.refused.__code__: ("search", lambda its: its["changed"] is None or "decoder" in its["changed"]),
        Recipe.resolve.__code__: ("resolve", lambda its: True),
    }

    def profile(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code in looks:
            name, counts = looks[frame.f_code]
            found[name] += counts(frame.f_locals)

    import threading

    before = sys.getprofile()
    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        yield found
    finally:
        sys.setprofile(before)
        threading.setprofile(None)  # type: ignore[arg-type]


@pytest.fixture
def command(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    monkeypatch.chdir(tmp_path)
    return CommandLine(monkeypatch, capsys)


def test_by_the_command_line(command: CommandLine, tmp_path: Any) -> None:
    folder = write_checkpoint(tmp_path / "a checkpoint")
    settings = ["decoder=threshold", "decoder.threshold=0.8", "iteration=blockwise", "cache=none"]
    with counted() as found:
        command("generate", f"model.checkpoint={folder}", *settings, "prompt=3 + 4", "max_new_tokens=8")
    assert found == {**dict.fromkeys(ONCE, 1), "resolve": 1}


def test_in_python() -> None:
    parts: dict[str, Any] = {"iteration": "blockwise", "cache": "none"}
    with counted() as found:
        pipe = dinfer.load("tiny", decoder={"name": "threshold", "threshold": 0.8}, **parts)
        pipe.generate("3 + 4", max_new_tokens=8)
    assert found == {**dict.fromkeys(ONCE, 1), "resolve": 1}
    with counted() as found:
        pipe.generate(["3 + 4", "5 + 6"], max_new_tokens=8, threshold=0.7)
    assert found == {"range": 1, "made": 1, "search": 1, "resolve": 1}


@pytest.mark.parametrize("held", [{}, {"regex": "[0-9]+"}], ids=["free", "held to a form"])
def test_over_http(held: dict[str, Any]) -> None:
    ask = {"model": "tiny", "messages": [{"role": "user", "content": "3 + 4"}], "max_tokens": 16, **held}
    with served() as client:
        client.ask("/v1/chat/completions", ask)
        with counted() as found:
            told = client.ask("/v1/chat/completions", ask | {"dinfer": {"threshold": 0.7}, "temperature": 0.5})
    assert told.status_code == 200 and found == {"range": 1, "made": 1, "search": 1, "resolve": 1}
