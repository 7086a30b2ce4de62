"""Whose commit stands beside a figure."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import dinfer
from dinfer.lab.provenance import commit


def repository(folder: Path) -> str:
    """A git repository with one file; its commit."""
    (folder / "file").write_text("first")
    for line in ("init -q", "add .", "-c user.name=a -c user.email=a@b commit -qm first"):
        subprocess.run(["git", *line.split()], cwd=folder, check=True)
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=folder, check=True, capture_output=True)
    return done.stdout.decode().strip()


def test_the_commit_is_that_of_dinfers_checkout_and_says_what_was_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DINFER_COMMIT", raising=False)
    found = repository(tmp_path)
    assert commit(tmp_path) == found
    (tmp_path / "file").write_text("second")
    assert commit(tmp_path) == f"{found}-dirty"
    monkeypatch.chdir(tmp_path)
    assert found not in commit(), "the repository one stands in is not dinfer's"


def test_an_installed_wheel_has_a_version_and_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also where its folder lies in a repository of the user's."""
    monkeypatch.delenv("DINFER_COMMIT", raising=False)
    repository(tmp_path)
    (tmp_path / "site-packages").mkdir()
    assert commit(tmp_path / "site-packages") == f"version {dinfer.__version__}"
    assert capfd.readouterr().err == ""
