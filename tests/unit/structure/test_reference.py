"""The sets, the best completion, the posterior and the projection on a canvas, against all its fillings written out."""

from __future__ import annotations

import random
import re
from itertools import product

import numpy as np
import pytest

from dinfer.structure import Compiler, Language, Vocabulary, regex
from tests.support.structure_reference import OPEN, Row, best, posterior, step

TEXTS = [b"a", b"b", b"ab", b"ba", b"\xc3", b"\xa9", b"aab", None, None, None]
STOP, PAD, MASK = 7, 8, 9
VOCABULARY = Vocabulary(TEXTS, frozenset({STOP}), frozenset({STOP, PAD}))
PATTERNS = ["(ab|ba)*a?", "a{2,5}b|b+", "(é|a)+b?", "[^b]*b?", "abab|baba|"]


def accepted(pattern: str, filling: tuple[int, ...]) -> bool:
    text, stopped = b"", False
    for token in filling:
        if token in (STOP, PAD):
            if not stopped and token == PAD:
                return False
            stopped = True
        elif stopped or TEXTS[token] is None:
            return False
        else:
            text += TEXTS[token] or b""
    try:
        return re.fullmatch(pattern, text.decode()) is not None
    except UnicodeDecodeError:
        return False


@pytest.fixture(params=range(25))
def case(request: pytest.FixtureRequest) -> tuple[str, Language, list[int], np.ndarray, list[tuple[int, ...]]]:
    """A pattern, its language, a canvas, logits, and the accepted fillings."""
    rng = random.Random(request.param)
    pattern = PATTERNS[request.param % len(PATTERNS)]
    canvas = [rng.choice([OPEN, OPEN, OPEN, rng.randrange(9)]) for _ in range(4)]
    logits_XV = np.random.default_rng(request.param).normal(0, 2, (4, len(TEXTS)))
    choices = [range(len(TEXTS)) if token == OPEN else [token] for token in canvas]
    fillings = [filling for filling in product(*choices) if accepted(pattern, filling)]
    return pattern, Compiler(VOCABULARY).compile(regex(pattern)), canvas, logits_XV, fillings


def test_allowed_tokens_are_those_of_the_accepted_fillings(case: tuple) -> None:
    _, language, canvas, _, fillings = case
    row = Row(language, canvas)
    assert row.feasible == bool(fillings)
    for i in row.open():
        assert np.flatnonzero(row.allowed(i)).tolist() == sorted({filling[i] for filling in fillings})
    forced = {i: fillings[0][i] for i in row.open() if fillings and len({f[i] for f in fillings}) == 1}
    assert row.forced() == forced
    if canvas == [OPEN] * 4:
        assert (language.shortest <= 4) == bool(fillings)


def test_best_and_posterior_are_those_of_the_accepted_fillings(case: tuple) -> None:
    _, language, canvas, logits_XV, fillings = case
    row = Row(language, canvas)
    if not fillings:
        assert best(row, logits_XV, row.open()) is None
        return
    log_p_XV = logits_XV - np.log(np.exp(logits_XV).sum(1, keepdims=True))
    sums = np.array([sum(log_p_XV[i, filling[i]] for i in row.open()) for filling in fillings])
    found = best(row, logits_XV, row.open())
    assert found is not None
    assert found[1] == pytest.approx(sums.max())
    assert list(found[0].values()) == [fillings[sums.argmax()][i] for i in row.open()]
    log_z, marginals = posterior(row, logits_XV)
    assert log_z == pytest.approx(np.log(np.exp(sums).sum()))
    for i, got_V in marginals.items():
        want_V = np.zeros(len(TEXTS))
        np.add.at(want_V, [filling[i] for filling in fillings], np.exp(sums - log_z))
        assert got_V == pytest.approx(want_V, abs=1e-9)


def test_a_step_keeps_the_canvas_feasible_and_commits_something(case: tuple) -> None:
    _, language, canvas, logits_XV, fillings = case
    row = Row(language, canvas)
    while fillings and row.open():
        done = step(row, logits_XV, range(4), commits=3, mask=MASK)
        assert done.committed and done.committed[0] == (done.order[0], row.canvas[done.order[0]])
        assert any(all(t in (OPEN, f) for t, f in zip(row.canvas, filling, strict=True)) for filling in fillings)
        for i, token in done.skipped:  # it contradicts what was committed
            with_it = [f for f in fillings if all(t in (OPEN, x) for t, x in zip(row.canvas, f, strict=True))]
            assert token not in {filling[i] for filling in with_it}


def test_a_given_right_side_counts() -> None:
    language = Compiler(VOCABULARY).compile(regex("(ab)*"))
    row = Row(language, [OPEN, OPEN], language.distance_Q <= 1)
    texts = {TEXTS[t] for t in np.flatnonzero(row.allowed(1)) if t < 7}
    assert texts == {b"a", b"b", b"ab", b"ba"}  # one more position may end what these begin
