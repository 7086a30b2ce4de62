"""Low-rank parts that single rows of a forward take."""

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.capture import meta_steps
from support.launches import failures, recorded_launches
from support.models import tiny_model
from torch import nn

from dinfer.core.kernels.deferred import close
from dinfer.core.layers.linear import Linear
from dinfer.core.memory import PoolSize
from dinfer.core.models.family import Placement
from dinfer.core.recipe.recipe import compose
from dinfer.core.step.cursors import Phase
from dinfer.core.step.shape import StepShape, Versioned
from dinfer.core.step.state import BatchState
from dinfer.core.step.step import denoise_step
from dinfer.families.abilities.drafting import chosen, committed, fed
from dinfer.families.decoders.isd import ISD, likeliest
from dinfer.families.gated import Gate, GatedLinear, GatedTransformer, LowRank
from dinfer.families.iterations.sliding import slide

gated, drafts = (pytest.importorskip(f"dinfer.kernels.triton.{name}") for name in ("gated", "drafts"))
CUDA = torch.cuda.is_available()
DEVICE, SHORT = ("cuda", torch.bfloat16) if CUDA else ("cpu", torch.float16)  # the interpreter has no bfloat16


def low_rank(outputs: int, width: int, parts: list[tuple[int, int]], ranks: int = 24) -> LowRank:
    """Of matrices with these first outputs and numbers of outputs, at random."""
    pairs = [(row, torch.randn(ranks, width) / 8, torch.randn(count, ranks) / 8) for row, count in parts]
    return LowRank.of(outputs, pairs)


def test_a_part_that_overflows_leaves_the_rows_without_it_alone() -> None:
    base, gate = nn.Linear(4, 4, bias=False, dtype=torch.float64), Gate()
    pair = torch.full((1, 4), 1e308, dtype=torch.float64), torch.ones(4, 1).double()
    layer = GatedLinear(base, gate, LowRank.of(4, [(0, *pair)]))
    x_BWK = torch.full((2, 3, 4), 10.0, dtype=torch.float64)
    with gate.on(torch.tensor([[True] * 3, [False] * 3])), torch.no_grad():
        y_BWO = layer(x_BWK)
        assert torch.equal(y_BWO[1], base(x_BWK)[1]) and y_BWO[0].eq(math.inf).all()


