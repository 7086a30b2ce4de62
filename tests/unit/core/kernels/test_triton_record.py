"""The Triton kernels of records against their torch reference, as in test_triton.py."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.kernels import CUDA, DEVICE, draw

triton = pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu] if CUDA else []

from dinfer.core.step.record import Raw, Said, Written, decided, said_of  # noqa: E402
from dinfer.core.terms.stats import Draw  # noqa: E402
from dinfer.kernels.triton import record as kernels  # noqa: E402
from dinfer.rollouts.abilities.recording import Record, Trail  # noqa: E402

LANES, BLOCKS, LENGTH, SLOTS, CAPACITY, VOCAB = 5, 2, 3, 6, 21, 50


@pytest.fixture(autouse=True)
def reference(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setenv("DINFER_KERNELS", "torch")


def flags(*shape: int) -> torch.Tensor:
    return torch.rand(shape, device=DEVICE) < 0.5


def step() -> tuple[Any, Any]:
    """A step and its decision. The first and the third lane are of one row; the last one is left alone."""
    rows = LANES * BLOCKS
    draws = Draw(
        draw(rows, LENGTH, VOCAB), draw(rows, LENGTH, VOCAB),
        torch.tensor([0.0, 1, 0.5, 2, 1] * 2, device=DEVICE)[:, None].double(), flags(rows, 1), *[torch.zeros(1)] * 3,
    )  # fmt: skip
    slot_B, live_B = torch.tensor([2, 0, 2, 4, 5], device=DEVICE), torch.tensor([1, 1, 1, 1, 0], device=DEVICE) > 0
    at_B = torch.tensor([0, 0, 7, 0, 0], device=DEVICE)
    pos_RL = (at_B[:, None] + torch.arange(6, device=DEVICE)).view(rows, LENGTH)
    old_RL, new_RL = (torch.randint(0, 3, pos_RL.shape, device=DEVICE) for _ in range(2))
    view = SimpleNamespace(pos_RL=pos_RL, tokens_RL=old_RL, masked_RL=flags(rows, LENGTH))
    broken_B = torch.arange(LANES, device=DEVICE) == 3
    commits = SimpleNamespace(tokens_RL=new_RL, open_RL=flags(rows, LENGTH) & view.masked_RL, broken_B=broken_B)
    lanes = SimpleNamespace(slot_B=slot_B, live_B=live_B, steps_B=torch.arange(3, 8, device=DEVICE))
    made = SimpleNamespace(lanes=lanes, view=view, commits=commits)
    notes = {Raw: Raw(draw(rows, LENGTH, VOCAB), draws)}
    return SimpleNamespace(lanes=lanes, shape=SimpleNamespace(blocks=BLOCKS), notes=notes), made


def test_what_changes_and_what_was_said_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "VOCAB_PIECE", 16)
    given, made = step()
    want, view, commits = decided(given, made), made.view, made.commits
    values = view.pos_RL, view.tokens_RL, commits.tokens_RL, view.masked_RL, commits.open_RL
    got_RL = kernels.changed(made.lanes.live_B, commits.broken_B, *values)
    assert torch.equal(got_RL.view(LANES, -1), want.pos_BX) and (got_RL >= 0).any() and (got_RL < 0).any()
    raw, draws = given.notes[Raw]
    for drawn, wanted_RL in ((draws, got_RL >= 0), (None, None)):
        given.notes[Raw] = Raw(raw, drawn)
        here = slice(None) if wanted_RL is None else wanted_RL
        said = said_of(given, commits.tokens_RL, wanted_RL)
        own = kernels.said(raw, drawn, commits.tokens_RL, wanted_RL)
        for got, reference in zip(own, (said.logit, said.log_sum, said.drawn), strict=True):
            torch.testing.assert_close(got[here], reference[here], atol=1e-5, rtol=1e-5, equal_nan=True)


def test_steps_and_events_are_kept() -> None:
    """Several times, until events have no room."""
    canvas: Any = SimpleNamespace(tokens_NS=torch.zeros(SLOTS, CAPACITY, dtype=torch.int64, device=DEVICE))
    plain, own = Trail(canvas), Trail(canvas)
    for trail in (plain, own):
        trail.want(Record.EVENTS)
    assert own.row_N4S is not None and own.event_NE5 is not None and own.count_N is not None
    own.event_NE5 = own.event_NE5[:, :15].contiguous()
    plain.event_NE5 = own.event_NE5.clone()
    for turn in range(3):
        given, made = step()
        record: Written = replace(decided(given, made), step_B=made.lanes.steps_B + turn)
        said = Said(*(draw(*record.pos_BX.shape) for _ in range(3)))
        plain.keep(record, said)
        plain.log(record, said)
        where = record.slot_B, record.step_B, record.pos_BX, record.open_BX
        kernels.keep(own.row_N4S, *where, (said.logit, said.log_sum, said.drawn))
        lanes = record.pos_BX, record.old_BX, record.new_BX, record.masked_BX, record.open_BX
        kernels.log(own.event_NE5, own.count_N, record.slot_B, record.step_B, lanes, (said.logit, said.log_sum))
    assert int(own.count_N.max()) > 14
    for name in ("row_N4S", "event_NE5"):  # but for the scratch columns
        got, want = getattr(own, name), getattr(plain, name)
        cut = (slice(None), slice(0, 14)) if name == "event_NE5" else (..., slice(0, CAPACITY - 1))
        assert torch.equal(got[cut], want[cut]), name
    assert plain.count_N is not None and torch.equal(own.count_N, plain.count_N)
