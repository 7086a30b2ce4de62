"""Rows that are in a language as CUDA graphs: the tokens of eager steps and of the torch references."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.matrix import completions, engine_for
from support.models import EOS, VOCAB, tiny_model

from dinfer.core.engine.request import Request
from dinfer.core.kernels.dispatch import VARIABLE
from dinfer.core.recipe.recipe import compose
from dinfer.structure.abilities.constraints import InLanguage
from dinfer.structure.compiler import compile_automaton
from dinfer.structure.constraint import regex
from dinfer.structure.language import Vocabulary, language

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE, PROMPT, NEW = "cuda", 3, 24
TEXTS = [b"", *(bytes([letter]) for letter in b"abcdefgh0123"), b"ab", b"cd", b"12"]
WORDS = Vocabulary([*TEXTS, *[None] * (VOCAB - len(TEXTS))], frozenset({EOS}), frozenset({EOS}))
PATTERNS = ["((ab|cd)[0-3]{1,3}){2,6}", "[a-h]{8,40}", "(abc|[0-3]{2}e){2,}"]


def requests_in_languages(recipe: Any, posterior: bool, options: dict[str, float]) -> list[Request]:
    """Each second is in a language; in the last one text may stand behind the active positions."""
    made = [Request.behind([5, 6, 7 + i], NEW, recipe.resolve(options)) for i in range(2 * len(PATTERNS))]
    for i, pattern in enumerate(PATTERNS):
        found = replace(language(compile_automaton(regex(pattern))[0], WORDS), posterior=posterior)
        kinds = [0] * PROMPT + [1] * NEW if i == 2 and not posterior else None
        brought = InLanguage(found, PROMPT, PROMPT + NEW, kinds)
        made[2 * i] = replace(made[2 * i], asks=(brought,))
    return made


@pytest.mark.parametrize(
    "iteration,decoder,options,posterior",
    [
        ("blockwise", {"name": "threshold", "threshold": 0.3}, {}, False),
        ("blockwise", {"name": "threshold", "threshold": 0.3}, {}, True),
        ("multi_block", {"name": "fixed", "steps": 4}, {}, False),
        ("blockwise", {"name": "joint_threshold", "threshold": 0.2, "edit_threshold": 0.2}, {}, False),
        ("blockwise", {"name": "threshold"}, {"temperature": 0.8, "top_p": 0.9}, False),
    ],
)
def test_constrained_steps_under_graphs(
    iteration: str, decoder: Any, options: dict[str, float], posterior: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(dtype=torch.float32, device=DEVICE, head_dim=16)
    recipe = compose(model, iteration={"name": iteration, "block": 8}, decoder=decoder, cache="dual")
    requests = requests_in_languages(recipe, posterior, options)
    monkeypatch.setenv(VARIABLE, "triton,-languages")
    want = [c.canvas for c in completions(engine_for(recipe, rows=3), requests)]
    assert all(canvas.count(EOS) < NEW for canvas in want[::2])
    monkeypatch.setenv(VARIABLE, "triton")
    assert [c.canvas for c in completions(engine_for(recipe, rows=3), requests)] == want
    engine = engine_for(recipe, rows=3, graphs=DEVICE == "cuda")
    for _ in range(3):
        assert [c.canvas for c in completions(engine, requests)] == want
    assert engine.runner.captured > 0 and engine.runner.refused == {}
