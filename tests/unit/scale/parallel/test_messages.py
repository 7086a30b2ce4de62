"""A request reaches other ranks as it is: its asks, its options, its pages."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from support.models import tiny_model

from dinfer import compose
from dinfer.core.step.request import Ask, Request
from dinfer.core.step.state import Entry
from dinfer.core.step.told import Report
from dinfer.rollouts.abilities.recording import RecordAsk
from dinfer.scale.parallel.leader_worker import entry_told, read
from dinfer.structure.abilities.bias import TokenBias
from dinfer.structure.abilities.reading import Blank, Read

ASKS: list[Ask] = [
    Report(2), RecordAsk(1), TokenBias(((3, -1.5), (4, float("-inf"))), only=(1, 2)),
    Read((Blank((3, 4), ((9, 8), (7, 6)), ((), (5,))),), 2),
]  # fmt: skip


@pytest.mark.parametrize("ask", ASKS, ids=lambda ask: type(ask).__name__)
def test_what_a_request_asks_is_the_same_in_another_process(ask: Ask) -> None:
    recipe = compose(tiny_model(), iteration="blockwise", decoder="threshold", cache="none")
    request = Request.behind([1, 2, 3], 4, recipe.resolve({"threshold": 0.7}), asks=(ask,), stops=False)
    sent = Entry(5, request, kept=2, pages=[3, 4], fresh=[4])
    came: Any = read(json.loads(json.dumps(entry_told(sent))))
    assert hash(ask) == hash(came.request.asks[0]) and came.request.asks == (ask,)
    assert came.request.options == request.options and came.request.options.recipe is None
    whole = replace(came.request, tokens=[*came.request.tokens], open=[*came.request.open])
    assert replace(came, request=whole, pages=[*came.pages], twin=[], fresh=[*came.fresh]) == sent
