"""The command line in this process, in a folder of its own, with a tiny checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.command_line import CommandLine, write_checkpoint


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def dinfer(elsewhere: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(monkeypatch, capsys)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint."""
    return write_checkpoint(tmp_path_factory.mktemp("a checkpoint"))


@pytest.fixture
def checkpoint(folder: Path) -> str:
    """The override that chooses it."""
    return f"model.checkpoint={folder}"