@pytest.mark.parametrize("short", [True, False])
@pytest.mark.parametrize("rows", [1, 7, 19])
@pytest.mark.parametrize(
    ("outputs", "width", "parts"),
    [(192, 96, [(0, 64), (64, 64), (128, 64)]), (128, 512, [(0, 128)]), (96, 64, [(64, 32)]), (24, 40, [(0, 24)])],
)
def test_on_a_cpu_weights_that_fit_bfloat16_are_read_as_such(
    monkeypatch: pytest.MonkeyPatch, outputs: int, width: int, parts: list[tuple[int, int]], rows: int, short: bool
) -> None:
    """What torch computes in float32, after a change of weights too."""
    torch.manual_seed(rows)
    gate, part = Gate(), low_rank(outputs, width, parts)
    layer = GatedLinear(Linear(width, outputs), gate, part)
    nn.init.normal_(layer.base.weight)
    x_NK, open_N = torch.randn(rows, width), torch.arange(rows) % 3 != 1
    for _ in range(2):
        with torch.no_grad(), gate.on(open_N[None]):
            part.b_OS.mul_(2)
            if short:
                part.a_SK.copy_(part.a_SK.bfloat16())
                part.b_OS.copy_(part.b_OS.bfloat16())
            monkeypatch.setenv("DINFER_KERNELS", "triton")
            found = layer(x_NK)
            monkeypatch.setenv("DINFER_KERNELS", "torch")
            torch.testing.assert_close(found, layer(x_NK), atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(found[~open_N], layer.base(x_NK)[~open_N], atol=1e-4, rtol=1e-4)
        assert (part.in_halves() is not None) is (short and width % 16 == outputs % 16 == 0)


@pytest.mark.gpu if CUDA else pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("rows", [7, 70])
@pytest.mark.parametrize(
    ("outputs", "width", "parts"),
    [(192, 96, [(0, 64), (64, 64), (128, 64)]), (128, 512, [(0, 128)]), (96, 64, [(64, 32)])],
)
def test_one_kernel_is_as_good_as_four(
    monkeypatch: pytest.MonkeyPatch, outputs: int, width: int, parts: list[tuple[int, int]], rows: int, split: bool
) -> None:
    """Matrices that are one weight, one whose other outputs have no part, and open and closed rows in tiles."""
    monkeypatch.setenv("DINFER_KERNELS", "torch")
    torch.manual_seed(rows)
    base, part, gate = Linear(width, outputs, bias=True), low_rank(outputs, width, parts), Gate()
    base, part = (module.to(DEVICE, SHORT) for module in (base, part))
    x_BWK, open_BW = torch.randn(1, rows, width, device=DEVICE).to(SHORT), torch.rand(1, rows, device=DEVICE) < 0.5
    open_BW[:, 64:] = False  # a tile without an open row
    with torch.no_grad(), gate.on(open_BW):
        want = GatedLinear(base, gate, part)(x_BWK)
        got = gated.gated_linear(x_BWK, base.weight, base.bias, part, open_BW[0], split=split)
    torch.testing.assert_close(close(got), want, atol=2e-2, rtol=2e-2)


@pytest.mark.rest
@pytest.mark.skipif(CUDA, reason="the test above runs the kernel there")
@torch.inference_mode()
def test_the_kernel_is_used_where_rows_are_few_and_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """With shapes of SmolLM2-135M. What a consumer adds up comes in parts, as without low-rank parts."""
    window = {"name": "sliding", "block": 7}
    gate, model = Gate(), tiny_model("drafts", dtype=torch.bfloat16, head_dim=16).to("meta")
    recipes = [
        compose(model, iteration=window, decoder={"name": "isd", "rejected": rejected}, cache="block")
        for rejected in ("cold", "branches")
    ]
    with recorded_launches(monkeypatch) as launches, torch.device("meta"):
        for outputs, width, parts in ((960, 576, [(0, 576), (576, 192), (768, 192)]), (576, 1536, [(0, 576)])):
            layer = GatedLinear(Linear(width, outputs), gate, low_rank(outputs, width, parts, 40)).bfloat16()
            for rows in (7, 28, 448, 1000):
                with gate.on(torch.empty(1, rows, dtype=torch.bool)):
                    layer.deferred(torch.empty(1, rows, width, dtype=torch.bfloat16))
        like = torch.empty(1, 7, dtype=torch.int64)
        drafts.paths(torch.empty(1, 7, 49152, dtype=torch.bfloat16), like[0, :1], like, 15, 3, 8)
    with recorded_launches(monkeypatch) as steps:
        for recipe in recipes:
            meta_steps(recipe)
        size, meta = PoolSize(1, 64, 8, 16), torch.device("meta")
        state = BatchState.alloc(recipes[1], size, dtype=torch.bfloat16, device=meta)
        shape = StepShape(Phase.WINDOW, 1, 7, 1, state.block, 4, (Versioned(15),))
        denoise_step(recipes[1], state, shape, torch.empty(1, dtype=torch.int64, device=meta))
    named = [f"triton.{name}" for name in ("gated", "drafts", "versions")]
    launches = {launch for launch in launches | steps if any(name in launch for name in named)}
    assert {"_decide", "_slide", "_feed", "_choose", "_committed", "_forked", "_copy"} < {
        json.loads(launch)[1] for launch in launches
    }
    assert sum("_gated_linear" in launch for launch in launches) == 4  # two tiles for each of two shapes
    assert failures(launches) == []


@pytest.mark.gpu if CUDA else pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("shape", "versions", "depth"), [((3, 7, 5000), 15, 3), ((2, 11, 300), 31, 5), ((2, 3, 40), 3, 1)]
)
def test_the_likeliest_paths_are_those_of_torch(shape: tuple[int, int, int], versions: int, depth: int) -> None:
    """Also where the region has no room for the last drafts, and in a row without drafts."""
    torch.manual_seed(0)
    logits_RLV, first_R = torch.randn(shape, device=DEVICE), torch.tensor([1, shape[1] - 2, 3], device=DEVICE)
    draft_RL = torch.tensor([[5], [5], [-1]], device=DEVICE).expand(3, shape[1])
    given = logits_RLV, first_R[: shape[0]], draft_RL[: shape[0]], versions, depth, 8
    assert torch.equal(drafts.paths(*given), likeliest(*given))


