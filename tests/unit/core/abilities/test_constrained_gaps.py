"""Gaps that are filled within a language, with text on both sides: as a whole, or each gap by itself."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.examples import examples
from support.matrix import completions, engine_for, general, settings_of
from support.models import MASK
from support.scripted import Scripted
from unit.core.abilities.test_constraints import BYTES, PATTERNS, REFUSED, adversarial, bound, language_of, recipes

from dinfer.core.engine.request import Request, Resolved
from dinfer.core.recipe.recipe import compose
from dinfer.core.registry import DECODERS
from dinfer.core.step.request import DEFAULTS
from dinfer.structure.form import in_gaps_of
from dinfer.structure.language import Language, in_gaps
from tests.support.structure_reference import OPEN, Row

NO_GAPS = REFUSED | {"renoise", "s2d2"}  # for models without a mask token, or that read from left to right
GENERAL = [pattern for pattern in PATTERNS if pattern != "x"]


def request(canvas: list[int], found: Language, scope: str, options: Resolved = DEFAULTS) -> Request:
    gaps = [token == MASK for token in canvas]
    return Request(canvas, gaps, options, (in_gaps_of([found], canvas, MASK, scope),), stops=False)


def text(tokens: list[int]) -> bytes:
    return b"".join(BYTES[token] for token in tokens)


def walk(row: Row, generator: np.random.Generator) -> list[int]:
    """An accepted completion."""
    for at in row.open():
        assert row.put(at, int(generator.choice(np.flatnonzero(row.allowed(at)))))
    return row.canvas


def runs(gaps: list[bool], canvas: list[int]) -> list[list[int]]:
    """What fills each gap."""
    found, before = list[list[int]](), False
    for gap, token in zip(gaps, canvas, strict=True):
        found += [[]] if gap and not before else []
        if gap:
            found[-1].append(token)
        before = gap
    return found


@pytest.mark.rest(but=2)
@pytest.mark.parametrize("name", [name for name in general(DECODERS) if name not in NO_GAPS])
@examples(8)
@given(st.data())
def test_what_fills_gaps_is_in_the_language(name: str, data: st.DataObject) -> None:
    decoder = data.draw(st.sampled_from([s for s in settings_of(DECODERS) if dict(s)["name"] == name]))
    recipe = data.draw(recipes(dict(decoder)))
    assume(recipe.model.spec.mask_id is not None and recipe.model.spec.causal_block is None)  # others fill no gaps
    generator = np.random.default_rng(data.draw(st.integers(0, 10_000)))
    asked = []
    for _ in range(data.draw(st.integers(1, 3))):
        pattern, scope = data.draw(st.sampled_from(GENERAL)), data.draw(st.sampled_from(["answer", "gap"]))
        found = language_of(pattern)
        before = [1] * data.draw(st.integers(1, 7))
        if scope == "answer":
            whole = walk(Row(found, [OPEN] * (max(found.shortest, 1) + data.draw(st.integers(0, 8)))), generator)
            hidden = generator.random(len(whole)) < 0.6
            hidden[0] = True  # the language begins where the first gap does
            canvas = [*before, *(MASK if hide else token for hide, token in zip(hidden, whole, strict=True))]
        else:
            lengths = [k for k in range(1, 9) if Row(in_gaps((found,)), [OPEN] * k).feasible]
            canvas = before
            for _ in range(data.draw(st.integers(1, 3))):
                canvas = [*canvas, *[MASK] * data.draw(st.sampled_from(lengths)), *[3] * data.draw(st.integers(1, 3))]
        asked.append((pattern, scope, request(canvas, found, scope)))
    done = completions(engine_for(recipe, rows=2, page=4), [one for *_, one in asked])
    for (pattern, scope, one), completion in zip(asked, done, strict=True):
        canvas, gaps = completion.canvas, one.open
        assert [t for t, gap in zip(canvas, gaps, strict=True) if not gap] == [
            t for t, gap in zip(one.tokens, gaps, strict=True) if not gap
        ]
        if scope == "answer":
            assert Row(language_of(pattern), canvas[gaps.index(True) :]).feasible, (str(recipe), canvas)
        else:
            for gap in runs(gaps, canvas):
                assert re.fullmatch(pattern, text(gap).decode(), re.ASCII), (str(recipe), canvas)


def scripted(block: int = 3, cache: str = "dual", seed: int = 0) -> Any:
    return compose(
        Scripted(adversarial("random", seed)[:1]), iteration={"name": "blockwise", "block": block},
        decoder="threshold", cache=cache,
    )  # fmt: skip


def test_each_gap_may_have_a_language_of_its_own() -> None:
    patterns = ["[a-c]{2}", "[0-9]+", "(ab|é)*x?"]
    languages = tuple(language_of(pattern) for pattern in patterns)
    canvas = [1, MASK, MASK, 3, MASK, 5, 5, MASK, MASK, MASK]
    brought = in_gaps_of(languages, canvas, MASK, "gap")
    gaps = [token == MASK for token in canvas]
    (done,) = completions(engine_for(scripted()), [Request(canvas, gaps, asks=(brought,))])
    for pattern, gap in zip(patterns, runs(gaps, done.canvas), strict=True):
        assert re.fullmatch(pattern, text(gap).decode())


def test_other_rows_do_not_notice() -> None:
    """Rows beside it, in a language and free, are decoded as alone, and go on so when it has left."""
    found = language_of('\\{"(a|b)":\\d{1,3}(,\\d)*"\\}')
    free, held = Request.behind([1, 2, 3], 30), bound(Request.behind([1, 2], 30), language_of("[a-j]{3,6}(12)*"))
    gaps = request([1, *[MASK] * 8, 22, 3, MASK], language_of("[a-j0-9]*"), "gap")
    for recipe in (scripted(4), scripted(7, "none", 2)):
        alone = [completions(engine_for(recipe), [one])[0].canvas for one in (free, held, gaps)]
        together = completions(engine_for(recipe, rows=4), [free, held, gaps, bound(Request.behind([1], 25), found)])
        assert [one.canvas for one in together[:3]] == alone
        assert Row(found, together[3].canvas[1:]).feasible


def test_branches_of_longer_rows_do_not_notice() -> None:
    """What lay behind the row with gaps was never added to a branch, in free rows, too."""
    iteration = {"name": "lopa", "block": 4, "blocks": 2, "branches": 3}
    recipe = compose(Scripted(adversarial("random", 2)[:1]), iteration=iteration, decoder="threshold", cache="none")
    free, gaps = (
        Request.behind([1, 2, 3], 90),
        request([1, MASK, MASK, 5, MASK, MASK], language_of("[a-j]{3,6}"), "gap"),
    )
    (alone,) = completions(engine_for(recipe, rows=2), [free])
    beside = completions(engine_for(recipe, rows=2), [free, gaps])[0]
    assert (beside.canvas, beside.counts.forwards) == (alone.canvas, alone.counts.forwards)


@pytest.mark.parametrize(
    ("canvas", "scope", "what"),
    [
        ([1, MASK, MASK, 3, MASK, 4], "answer", "no text that the constraint allows has what stands around these gaps"),
        ([1, MASK, 3, MASK, MASK, MASK, 3], "gap", "has 3 tokens, as gap 2 has"),
    ],
)
def test_gaps_that_nothing_fits_are_refused(canvas: list[int], scope: str, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        request(canvas, language_of("ab|cd"), scope)


def test_a_number_of_languages_that_is_not_that_of_the_gaps() -> None:
    with pytest.raises(ValueError, match="2 constraints for 3 gaps: give one, or one for each"):
        in_gaps_of([language_of("ab|cd"), language_of("x")], [MASK, 1, MASK, 1, MASK], MASK, "gap")
