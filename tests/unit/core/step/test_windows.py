"""The window of a step: host and device find the same width, and a cache is exact where it says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.matrix import settings_of
from support.models import tiny_model
from support.scripted import scripted_spec

from dinfer.core.engine.runtime import Runtime
from dinfer.core.kernels import canvas as kernels
from dinfer.core.pipeline import Pipeline
from dinfer.core.recipe.recipe import IncompatibleRecipe, compose
from dinfer.core.registry import CACHES, options_of
from dinfer.core.step.canvas import Canvas
from dinfer.core.step.contracts import CachePolicy, ModelSpec
from dinfer.core.step.cursors import Cursors, Phase
from dinfer.core.step.mixins import LeavesMasks
from dinfer.core.step.shape import StepShape
from dinfer.core.step.state import StatePool
from dinfer.core.step.window import Window, first_phase, prefilled, width_of, window
from dinfer.lab.audit import audit

CAPACITY, LONGEST = 70, 12
MODELS: dict[str, dict[str, Any]] = {
    "bidirectional": {}, "shifted": {"shift": 1}, "block_causal": {"causal_block": 4},
    "shifted_block_causal": {"causal_block": 4, "shift": 1}, "causal": {"causal_block": 1},
    "shifted_causal": {"causal_block": 1, "shift": 1}, "encoder": {"encoder": True, "mask_id": None},
    "prompt_block": {"causal_block": 4, "prompt_block": True},
    "shifted_prompt_block": {"causal_block": 4, "shift": 1, "prompt_block": True},
    "short_first": {"causal_block": 4, "prompt_block": True, "prompt_whole": False},
}  # fmt: skip
SETTINGS = [dict(setting) for setting in settings_of(CACHES)]


@st.composite
def rows(draw: st.DrawFn, phases: tuple[Phase, ...] = (Phase.FULL, Phase.WINDOW)) -> Cursors:
    """A row anywhere: blocks and parts of blocks, keys that are final up to any position before the region."""
    start = draw(st.integers(0, 40))
    end = start + draw(st.integers(1, LONGEST))
    return Cursors(
        phase=int(draw(st.sampled_from(phases))), start=start, end=end, length=end + draw(st.integers(0, 15)),
        prompt=draw(st.integers(0, end - 1)), kept=draw(st.integers(0, start)), forwards=draw(st.integers(0, 30)),
        seen=draw(st.integers(start, end)),
    )  # fmt: skip


@st.composite
def caches(draw: st.DrawFn) -> CachePolicy:
    """One as the matrix sets it, or with any value of its integers and shares."""
    given = dict(draw(st.sampled_from(SETTINGS)))
    for info in options_of(CACHES.get(given["name"])):
        if type(info.default) is int and draw(st.booleans()):
            given[info.name] = draw(st.integers(int(info.name in ("delay", "ahead")), 9))
        if type(info.default) is float:
            given[info.name] = draw(st.floats(0, 1))
    return CACHES.build(given)


def device_window(cache: CachePolicy, spec: ModelSpec, row: Cursors, width: int) -> Window:
    """The window that a step of this width computes for the row."""
    canvas = Canvas.alloc(1, CAPACITY, 1, (), torch.device("cpu"))
    canvas.cursors_NC[0, : len(row)] = torch.tensor(row)
    canvas.status_NS.random_(0, 3, generator=torch.Generator().manual_seed(row.start))
    slot_B, shape = torch.tensor([0]), StepShape(Phase(row.phase), 1, width, 1, LONGEST, 1)
    lanes = canvas.lanes(slot_B, shape.phase)
    state = StatePool.alloc(cache.fresh_state(spec, CAPACITY), 2, torch.device("cpu")).lanes(slot_B)
    return window(cache, lanes, canvas, spec, shape, state)


@pytest.mark.rest(but=2)
@pytest.mark.parametrize("triton", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_the_host_knows_the_width_of_the_window_of_the_device(
    model: str, triton: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if triton:
        pytest.importorskip("triton")
        monkeypatch.setattr(kernels, "use_triton", lambda *given: True)
    spec = scripted_spec(**MODELS[model])

    @settings(max_examples=20 if triton else 150)
    @given(caches(), rows())
    def check(cache: CachePolicy, row: Cursors) -> None:
        assume(not (cache.plan(Phase(row.phase)).last and spec.attention_block))  # refused
        width = width_of(cache, spec, row)
        found = device_window(cache, spec, row, width)
        chosen = cache.plan(Phase(row.phase)).chosen
        positions = [p for p in found.pos_BW[0].tolist() if p >= 0]
        assert bool(found.fits_B) and positions == sorted({p for p in positions if p < row.length})
        assert len(positions) <= width if chosen else len(positions) == width
        # Logits stand where they should, for all that is still to be decoded.
        places = found.logit_place_RL[0, : row.end - row.start].tolist()
        for position, place in zip(range(row.start, row.end), places, strict=True):
            if not (chosen or (isinstance(cache, LeavesMasks) and place < 0)):
                assert positions[place] == max(position - spec.shift, 0)
        if width > 1:
            assert not bool(device_window(cache, spec, row, width - 1).fits_B)

    check()


@pytest.mark.rest(but=1)
@pytest.mark.parametrize("triton", [False, True])
@pytest.mark.parametrize("model", ["block_causal", "shifted_block_causal", "causal", "encoder"])
def test_a_prefill_ends_where_the_host_says(model: str, triton: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if triton:
        pytest.importorskip("triton")
        monkeypatch.setattr(kernels, "use_triton", lambda *given: True)
    spec, cache = scripted_spec(**MODELS[model]), CACHES.build("block")
    grain = spec.attention_block

    @settings(max_examples=20 if triton else 100)
    @given(rows((Phase.PREFILL,)), st.integers(1, 9))
    def check(row: Cursors, pieces: int) -> None:
        row = row._replace(kept=row.kept // grain * grain)
        end, todo = prefilled(cache, spec, row.start), width_of(cache, spec, row)
        assert first_phase(cache, spec, row.start) == (Phase.PREFILL if end else Phase.WINDOW)
        assert todo == max(end - row.kept, 0)
        done, width = row.kept, grain * pieces
        while todo > 0:
            found = device_window(cache, spec, row._replace(kept=done), min(width, todo))
            assert bool(found.fits_B)
            assert [p for p in found.pos_BW[0].tolist() if p >= 0] == list(range(done, done + min(width, todo)))
            assert found.final_until_B is not None
            done, todo = int(found.final_until_B), todo - min(width, todo)
        assert done == max(end, row.kept)

    check()


@pytest.mark.rest(but=6)
@pytest.mark.parametrize("cache", ["prefix", "dual", "vicinity", "block", {"name": "vicinity", "back": 2, "warmup": 0}])
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize(
    "iteration",
    [
        {"name": "block_diffusion", "block": 2}, {"name": "block_diffusion", "block": 4}, {"name": "full"},
        {"name": "blockwise", "block": 8}, {"name": "blockwise", "block": 8, "align": True},
    ],
    ids=str,
)  # fmt: skip
def test_what_a_cache_calls_exact_is(cache: Any, shift: int, iteration: dict[str, Any]) -> None:
    """Parts of attention blocks are not, for a window that leaves out the rest of the block."""
    model = tiny_model("block_causal", causal_block=4, shift=shift)
    recipe = compose(model, iteration=iteration, decoder={"name": "threshold", "threshold": 0.5}, cache=cache)
    prompts = [[*range(1, 14)], [9, 10, 11, 12]]
    found = audit(Pipeline(recipe, None, Runtime()), prompts, max_new_tokens=[16, 9])
    assert found.overall["kl_worst"] < 1e-12 if found.exact else cache != "block"
    sure = not shift and iteration.get("align", iteration["name"] == "block_diffusion") and iteration["block"] >= 4
    assert found.exact or not sure
    if iteration["name"] != "full" and iteration["block"] == 2 and not shift and cache in ("prefix", "dual"):
        assert not found.exact and found.overall["kl_worst"] > 1e-3


@pytest.mark.rest(but=3)
@pytest.mark.parametrize("cache", ["prefix", "dual", "block"])
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("iteration", ["blockwise", "multi_block", "full"])
def test_blocks_that_are_counted_from_the_prompts_end(cache: str, shift: int, iteration: str) -> None:
    """The prompt is computed once, in a step as wide as it is, and shared with nobody: one block, or several."""
    whole = shift == (cache == "prefix")  # each way with each cache
    model = tiny_model("block_causal", causal_block=4, prompt_block=True, prompt_whole=whole, shift=shift)
    sweep: dict[str, Any] = {"name": iteration} | ({} if iteration == "full" else {"block": 4})
    recipe = compose(model, iteration=sweep, decoder={"name": "threshold", "threshold": 0.5}, cache=cache)
    prompts, new_tokens = [[*range(1, 14)], [*range(1, 11)], [*range(1, 14), 9]], [16, 9, 4]
    found = audit(Pipeline(recipe, None, Runtime()), prompts, max_new_tokens=new_tokens)
    assert found.same_tokens == 1 and found.overall["kl_worst"] < 1e-12 if found.exact else cache != "block"
    alone, together = (
        Pipeline(recipe, None, Runtime(rows=rows, page=4, positions=4)).generate_ids(prompts, max_new_tokens=new_tokens)
        for rows in (1, 3)
    )
    assert [r.ids for r in together] == [r.ids for r in alone]
    if cache == "block":
        assert all(result.counts.prefills == 1 for result in together)


@pytest.mark.parametrize("iteration", [{"name": "block_diffusion"}, {"name": "multi_block", "align": True}])
def test_sweeps_that_count_from_position_0_are_refused_for_them(iteration: dict[str, Any]) -> None:
    model = tiny_model("block_causal", causal_block=4, prompt_block=True)
    with pytest.raises(IncompatibleRecipe, match=r"counts blocks from position 0, as align=true does, .*blockwise"):
        compose(model, iteration=iteration | {"block": 4}, decoder="threshold", cache="block")
