"""A recipe that gets some held-out problems right and others wrong, and evaluations of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import dinfer
from dinfer.core.pipeline import Pipeline
from evaluations.replicas import Replicas
from evaluations.run import evaluate, stem_of
from evaluations.settings import Settings

ONE = Replicas(0, 1, torch.device("cpu"))
RECIPE = {
    "model": {"name": "llada", "checkpoint": "tiny"},
    "iteration": {"name": "blockwise", "block": 32},
    "decoder": {"name": "threshold", "threshold": 0.6},
    "cache": {"name": "dual"},
    "sampling": {"name": "standard"},
}
RUNTIME = {"rows": 6}
NEW = 96


def run(pipe: Pipeline, out: Path | None = None, more: Mapping[str, Any] = {}, **settings: Any) -> dict[str, Any]:
    asked = Settings(**{"tasks": ("mini_gsm",), "limit": 12, "max_new_tokens": NEW} | settings)
    stem = None if out is None else stem_of(out, RECIPE, asked, RUNTIME)
    document = evaluate(lambda: pipe, asked, among=ONE, recipe=RECIPE, runtime=RUNTIME, stem=stem, **more)
    assert document is not None
    return document


def recipe_pipe() -> Pipeline:
    return dinfer.load(**RECIPE, device="cpu", runtime=dinfer.Runtime(rows=6))
