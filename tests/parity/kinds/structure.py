"""Cases of structured output: a canvas, a pattern, a small vocabulary; what may stand where, what a step commits."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch

from dinfer.structure import Vocabulary
from dinfer.structure.automaton import build
from dinfer.structure.language import Language, language
from dinfer.structure.regex import parse
from tests.parity.compare import close, same
from tests.parity.golden import Case, Fields, Golden
from tests.support.structure_reference import OPEN, Row, best, posterior, step

FILES = "cases/*.json"
ATOL = 1e-6


def takes(doc: Fields) -> bool:
    return "pattern" in doc


def cases(golden: Golden, path: Path, doc: Fields) -> Iterator[Case]:
    yield Case(golden.name(path), partial(run, doc))


def run(doc: Fields) -> str:
    bytes_V = [None if text is None else bytes.fromhex(text) for text in doc.take("tokens")]
    stop, tail, mask = (doc.take(name) for name in ("stop", "tail", "mask"))
    automaton = build(parse(doc.text("pattern")))
    compiled = language(automaton, Vocabulary(bytes_V, frozenset(stop), frozenset(tail)))
    machine = doc.fields("automaton")
    same("states", machine.take("states"), automaton.states)
    same("final", machine.take("final"), [state for state, final in enumerate(automaton.final) if final])
    same("edges", machine.take("edges"), [[q, *edge] for q, row in enumerate(automaton.edges) for edge in row])
    same("distance", doc.take("distance"), compiled.distance_Q[:-1].tolist())
    edges = [[q, t, int(to)] for q in range(compiled.states) for t, to in enumerate(_next(compiled, q)) if to >= 0]
    same("token_edges", sorted(doc.take("token_edges")), edges)
    canvas = zip(doc.take("canvas"), doc.take("status"), strict=True)
    row = Row(compiled, [OPEN if status == "open" else token for token, status in canvas])
    same("forward", doc.take("forward"), [np.flatnonzero(set_Q).tolist() for set_Q in row.forward_XQ])
    same("backward", doc.take("backward"), [np.flatnonzero(set_Q).tolist() for set_Q in row.backward_XQ])
    logits_XV, active = np.array(doc.take("logits")), range(*doc.take("active"))
    expected = doc.fields("expect")
    same("feasible", expected.take("feasible"), row.feasible)
    places = [i for i, status in enumerate(doc.take("status")) if status != "given"]
    same("allowed", expected.take("allowed"), {str(i): np.flatnonzero(row.allowed(i)).tolist() for i in places})
    _paths(expected, row, logits_XV, active)
    _edits(expected, Row(compiled, row.canvas), doc.take("proposals"))
    _step(expected, row, logits_XV, active, (doc.take("commits"), mask))
    expected.finish()
    for name in ("name", "kind", "text"):
        doc.take(name)
    doc.finish()
    return f"{compiled.states} states, {compiled.classes} classes"


def _next(compiled: Language, state: int) -> np.ndarray:
    return compiled.next_QC[state][compiled.class_V]


def _paths(expected: Fields, row: Row, logits_XV: np.ndarray, active: range) -> None:
    """The best completions, and the distribution of all."""
    for name, counted in (("best", row.open()), ("best_active", [i for i in row.open() if i in active])):
        want, got = expected.take(name), best(row, logits_XV, counted)
        same(f"whether there is {name}", want is not None, got is not None)
        if got is not None:
            same(f"{name}.tokens", want["tokens"], list(got[0].values()))
            _close(f"{name}.log_p", want["log_p"], got[1])
    want_z, want_marginals = expected.take("log_z"), expected.take("marginals")
    if row.feasible:
        log_z, marginals = posterior(row, logits_XV)
        _close("log_z", want_z, log_z)
        same("marginals", sorted(want_marginals, key=int), [str(i) for i in marginals])
        for i, got_V in marginals.items():
            _close(f"marginals.{i}", want_marginals[str(i)], got_V)


def _step(expected: Fields, row: Row, logits_XV: np.ndarray, active: range, rule: tuple[int, int]) -> None:
    if expected.take("step") is None:
        same("feasible", False, row.feasible)
        return
    want, got = expected.fields("step"), step(row, logits_XV, active, *rule)
    proposed = want.take("proposed")
    same("proposed", [each[:2] for each in proposed], [[i, token] for i, token, _ in got.proposed])
    _close("confidences", [each[2] for each in proposed], [each[2] for each in got.proposed])
    same("order", want.take("order"), got.order)
    same("committed", want.take("committed"), got.committed)
    same("skipped", want.take("skipped"), got.skipped)
    after = {str(i): np.flatnonzero(row.allowed(i)).tolist() for i in row.open()}
    same("allowed_after", want.take("allowed_after"), after)
    same("forced", want.take("forced"), list(row.forced().items()))
    want.finish()


def _edits(expected: Fields, row: Row, proposals: list[list[int]]) -> None:
    want = expected.take("edits")
    if want is None:
        return
    taken = [(proposal, row.put(*proposal)) for proposal in proposals]
    for name, kept in (("taken", True), ("refused", False)):
        same(f"edits.{name}", want[name], [proposal for proposal, put in taken if put == kept])


def _close(where: str, want: object, got: object) -> None:
    close(where, torch.as_tensor(want).double(), torch.as_tensor(got).double(), atol=ATOL, rtol=0.0)
