"""The posterior of a constraint, against the plain form of `tests.support.structure_reference`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.languages import sweeps_of

from dinfer.structure.abilities.posterior import class_weights, others
from dinfer.structure.compiler import compile_automaton
from dinfer.structure.constraint import regex
from dinfer.structure.kernels.lines import Line
from dinfer.structure.language import Vocabulary, language
from tests.support.structure_reference import OPEN, Row, posterior

TEXTS = [*"abcd12{}:,", "ab", "cd", "12", '"', "1,"]
WORDS = Vocabulary([*(text.encode() for text in TEXTS), None], frozenset({len(TEXTS)}), frozenset({len(TEXTS)}))
FOUND = [language(compile_automaton(regex(pattern))[0], WORDS) for pattern in ("ab|cd", "[a-d]{3,6}", "(1,)*12?")]


@pytest.mark.parametrize("seed", range(4))
def test_the_posterior_is_that_of_the_reference(seed: int) -> None:
    random, length = np.random.default_rng(seed), 6
    logits = random.normal(size=(len(FOUND), length, len(TEXTS) + 1)) * 2
    token_BX, open_BX = torch.full((len(FOUND), length), 0), torch.ones(len(FOUND), length, dtype=torch.bool)
    rows = []
    for lane, found in enumerate(FOUND):
        row = Row(found, [OPEN] * length, found.distance_Q <= 1)
        place = int(random.integers(length))
        token = int(np.flatnonzero(row.allowed(place))[0])
        row.put(place, token)
        token_BX[lane, place], open_BX[lane, place] = token, False
        rows.append(row)
    lanes, sweeps = len(FOUND), sweeps_of(FOUND)
    line = Line(token_BX, open_BX, torch.zeros_like(open_BX), torch.zeros(lanes).long(), torch.ones(lanes).long())
    own_BXV = torch.from_numpy(logits).log_softmax(-1)
    others_BXC, found_B = others(sweeps, line, class_weights(sweeps, line, own_BXV, sweeps.class_RLV(own_BXV)))
    assert found_B.all()
    for lane, row in enumerate(rows):
        for x, want_V in posterior(row, logits[lane])[1].items():
            got_V = (own_BXV[lane, x] + others_BXC[lane, x, row.language.class_V.astype(int)]).exp()
            np.testing.assert_allclose(got_V, want_V, atol=1e-9)
