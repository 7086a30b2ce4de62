"""What the audit measures: nothing where a cache is exact, and what an independent computation says elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import MASK, tiny_model

from dinfer.core.engine.runtime import Runtime
from dinfer.core.pipeline import Pipeline
from dinfer.core.recipe.recipe import compose
from dinfer.lab.audit import Audit, audit, plot

PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8], [9, 10, 11, 12]]


def audited(variant: str, cache: Any, iteration: str = "blockwise", **decoder: Any) -> Audit:
    sweep = {"name": iteration} if iteration == "full" else {"name": iteration, "block": 8, "align": True}
    decoder = decoder or {"name": "threshold", "threshold": 0.5}
    sampling = {"name": "standard", "suppress_mask": decoder.pop("suppress_mask", False)}
    recipe = compose(tiny_model(variant), iteration=sweep, decoder=decoder, cache=cache, sampling=sampling)
    return audit(Pipeline(recipe, None, Runtime()), PROMPTS, max_new_tokens=[24, 12])


@pytest.mark.rest(but=8)
@pytest.mark.parametrize("variant", ["bidirectional", "shifted", "block_causal", "causal"])
@pytest.mark.parametrize("cache", ["none", "prefix", "dual", "delayed", "adaptive"])
def test_nothing_drifts_exactly_where_a_cache_says_that_it_is_exact(variant: str, cache: str) -> None:
    found = audited(variant, cache)
    assert len(found.samples) > 6
    if found.exact:
        assert found.overall["kl_worst"] < 1e-12
        assert (found.overall["top1"], found.overall["committed_agreement"], found.same_tokens) == (1.0, 1.0, 1.0)
    elif variant in ("bidirectional", "shifted"):
        assert found.overall["kl"] > 1e-6
    refreshed = [sample for sample in found.samples if sample.full]
    assert refreshed and all(sample.kl_worst < 1e-12 for sample in refreshed)


@pytest.mark.parametrize("iteration", ["full", "smooth"])
def test_what_is_fed_is_compared_alike(iteration: str) -> None:
    """Soft embeddings go into both passes, so a recipe without a cache has nothing to differ by."""
    assert audited("bidirectional", "none", iteration).overall["kl_worst"] < 1e-12


@pytest.mark.parametrize(
    ("iteration", "decoder"),
    [
        ("blockwise", {"name": "entropy_bound", "suppress_mask": True}),  # the sampling takes the mask token out
        ("blockwise", {"name": "s2d2", "steps": 4}),  # a second pass gives the logits of a draft
        ("full", {"name": "daedal", "initial": 4}),  # the canvas grows
    ],
)
def test_what_a_decoder_does_with_logits_is_no_drift(iteration: str, decoder: dict[str, Any]) -> None:
    found = audited("block_causal", "none", iteration, **decoder)
    assert len(found.samples) > 3 and found.overall["kl_worst"] < 1e-12


def test_the_numbers_are_those_of_scoring_every_canvas() -> None:
    """Commits of step n + 1 against `model.score` of the canvas after step n."""
    model = tiny_model()
    recipe = compose(
        model,
        iteration={"name": "blockwise", "block": 8},
        decoder={"name": "threshold", "threshold": 0.5},
        cache="dual",
    )
    pipe = Pipeline(recipe, None, Runtime())
    result = pipe.generate_ids(PROMPTS[:1], max_new_tokens=24, trace=True)[0]
    found = audit(pipe, PROMPTS[:1], max_new_tokens=24)
    before, agreed, committed = PROMPTS[0] + [MASK] * 24, [], []
    for canvas in result.trace or []:
        logits = model.score(torch.tensor([before]))[0]
        logits[:, MASK] = -torch.inf
        places = [p for p, (a, b) in enumerate(zip(before, canvas, strict=True)) if a != b]
        committed.append(len(places))
        agreed.append(sum(int(logits[p].argmax()) == canvas[p] for p in places))
        before = canvas
    assert [s.committed for s in found.samples] == committed
    assert [s.agreed for s in found.samples] == agreed


def test_the_report_and_the_plot_are_written(tmp_path: Path) -> None:
    found = audited("bidirectional", "dual")
    found.write(tmp_path / "audit.json")
    doc = json.loads((tmp_path / "audit.json").read_text())
    assert doc["overall"]["steps"] == len(doc["samples"]) == sum(m["steps"] for m in doc["by_block"].values())
    assert doc["exact"] is False and "DualCache" in doc["recipe"]["cache"]
    pytest.importorskip("matplotlib")
    plot(found, tmp_path / "audit.png")
    assert (tmp_path / "audit.png").read_bytes()[:4] == b"\x89PNG"
