"""d2Cache: the rollout of attention, what is recomputed because of it, and what is left alone."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.matrix import completions, engine_for, observed
from support.models import VOCAB, tiny_model
from support.scripted import Scripted
from torch import Tensor

from dinfer.core.engine.request import Request, Wants
from dinfer.core.recipe.recipe import IncompatibleRecipe, compose
from dinfer.core.step.canvas import Canvas
from dinfer.core.step.cursors import Cursors, Phase
from dinfer.research.caches.chosen import D2Cache
from dinfer.research.kernels.received import attention_received

SWEEP = {"name": "blockwise", "block": 8, "stop": "off"}


def test_attention_received_is_the_weighted_sum_of_what_queries_give() -> None:
    """More queries than a piece holds, grouped heads, two rows with other intervals, keys in shuffled pages."""
    generator = torch.Generator().manual_seed(0)
    lanes, width, heads, groups, size, page, count = 2, 150, 4, 2, 8, 4, 5
    q = torch.randn(lanes, width, heads, size, generator=generator)
    k = torch.randn(12, page, groups, size, generator=generator)
    pages = torch.randperm(12, generator=generator)[: lanes * count].view(lanes, count)
    start, end = torch.randint(0, 8, (lanes, width)), torch.randint(9, page * count + 1, (lanes, width))
    weight = torch.rand(lanes, width, generator=generator)
    want = torch.zeros(lanes, page * count)
    for b in range(lanes):
        keys = k[pages[b]].reshape(-1, groups, size)
        for w in range(width):
            for h in range(heads):
                seen = slice(int(start[b, w]), int(end[b, w]))
                share = (keys[seen, h // 2] @ q[b, w, h] / size**0.5).softmax(0)
                want[b, seen] += weight[b, w] * share / heads
    torch.testing.assert_close(attention_received(q, k, pages, (start, end), weight), want)


class Known:
    """Attention of two layers, for queries at some positions."""

    layers = 2

    def __init__(self, attention_JWS: Tensor) -> None:
        self.attention_JWS = attention_JWS

    def received(self, layer: int, weight_BW: Tensor) -> Tensor:
        return weight_BW @ self.attention_JWS[layer]


@pytest.mark.parametrize("computed", [[0, 1, 2, 3, 4, 5], [1, 4]])
def test_the_rollout_is_the_column_sum_of_the_product_over_layers(computed: list[int]) -> None:
    """Rows that are not computed pass everything on to themselves."""
    length = 6
    attention = torch.rand(2, len(computed), length, generator=torch.Generator().manual_seed(1)).softmax(-1)
    rollout = torch.eye(length)
    for layer in attention:
        whole = torch.eye(length)
        whole[computed] = layer
        rollout = (whole + torch.eye(length)) / 2 @ rollout
    cache, canvas = D2Cache(), Canvas.alloc(1, length, 1, (), torch.device("cpu"))
    tokens_AS, masked_AS = torch.tensor([[1, 1, 1, 0, 0, 0, 0]]), torch.tensor([[False] * 3 + [True] * 3 + [False]])
    now = Cursors(Phase.FULL, 3, length, 3, 6)
    canvas.admit(torch.tensor([0]), [now], tokens_AS, masked_AS, torch.tensor([length]))
    lanes = canvas.lanes(torch.tensor([0]), Phase.FULL)
    spec = tiny_model().spec
    state = {name: tensor.expand(1, *tensor.shape).clone() for name, tensor in cache.fresh_state(spec, length).items()}
    pos_BW = torch.tensor([[*computed, -1]])
    known = Known(torch.nn.functional.pad(attention, (0, 0, 0, 1)))
    unsure: Callable[[], Tensor] = lambda: torch.zeros(1, len(computed) + 1)  # noqa: E731
    cache.follow(known, unsure, pos_BW, lanes, 0, Phase.FULL, state)
    want = rollout.sum(0) / length
    torch.testing.assert_close(state["attention"][0, :length], want, atol=1e-6, rtol=0)


def test_a_mask_that_is_not_computed_is_not_decoded() -> None:
    """However low the threshold: two masks a step are computed, and no other is written."""
    network = tiny_model()
    fed: list[list[int]] = []
    forward = network.forward
    network.forward = lambda x, attend: (fed.append(attend.pos_BW[0].tolist()), forward(x, attend))[1]
    cache = {"name": "d2cache", "masks": 2, "mass": 0.0, "share": None}
    recipe = compose(network, iteration=SWEEP, decoder={"name": "threshold", "threshold": 0.3}, cache=cache)
    before = [True] * 24
    for update in engine_for(recipe).run([Request.behind([1, 2, 3], 24, recipe.resolve({}))], Wants(snapshots=True)):
        after = (update.masked or [])[3:]
        written = [3 + i for i in range(24) if before[i] and not after[i]]
        assert written and set(written) <= set(fed[update.forwards - 1])
        before = after
    assert len(fed[0]) == 27 and max(len({pos for pos in step if pos >= 0}) for step in fed[2:]) <= 2 + 2 + 1


@pytest.mark.parametrize("blocks", [1, 2])
def test_masks_are_ranked_by_the_confidence_that_the_decoder_orders_them_by(tmp_path: Path, blocks: int) -> None:
    """PC-Sampler: the probability times the surprise of the token, no more than `clip`."""
    counts = {token: 10 ** (token % 5) for token in range(VOCAB)}
    total, clip = 10 * sum(counts.values()), 50.0
    table = tmp_path / "counts.json"
    table.write_text(json.dumps({"total": total, "counts": counts}))
    network, fed = tiny_model(), list[list[int]]()
    forward, rows = network.forward, list[Tensor]()

    def heard(x: Tensor, attend: Any) -> Tensor:
        fed.append([pos for pos in attend.pos_BW[0].tolist() if pos >= 0])
        h_BWD = forward(x, attend)
        rows.append(network.logits(h_BWD)[0].float().softmax(-1))
        return h_BWD

    network.forward = heard
    recipe = compose(
        network,
        iteration={"name": "multi_block", "block": 24 // blocks, "blocks": blocks, "add_at": 0.0, "force": "first"},
        decoder={"name": "calibrated", "sigma": 0.0, "threshold": 100.0, "frequencies": str(table), "clip": clip},
        cache={"name": "d2cache", "masks": 2, "mass": 0.0, "sigma": 0.0, "share": None},
    )
    updates = engine_for(recipe).run([Request.behind([1, 2, 3], 24, recipe.resolve({}))], Wants(snapshots=True))
    left = [3 + i for i, masked in enumerate((next(updates).masked or [])[3:]) if masked]
    next(updates)
    plain = {pos: rows[0][pos].max().item() for pos in left}
    surest = {p: min(-c * math.log(counts[int(rows[0][p].argmax())] / total), clip) for p, c in plain.items()}
    want, other = (set(sorted(left, key=ranks.__getitem__)[-2:]) for ranks in (surest, plain))
    assert want != other and want <= set(fed[1]) and not (other - want) & set(fed[1])


def test_a_share_bounds_what_a_step_computes() -> None:
    widths = []
    for share in (None, 0.25):
        cache = {"name": "d2cache", "mass": 1.0, "share": share}
        recipe = compose(tiny_model(), iteration=SWEEP, decoder="threshold", cache=cache)
        engine = engine_for(recipe)
        shapes = observed(engine)
        completions(engine, [Request.behind([1, 2, 3], 64, recipe.resolve({}))])
        widths.append({shape.width for shape in shapes if shape.phase == Phase.WINDOW})
    assert min(widths[0]) >= 67 and max(widths[1]) < 32  # 8 of the block and 16 others, in a bucket


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"decoder": "entropy_bound"}, "leaves masks out, and decoder=entropy_bound"),
        ({"decoder": "credit"}, "leaves masks out, and decoder=credit"),
        ({"decoder": "joint_threshold"}, "judges decoded tokens"),
        ({"model": tiny_model("block_causal")}, "causal between blocks"),
    ],
)
def test_what_it_cannot_serve_is_refused(change: dict[str, object], reason: str) -> None:
    parts = {"model": tiny_model(), "iteration": SWEEP, "decoder": "threshold", "cache": "d2cache"} | change
    with pytest.raises(IncompatibleRecipe, match=reason):
        compose(parts.pop("model"), **parts)
    recipe = compose(tiny_model(), iteration=SWEEP, decoder="threshold", cache="d2cache")
    with pytest.raises(IncompatibleRecipe, match="follows the attention of one branch"):
        recipe.resolve({"guidance": 1.0})
    with pytest.raises(IncompatibleRecipe, match=r"surest masks, and sampling\.leftmost decodes the first ones"):
        recipe.resolve({"leftmost": 1})


SURER = {"name": "d2cache", "masks": 3, "share": 0.0}
NARROW = {"name": "narrow_dual", "ahead": 2, "back": 1}
MULTI = {"name": "multi_block", "block": 4, "blocks": 3}


@pytest.mark.parametrize("decoder", [
    {"name": "threshold", "threshold": 0.05}, {"name": "threshold", "threshold": 0.9}, {"name": "calibrated"},
], ids=str)  # fmt: skip
@pytest.mark.parametrize(
    ("iteration", "cache"),
    [
        (SWEEP | {"block": 2}, SURER),
        (MULTI, SURER),
        (MULTI | {"name": "dmax"}, SURER),
        (SWEEP, NARROW),
        (MULTI, NARROW),
    ],
)
def test_a_step_decodes_what_it_computes_and_some_of_it(
    iteration: dict[str, Any], cache: dict[str, Any], decoder: dict[str, Any]
) -> None:
    """Later positions are surer, so their masks come first, and the first block must not wait for ever."""
    place_P = torch.arange(40)
    table_CPV = torch.zeros(1, 40, VOCAB, dtype=torch.float64)
    table_CPV[0, place_P, 1 + place_P % 30] = 1 + place_P.double() / 8  # what no forward computes gives token 0
    recipe = compose(Scripted(table_CPV), iteration=iteration, decoder=decoder, cache=cache)
    (done,) = completions(engine_for(recipe), [Request.behind([1] * 3, 30)])
    assert done.output == [1 + place % 30 for place in range(3, 33)]
