"""Caches that choose their positions: which they compute at each step, against slow bookkeeping written here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.host import Host
from support.matrix import engine_for
from support.models import fitted, tiny_model
from torch import Tensor

from dinfer.core.engine.request import Request, Update, Wants
from dinfer.core.kernels.selection import compact
from dinfer.core.recipe.recipe import IncompatibleRecipe, compose
from dinfer.core.registry import CACHES, DECODERS
from dinfer.core.step.cursors import Cursors, Phase
from dinfer.core.step.mixins import Edits, Grows
from dinfer.core.step.window import exact, width_of
from dinfer.core.terms.spec import AttentionLayout
from dinfer.research.abilities.following import last_values

PROMPT, NEW, BLOCK = 11, 21, 8
LENGTH = PROMPT + NEW


class Watched:
    """Keeps the positions of every forward, and the last layer's values that it left there."""

    def __init__(self, model: Any) -> None:
        self.model, self.spec = model, model.spec
        self.positions: list[int] = []
        self.values: dict[int, Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def forward(self, x_BWD: Tensor, attend: Any) -> Tensor:
        h_BWD = self.model.forward(x_BWD, attend)
        kept_WX, pos_W = last_values(attend)[0].clone(), attend.pos_BW[0].tolist()
        self.positions = [p for p in pos_W if p >= 0]
        self.values = {p: kept_WX[i] for i, p in enumerate(pos_W) if p >= 0}
        return h_BWD


def steps(
    variant: str, cache: dict[str, Any], iteration: str = "blockwise", decoder: Any = None
) -> Iterator[tuple[Watched, Update, set[int], list[int]]]:
    """At each step: the model as it was used, the update, what was masked before, and the tokens before."""
    watched = Watched(tiny_model(variant))
    sweep = {"name": iteration} | ({} if iteration == "full" else {"block": BLOCK, "stop": "off"})
    decoder = decoder or {"name": "threshold", "threshold": 0.97}
    recipe = compose(watched, iteration=sweep, decoder=decoder, cache=cache)  # type: ignore[arg-type]
    prompt = [1 + (7 * i) % 30 for i in range(PROMPT)]
    masked, tokens = set(range(PROMPT, LENGTH)), prompt + [watched.spec.mask_id] * NEW
    for update in engine_for(recipe).run([Request.behind(prompt, NEW, recipe.resolve({}))], Wants(snapshots=True)):
        yield watched, update, masked, tokens
        masked = {p for p, is_masked in enumerate(update.masked or []) if is_masked}
        tokens = update.tokens or []


def test_compact_lists_flagged_positions() -> None:
    flags_BS = torch.rand(50, 13, generator=torch.Generator().manual_seed(0)) < 0.4
    pos_BW, place_BS = compact(flags_BS, 13)
    for flags, pos, place in zip(flags_BS.tolist(), pos_BW.tolist(), place_BS.tolist(), strict=True):
        want = [p for p, flag in enumerate(flags) if flag]
        assert pos == want + [-1] * (13 - len(want))
        assert place == [want.index(p) if p in want else -1 for p in range(13)]


@pytest.mark.parametrize("variant", ["bidirectional", "shifted", "causal"])
@pytest.mark.parametrize("iteration", ["blockwise", "full"])
@pytest.mark.parametrize("interval", [0, 3])
def test_delayed_computes_masks_and_what_was_decoded_one_step_before(
    variant: str, iteration: str, interval: int
) -> None:
    before: set[int] = set()
    region, count, windows = (-1, -1), 0, 0
    for watched, update, masked, _ in steps(variant, {"name": "delayed", "interval": interval}, iteration):
        count = count + 1 if update.region == region else 0
        region = update.region
        assert update.full == (count == 0 or (interval > 0 and count % interval == 0))
        end = region[1] if variant == "causal" else LENGTH  # nobody sees what is behind
        want = {p for p in masked | (before - masked) if p < end}
        if variant == "shifted":  # the logits of a position stand before it
            want |= {p - 1 for p in masked if region[0] <= p < region[1]}
        assert watched.positions == (list(range(end)) if update.full else sorted(want))
        before, windows = masked, windows + (not update.full)
    assert windows > 3


@pytest.mark.parametrize("delay", [2, 3])
def test_keys_are_kept_once_so_many_steps_have_seen_the_token(delay: int) -> None:
    history: list[set[int]] = []  # masks before each step
    late = 0
    for watched, update, masked, _ in steps("bidirectional", {"name": "delayed", "interval": 0, "delay": delay}):
        if update.phase == Phase.WINDOW:
            decoded = set[int]().union(*history[-delay:]) - masked
            want = {p for p in masked | decoded if p >= update.region[0]}
            assert set(watched.positions) == want
            late += len(want - masked - (history[-1] - masked)) > 0
        history.append(masked)
    assert late > 0


@pytest.mark.parametrize("sweep", [{"name": "blockwise"}, {"name": "multi_block", "blocks": 3, "add_at": 0.5}])
def test_keys_that_are_never_kept_are_those_of_the_prefix_cache(sweep: dict[str, Any]) -> None:
    """d3LLM's delay over several open blocks, longer than any of them takes: all behind their start is recomputed."""
    found = []
    for cache in ({"name": "delayed", "interval": 0, "delay": 1000}, "prefix"):
        decoder = {"name": "threshold", "threshold": 0.9}
        recipe = compose(tiny_model(), iteration=sweep | {"block": BLOCK}, decoder=decoder, cache=cache)
        requests = [
            Request.behind([1, 2, 3, 4, 5], 3 * BLOCK, recipe.resolve({})),
            Request.behind([7], 20, recipe.resolve({})),
        ]
        found.append([u.completion.canvas for u in engine_for(recipe).run(requests) if u.completion is not None])
    assert found[0] == found[1]


@pytest.mark.parametrize("around", [0, 2])
def test_delayed_greedy_computes_the_block_and_the_neighbourhood(around: int) -> None:
    before: set[int] = set()
    for watched, update, masked, _ in steps(
        "bidirectional", {"name": "delayed", "variant": "greedy", "around": around}
    ):
        near = {p + d for p in before - masked for d in range(-around, around + 1)}
        want = near | {p for p in masked if update.region[0] <= p < update.region[1]}
        if not update.full:
            assert watched.positions == sorted(p for p in want if 0 <= p < LENGTH)
        before = masked


@pytest.mark.rest(but=4)
@pytest.mark.parametrize("variant", ["bidirectional", "shifted", "block_causal"])
@pytest.mark.parametrize("prompts,responses,ratio", [(100, 7, 0.25), (5, 3, 0.5), (0, 0, 0.3), (4, 0, 0.0)])
def test_adaptive_computes_what_drifted_most(variant: str, prompts: int, responses: int, ratio: float) -> None:
    rate, when, seen = dict.fromkeys(range(LENGTH), 1.0), dict.fromkeys(range(LENGTH), -1), {}
    values: dict[int, Tensor] = {}
    cache = {"name": "adaptive", "prompt_interval": prompts, "response_interval": responses, "ratio": ratio}
    windows = 0
    for forward, (watched, update, _, tokens) in enumerate(steps(variant, cache)):
        start, end = update.region
        active = set(range(start - watched.spec.shift, end))
        others = [p for p in range(PROMPT, LENGTH) if p not in active]
        if forward == 0 or (prompts and forward % prompts == 0):
            want = set(range(LENGTH))
        elif responses and forward % responses == 0:
            want = active | set(others)
        else:
            drift = {p: rate[p] * (forward - when[p]) + 2 * (tokens[p] != seen[p]) for p in others}
            want = active | set(sorted(others, key=lambda p: (-drift[p], p))[: int(NEW * ratio)])
            windows += 1
        assert watched.positions == sorted(want)
        for p in want:
            old, new = values.get(p, torch.zeros_like(watched.values[p])), watched.values[p]
            distance = float(1 - min(1.0, float(torch.nn.functional.cosine_similarity(old, new, dim=0))))
            rate[p] = round(distance * 2**20) / 2**20 / max(forward - when[p], 1)
            when[p], seen[p], values[p] = forward, tokens[p], new
    assert windows > 3


def test_the_share_that_is_recomputed_is_the_same_for_host_and_device() -> None:
    """29% of 100 is 29 in float32 and 28 in float64; the row then never fitted the step that the host launched."""
    cache = {"name": "adaptive", "ratio": 0.29, "response_interval": 0}
    recipe = compose(tiny_model(), iteration={"name": "blockwise", "block": 32}, decoder="threshold", cache=cache)
    host = Host(recipe, [Request.behind([1, 2, 3], 100)])
    host.step(Phase.FULL, host.slots)
    cursors = Cursors._make(host.state.canvas.cursors_NC[host.slots[0], : len(Cursors._fields)].tolist())
    host.step(Phase.WINDOW, host.slots, width=width_of(recipe.cache, recipe.model.spec, cursors))
    assert host.forwards() == [2]


@pytest.mark.parametrize("cache", [{"name": "delayed", "interval": 1}, {"name": "adaptive", "prompt_interval": 1}])
@pytest.mark.parametrize("variant", ["bidirectional", "shifted"])
def test_refreshed_at_every_step_they_are_no_cache(variant: str, cache: dict[str, Any]) -> None:
    found, want = ([u.tokens for _, u, _, _ in steps(variant, c)] for c in (cache, {"name": "none"}))
    assert found == want


def test_decoders_that_edit_need_the_logits_of_decoded_positions() -> None:
    for name in DECODERS.names():
        if issubclass(DECODERS.get(name), Edits) and not issubclass(DECODERS.get(name), Grows):
            with pytest.raises(IncompatibleRecipe, match=r"judges decoded tokens.* Use cache=.*dual"):
                compose(fitted(tiny_model(), name), iteration="blockwise", decoder=name, cache="delayed")
            compose(fitted(tiny_model(), name), iteration="blockwise", decoder=name, cache="adaptive")


def test_what_caches_say_of_their_exactness() -> None:
    attention = {0: 1, 4: 4, 1: 1}  # positions of an attention block, and where active blocks begin and end
    caches = {name: CACHES.get(name)() for name in CACHES.names()}
    kinds = {
        name: [exact(c, AttentionLayout(0, b, False), grain) for b, grain in attention.items()]
        for name, c in caches.items()
    }
    assert kinds["none"] == [True, True, True]
    for name in ("prefix", "dual", "vicinity", "block"):
        assert kinds[name] == [False, True, True]
    for name in ("delayed", "adaptive"):
        assert kinds[name] == [False, False, False]
    assert not exact(
        CACHES.get("dual")(), AttentionLayout(1, 4, False), 4
    )  # shifted, it leaves out the last position of the block
    assert [exact(CACHES.get(n)(), AttentionLayout(0, 4, False), 2) for n in ("prefix", "dual", "block")] == [
        False,
        False,
        True,
    ]


@pytest.mark.parametrize(
    "cache,said",
    [
        ({"name": "delayed", "interval": -1}, "cache.interval=-1 must be 0 or more"),
        ({"name": "adaptive", "ratio": 1.5}, "cache.ratio=1.5 must be between 0 and 1"),
        ({"name": "adaptive", "prompt_interval": -2}, "cache.prompt_interval=-2 must be 0 or more"),
    ],
)
def test_impossible_options_are_named(cache: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        CACHES.build(cache)
