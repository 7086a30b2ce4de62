"""What a converted model's answers are worth: tokens a forward, and what the base says of the text."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import dinfer
from dinfer.core.loading.files import ADAPTER, locate
from tools.convert_ar.base import Base, Weights, cast, causal_scores
from tools.convert_ar.draw import repeats


@dataclass(frozen=True)
class Score:
    """Of all answers together."""

    answers: int
    tokens: int
    nll: float  # by the base, nats a token
    repeats: float  # share of 4-grams that occurred before, mean of the answers
    forwards: int
    tokens_per_forward: float

    @classmethod
    def of(cls, told: list[list[float]]) -> Score:
        """Of what `each` says."""
        tokens, nll, again, calls = map(math.fsum, zip(*told, strict=True))
        return cls(len(told), int(tokens), nll / tokens, again / len(told), int(calls), tokens / max(calls, 1))


def unadapted(layers: list[Weights]) -> list[Weights]:
    return [{name: None if name.endswith(".a") else one for name, one in w.items()} for w in layers]


@torch.no_grad()
def each(base: Base, prompts: list[list[int]], found: list[list[int]], forwards: list[int]) -> list[list[float]]:
    """Of each answer: tokens, NLL in nats by the base without the adapter, repeats, forwards."""
    layers, told = unadapted(cast(base.layers(), base.dtype)), list[list[float]]()
    for i in range(0, len(prompts), 16):
        part = [(prompt, answer) for prompt, answer in zip(prompts[i : i + 16], found[i : i + 16], strict=True)]
        scores = causal_scores(base, layers, [prompt + answer for prompt, answer in part], base.chat.stop)
        for (prompt, answer), score, calls in zip(part, scores, forwards[i : i + 16], strict=True):
            told.append([len(answer), -float(score[len(prompt) - 1 :].sum()), repeats(answer), calls])
    return told


def judged(base: Base, prompts: list[list[int]], found: list[list[int]], forwards: list[int]) -> dict[str, Any]:
    """The score of answers."""
    return asdict(Score.of(each(base, prompts, found, forwards)))


def loaded(
    base: Path,
    adapter: Path | str | None,
    block: int,
    threshold: float = 1.0,
    *,
    mask: int | None = None,
    **changes: Any,
) -> Any:
    """The converted model in the engine; without an adapter the base, as blocks of one token.

    At threshold 1, one token is filled a forward. `mask`: of a base that is decoded alone. `changes`: of the recipe
    and of `dinfer.load`.
    """
    model: dict[str, Any] = {"name": "a2d", "checkpoint": str(base), "block": block}
    model |= {"mask_id": mask} if adapter is None else {"adapter": str(adapter)}
    shift = adapter and json.loads((locate(str(adapter), needed=ADAPTER) / "diffusion.json").read_text()).get(
        "shift", 0
    )
    parts: dict[str, Any] = {
        "iteration": {"name": "block_diffusion", "block": block, "lead": block if shift else 0}, "cache": "block",
        "decoder": {"name": "threshold", "threshold": threshold},
    }  # fmt: skip
    return dinfer.load(model, **parts | changes)


def drafting(base: Path, drafts: Path | str, stride: int, rule: dict[str, Any] | None = None, **changes: Any) -> Any:
    """The base in the engine, which verifies what masks with the adapter draft: so many tokens a forward at most.

    `rule`: other options of `decoder=isd`, such as which drafts it accepts.
    """
    model = {"name": "a2d", "checkpoint": str(base), "draft_adapter": str(drafts)}
    parts: dict[str, Any] = {
        "iteration": {"name": "sliding", "block": 2 * stride - 1}, "cache": "block",
        "decoder": {"name": "isd", "stride": stride} | (rule or {}),
    }  # fmt: skip
    return dinfer.load(model, **parts | changes)


def scored(base: Base, pipe: Any, prompts: list[list[int]], new: int) -> dict[str, Any]:
    """The scores of a pipeline's answers, and the first few."""
    found = pipe.generate_ids(prompts, max_new_tokens=new)
    answers = [one.ids + [base.chat.stop] * one.stopped for one in found]
    scores = judged(base, prompts, answers, [one.counts.forwards for one in found])
    return scores | {"samples": [one.text for one in found[:4]]}