@pytest.mark.gpu if CUDA else pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("seed", range(3))
def test_kernels_of_drafts_do_what_torch_does(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """What is fed, what is confirmed and where the window slides, of rows of any state."""
    monkeypatch.setenv("DINFER_KERNELS", "torch")
    torch.manual_seed(seed)
    rows, width, block = 24, 8, 7

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape).to(DEVICE)

    start_B, made_R = draw(1, 20, rows), draw(0, 2, rows)
    end_B, most_B = start_B + draw(1, 8, rows), draw(9, 40, rows)
    pos_BW = (start_B - 1)[:, None] + torch.arange(width, device=DEVICE)
    run: Any = SimpleNamespace(pos_BW=pos_BW, tokens_BW=draw(0, 9, rows, width), status_BW=draw(0, 3, rows, width))
    run.pos_BW[0, 5:] = -1
    lanes: Any = SimpleNamespace(start_B=start_B, end_B=end_B, length_B=end_B + draw(0, 9, rows), live_B=made_R > 0)
    for drafts_NCX, versions in ((draw(-1, 9, 30, 1, block), 0), (draw(-1, 9, 30, 4, 3), 2)):
        given = run, lanes, draw(0, 30, rows), drafts_NCX, versions, 5, 1
        assert all(map(torch.equal, drafts.feed(*given), fed(*given)))
    bits = (draw(0, 3, rows, 1, block) == 0 for _ in range(3))
    after: Any = SimpleNamespace(
        **dict(zip(("open_BKL", "stop_BKL", "given_BKL"), bits, strict=True)), next_B=end_B + 1
    )
    for cut in (True, False):
        assert all(
            map(torch.equal, drafts.slide(lanes, after, most_B, 7, 2, cut), slide(lanes, after, most_B, 7, 2, cut))
        )
    bits_of = draw(0, 2, rows, block) > 0, draw(0, 2, rows, block) > 0, rows // 2
    assert torch.equal(drafts.committed(*bits_of), committed(*bits_of))
    lanes_of = draw(0, 2, 4, rows, block), draw(-1, 2, 30, 5, 3), draw(0, 30, rows)
    on_cpu = chosen(*(x.cpu() for x in lanes_of))  # which takes the first of several
    assert all(torch.equal(mine.cpu(), theirs) for mine, theirs in zip(drafts.choose(*lanes_of), on_cpu, strict=True))
    place_L = torch.arange(block, device=DEVICE)
    draft_RL = torch.where(place_L < draw(0, 5, rows, 1), draw(0, 3, rows, block), -1)
    token_RL, best_RL, masked_RL = draw(0, 2, rows, block), draw(0, 9, rows, block), draw(0, 9, rows, block) > 0
    for rejected, first_R in (("cold", made_R), ("branches", None)):
        stats: Any = SimpleNamespace(token_RL=token_RL, stat=lambda name: best_RL)
        state = {"draft": draft_RL}
        view: Any = SimpleNamespace(masked_RL=masked_RL, forward_R=made_R)
        wanted = ISD(rejected=rejected).select(stats, view, state)
        found = drafts.decide(draft_RL, token_RL, best_RL, masked_RL, first_R, 3)
        assert all(map(torch.equal, found, (wanted.commit_RL, wanted.token_RL, state["draft"])))


def test_ranks_that_divide_a_layer_refuse_low_rank_parts() -> None:
    network = GatedTransformer(tiny_model("drafts").spec)
    layer = network.get_submodule("blocks.0.out")
    layer.divided = True
    place = Placement("blocks.0.out.weight", tuple(layer.weight.shape))
    pair = torch.zeros(2, place.shape[1]), torch.zeros(place.shape[0], 2)
    with pytest.raises(ValueError, match="use tensor_parallel=1, or leave the adapter out"):
        network.add({"o": pair}, 1.0, {"o": place})
