"""The kernels of languages against their torch references, on rows of several languages at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.languages import sweeps_of
from torch import Tensor

CUDA = torch.cuda.is_available()
pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu] if CUDA else []

from dinfer.core.kernels import dispatch  # noqa: E402
from dinfer.structure.compiler import compile_automaton  # noqa: E402
from dinfer.structure.constraint import regex  # noqa: E402
from dinfer.structure.kernels import languages  # noqa: E402
from dinfer.structure.kernels.lines import Line  # noqa: E402
from dinfer.structure.language import Language, Vocabulary, language  # noqa: E402

PATTERNS = ("ab|cd", "[a-j]{3,6}", r'\{"(a|b)":\d{1,3}(,\d)*"\}', "(ab|é)*x?", "abc(12)+")
TEXTS = [*"abcdefghijx012345{}:,", "ab", "cd", "abc", "12", "é", '{"', '":', '"}', '"', "1,"]
WORDS = Vocabulary([*(text.encode() for text in TEXTS), None], frozenset({len(TEXTS)}), frozenset({len(TEXTS)}))
ACTIVE, DEVICE = 7, "cuda" if CUDA else "cpu"


def word_language(pattern: str) -> Language:
    return language(compile_automaton(regex(pattern))[0], WORDS)


@pytest.fixture(params=["triton", "c"])
def both(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, Any]]:
    """What the kernels give, and what torch gives."""
    if request.param == "c" and (CUDA or not dispatch.has_native()):
        pytest.skip("no kernels in C here")

    def given(work: Callable[[], Any]) -> tuple[Any, Any]:
        found = []
        for use in (request.param, "torch"):
            monkeypatch.setattr(languages, "use_triton", lambda *_, use=use: use == "triton")
            monkeypatch.setattr(
                languages, "native_languages", lambda _, use=use: dispatch.in_c() if use == "c" else None
            )
            found.append(work())
        return found[0], found[1]

    return given


def some_lines(sweeps: languages.Sweeps, seed: int) -> tuple[Line, dict[str, Tensor]]:
    """A line of each lane, and a choice: tokens that a completion has there, and some that none has."""
    device = sweeps.language_B.device
    draw = torch.Generator().manual_seed(seed)
    lanes = len(sweeps.language_B)

    def number(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=draw).to(device)

    vocab = sweeps.languages.class_GV.shape[1]
    line = Line(
        token_BX=number(vocab, lanes, ACTIVE),
        open_BX=number(4, lanes, ACTIVE) > 0,
        outside_BX=number(8, lanes, ACTIVE) == 0,
        state_B=number(2, lanes),
        room_B=number(4, lanes),
    )
    likely_BXV = torch.rand(lanes, ACTIVE, vocab, generator=draw).to(device)
    fits_BXV = sweeps.allowed(line).gather(2, sweeps.class_BV.long()[:, None].expand(-1, ACTIVE, -1))
    token_BX = (likely_BXV + (number(4, lanes, ACTIVE) > 0)[..., None] * fits_BXV).argmax(-1)
    choice = {
        "commit_BX": number(3, lanes, ACTIVE) > 0,
        "token_BX": token_BX,
        "confidence_BX": number(4, lanes, ACTIVE) / 4,
    }
    return line, choice


@pytest.mark.rest(but=1)
@pytest.mark.parametrize("seed", range(5))
def test_kernels_find_the_sets_and_choices_of_the_reference(seed: int, both: Any) -> None:
    sweeps = sweeps_of([word_language(pattern) for pattern in PATTERNS], DEVICE)
    line, choice = some_lines(sweeps, seed)
    row_N6 = torch.stack([sweeps.language_B, line.state_B, *torch.arange(4).expand(len(PATTERNS), 4).to(DEVICE).T], 1)
    pos_BX = torch.arange(ACTIVE, device=DEVICE).expand_as(line.token_BX)

    def left() -> Tensor:
        """A lane that was live and is not, one that was not, one that leaves nothing, and others."""
        after_B, rows = torch.tensor([2, ACTIVE, 0, 5, 3], device=DEVICE), row_N6.clone()
        live_B, still_B = (torch.tensor(flags, device=DEVICE) for flags in ([1, 0, 1, 1, 1], [0, 1, 1, 1, 1]))
        regions = torch.zeros_like(after_B), after_B, live_B > 0, still_B > 0
        slot_B = torch.arange(len(PATTERNS), device=DEVICE).flip(0)
        sweeps.leave(rows, slot_B, line, line.token_BX, pos_BX, line.open_BX, regions)
        return rows

    def masked() -> Tensor:
        """In some positions no token is left, or only the one to keep."""
        logits_RLV = torch.zeros(*line.token_BX.shape, sweeps.class_BV.shape[1], device=DEVICE)
        logits_RLV[line.open_BX] = float("-inf")
        keep = seed % 3 - 1
        logits_RLV[..., keep] = 1.0
        return sweeps.masked(logits_RLV, sweeps.allowed(line), line.outside_BX, keep, revive=seed % 2 == 0)

    for work in (
        lambda: sweeps.allowed(line),
        lambda: sweeps.admitted(line, **choice),
        lambda: sweeps.settled(line, **choice),
        lambda: languages.placed(row_N6 - 1, torch.arange(len(PATTERNS), device=DEVICE), pos_BX),
        left,
        masked,
    ):
        got, want = both(work)
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_lanes_without_a_constraint_may_stand_at_a_language_with_more_states(both: Any) -> None:
    """Its sets had no room, and were written over those of other lanes."""
    sweeps = sweeps_of([word_language("[a-j]{3,6}"), word_language("[a-j]{3,60}")], DEVICE)
    sweeps = languages.Sweeps(sweeps.languages, sweeps.language_B, 16, sweeps.pairs, sweeps.edges)
    for seed in range(4):
        line, choice = some_lines(sweeps, seed)
        line = replace(line, outside_BX=torch.zeros_like(line.outside_BX), room_B=line.room_B + 60)
        line.outside_BX[1] = True
        got, want = both(lambda: [found[0] for found in sweeps.settled(line, **choice)])  # noqa: B023
        assert all(torch.equal(*pair) for pair in zip(got, want, strict=True)), seed


def test_choices_are_taken_whole_in_part_and_not_at_all() -> None:
    """The cases above would mean little if all ended alike."""
    sweeps, shares = sweeps_of([word_language(pattern) for pattern in PATTERNS], DEVICE), set()
    for seed in range(12):
        line, choice = some_lines(sweeps, seed)
        taken_B, asked_B = sweeps.admitted(line, **choice).sum(1), choice["commit_BX"].sum(1)
        shares |= {*torch.where(taken_B == asked_B, 2, (taken_B > 0).long()).tolist()}
    assert shares == {0, 1, 2}
