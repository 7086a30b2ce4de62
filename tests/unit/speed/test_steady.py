"""runtime.deterministic=true: no bit of a request depends on what runs beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.families import random_model

from dinfer import Pipeline, Runtime, compose

PROMPTS = [[1, 5, 9, 2, 7, 3, 8, 4, 6, 1, 2, 9], [4, 4, 8], [*range(1, 30)], [2, 9, 9, 1, 5]]
CAUSAL = {"cache": "block", "iteration": {"name": "block_diffusion", "block": 8}}
PLAIN = {"cache": "dual", "iteration": {"name": "blockwise", "block": 8}}


LOPA = PLAIN | {"iteration": {"name": "lopa", "block": 8}}


def pipeline(model: str, parts: dict[str, Any] | None = None, **runtime: Any) -> Pipeline:
    network = random_model(model, torch.bfloat16)
    parts = parts or (CAUSAL if network.spec.causal_block else PLAIN)
    return Pipeline(compose(network, decoder="threshold", **parts), None, Runtime(page=4, **runtime))


@pytest.mark.parametrize(
    ("model", "parts"),
    [
        ("llada", None), ("llada", LOPA),  # whose versions took no part once, so that rows waited for ever
        *(pytest.param(name, None, marks=pytest.mark.rest) for name in ("sdar", "llada_moe", "llada2")),
    ],
)  # fmt: skip
def test_bits_alone_are_bits_beside_others(model: str, parts: dict[str, Any] | None) -> None:
    """Tokens and log-probabilities in bfloat16, drawn and greedy."""
    pipe = pipeline(model, parts, deterministic=True)
    for temperature in (0.0, 0.9):
        how: Any = {"max_new_tokens": 8, "temperature": temperature}
        beside = pipe.rollout(PROMPTS, seed=[*range(len(PROMPTS))], **how)
        for number, prompt in enumerate(PROMPTS[:2]):
            alone = pipe.rollout([prompt], seed=[number], **how)
            for name in ("answer_ids", "steps", "logps", "sampled_logps"):
                size = int(alone.lengths[0])
                own, other = getattr(alone, name)[0, :size], getattr(beside, name)[number, :size]
                assert torch.equal(own.nan_to_num(1), other.nan_to_num(1)), name  # greedy answers have no sampled_logps


@pytest.mark.parametrize(
    ("runtime", "told"),
    [
        ({"speculate": 2}, "runtime.speculate=2 computes"), ({"share": True}, "runtime.share=true takes keys"),
        ({"favour": "throughput"}, "runtime.favour=throughput has rows wait"),
    ],
)  # fmt: skip
def test_what_would_break_it_is_refused(runtime: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=rf"runtime.deterministic=true: {told}"):
        pipeline("sdar", deterministic=True, **runtime)
