"""The scripts in examples/ run and show what they say."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

from dinfer.core.loading.files import boxed

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.skipif("tiny" not in boxed(), reason="the model in the box is not here yet")


def shown(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *args: str) -> str:
    monkeypatch.setattr(sys, "argv", [name, *args])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


def test_every_example_is_described_and_run_here() -> None:
    described = re.findall(r"`python examples/(\w+\.py)`", (EXAMPLES / "README.md").read_text())
    assert sorted(described) == sorted(path.name for path in EXAMPLES.glob("*.py"))
    assert all(f'"{name}"' in Path(__file__).read_text() for name in described)


@pytest.mark.rest
def test_compare_decoders(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    head, *rows = shown("compare_decoders.py", capsys, monkeypatch, "--count", "4").splitlines()
    assert head.split()[:2] == ["decoder", "accuracy"] and len(rows) == 5
    nfe = {row.split("  ")[0]: float(row.split()[-2]) for row in rows}
    assert nfe["threshold 0.7"] < nfe["threshold 0.9"] < nfe["fixed 32"]


def test_write_a_decoder(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    out = shown("write_a_decoder.py", capsys, monkeypatch)
    forwards = [int(number) for number in re.findall(r"(\d+) forwards", out)]
    assert len(forwards) == 3 and forwards[2] < forwards[1]
    assert "Apart(threshold=0.3)" in out


def test_infill(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    out = shown("infill.py", capsys, monkeypatch)
    assert "in the gap: ['195']" in out and "now 195 - 59 = 136\n  now 136 - 87 = 49" in out
    assert re.search(r"forward \d+: 0 masks left", out)


@pytest.mark.rest
def test_trl_grpo(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trl")
    out = shown("trl_grpo.py", capsys, monkeypatch, "--steps", "1")
    assert re.search(r"step 1: reward [0-9.]+, loss", out) and "weights of version 1" in out


@pytest.mark.rest
def test_verl_rollout(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    out = shown("verl_rollout.py", capsys, monkeypatch)
    assert re.findall(r"step (\d): [5-8] of 8 responses differ, version (\d)", out) == [("0", "0"), ("1", "1")]


@pytest.mark.rest
def test_trainer_over_http(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    out = shown("trainer_over_http.py", capsys, monkeypatch, "--rounds", "1")
    assert "samples of version 0" in out and "the server has version 1" in out
