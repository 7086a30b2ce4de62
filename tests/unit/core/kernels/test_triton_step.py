"""The small Triton kernels of a step against their torch references, on random canvases and proposals."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.matrix import SAMPLE, Combination, completions, engine_for, outcome, requests_for
from support.models import MASK, VOCAB
from support.scripted import scripted_spec
from torch import Tensor

CUDA = torch.cuda.is_available()
triton = pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu] if CUDA else []


from dinfer.core.decoders.editing import Decoded, fill_and_edit  # noqa: E402
from dinfer.core.decoders.threshold import confident  # noqa: E402
from dinfer.core.iterations import sweep  # noqa: E402
from dinfer.core.kernels import attention, canvas, rotary, selection, token_stats  # noqa: E402
from dinfer.core.memory import KVPool, PoolSize  # noqa: E402
from dinfer.core.step import commits, versions  # noqa: E402
from dinfer.core.step.canvas import Canvas  # noqa: E402
from dinfer.core.step.contracts import Edit, Moved, Proposal, TokenStats  # noqa: E402
from dinfer.core.step.cursors import CURSORS, BlockView, Phase, RowCursors, Status  # noqa: E402
from dinfer.core.terms.plan import Place, WindowPlan  # noqa: E402
from dinfer.core.terms.spec import AttentionLayout  # noqa: E402
from dinfer.core.terms.stats import Quota  # noqa: E402
from dinfer.kernels.triton import launch  # noqa: E402
from dinfer.research.kernels import blocks as sliding  # noqa: E402

DEVICE = "cuda" if CUDA else "cpu"
SLOTS, CAPACITY, LANES = 5, 70, 3


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def both(monkeypatch: pytest.MonkeyPatch, work: Callable[[], Any]) -> tuple[Any, Any]:
    """What the kernels give, and what torch gives."""
    made = []
    for use in (True, False):
        for module in (attention, canvas, commits, rotary, selection, sweep, sliding, versions):
            monkeypatch.setattr(module, "use_triton", lambda *given, use=use: use)
        made.append(work())
    return made[0], made[1]


def tensors_of(moved: Moved) -> list[Tensor]:
    return [value for field in fields(moved) if (value := getattr(moved, field.name)) is not None]


def same(got: object, want: object) -> None:
    if isinstance(want, Tensor):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
        return
    assert isinstance(want, list | tuple) and isinstance(got, list | tuple) and len(got) == len(want)
    for mine, theirs in zip(got, want, strict=True):
        same(mine, theirs)


def number(high: int, *shape: int, low: int = 0) -> Tensor:
    return torch.randint(low, high, shape, device=DEVICE)


def chance(*shape: int, p: float = 0.5) -> Tensor:
    return torch.rand(shape, device=DEVICE) < p


def some_canvas(blocks: int = 1) -> Canvas:
    made = Canvas.alloc(SLOTS, CAPACITY, blocks, (3, 7), DEVICE)
    made.tokens_NS.copy_(number(VOCAB, *made.tokens_NS.shape))
    made.next_NS.copy_(number(CAPACITY, *made.next_NS.shape))
    made.status_NS.copy_(number(3, *made.status_NS.shape))
    made.cursors_NC.copy_(number(99, *made.cursors_NC.shape))
    made.cursors_NC[:, CURSORS.index("phase_B")] = number(3, SLOTS + 1)
    made.cursors_NC[:, len(CURSORS) :] = number(4, SLOTS + 1, 2 * blocks)
    return made


def some_lanes(made: Canvas, length: int, blocks: int = 1) -> RowCursors:
    lanes = made.lanes(torch.tensor([3, 0, SLOTS], device=DEVICE), Phase.WINDOW)
    start_B = number(CAPACITY - blocks * length, LANES)
    end_B = start_B + number(blocks * length + 1, LANES, low=1)
    return replace(lanes, start_B=start_B, end_B=end_B, stops_B=number(2, LANES))


@pytest.mark.rest(but=2)
@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("full", [False, True, None])
def test_lanes_are_gathered_and_finished(monkeypatch: pytest.MonkeyPatch, blocks: int, full: bool | None) -> None:
    made = some_canvas(blocks)
    moved = [number(CAPACITY, 5) for _ in range(4)]
    gained_B, quota_BK = number(9, 5, low=-3), number(9, 5, blocks)
    done_B, broken_B, full_B = (chance(5) for _ in range(3))
    entered_BK, left_B = chance(5, blocks), number(blocks + 1, 5) if blocks > 1 else None
    slot_B = torch.tensor([4, 1, 2, SLOTS, 0], device=DEVICE)

    def work() -> list[Tensor]:
        mine = replace(made, cursors_NC=made.cursors_NC.clone())
        lanes = mine.lanes(slot_B, Phase.FULL)
        seen = [getattr(lanes, f.name) for f in fields(lanes)]
        live_B = torch.tensor([True, False, True, False, True], device=DEVICE)
        there = dict(zip(("start_B", "end_B", "block_B", "kept_B"), moved, strict=True))
        lanes = replace(lanes, live_B=live_B, quota_BK=quota_BK, **there)
        commits.finish(
            mine, lanes, Moved(lanes.start_B, lanes.end_B, lanes.block_B, entered_BK, done_B, left_B),
            gained_B=gained_B, broken_B=broken_B, full_B=full_B if full is None else full, refreshed=full is True,
            hit=full is None,
        )  # fmt: skip
        return [*seen, mine.cursors_NC]

    same(*both(monkeypatch, work))


@pytest.mark.rest(but=1)
@pytest.mark.parametrize(("length", "blocks"), [(8, 1), (5, 3), (1, 1)])
def test_active_rows_and_the_values_of_a_window(monkeypatch: pytest.MonkeyPatch, length: int, blocks: int) -> None:
    made = some_canvas(blocks)
    lanes = some_lanes(made, length, blocks)
    pos_BW, fits_B = number(CAPACITY, LANES, 9, low=-1), chance(LANES, p=0.7)

    def work() -> tuple[object, ...]:
        rows = canvas.active_rows(
            made.tokens_NS, made.status_NS, lanes.slot_B, lanes.start_B, lanes.end_B, lanes.step_BK, lanes.quota_BK,
            block=length, statuses=(int(Status.OPEN), int(Status.GIVEN)),
        )  # fmt: skip
        mine = replace(lanes)
        return rows, made.window_values(mine, pos_BW, fits_B), mine.live_B

    same(*both(monkeypatch, work))


@pytest.mark.rest(but=1)
@pytest.mark.parametrize("repeat", [1, 3])
def test_option_columns(monkeypatch: pytest.MonkeyPatch, repeat: int) -> None:
    values_NO = torch.rand(SLOTS, 4, dtype=torch.float64, device=DEVICE) * 9
    slot_B = torch.tensor([2, 0, 2], device=DEVICE)
    same(*both(monkeypatch, partial(canvas.option_columns, values_NO, slot_B, repeat)))


@pytest.mark.rest(but=1)
@pytest.mark.parametrize(("width", "active", "shift"), [(12, 8, 0), (300, 8, 1), (4, 8, 1), (1, 1, 0)])
def test_window_positions(monkeypatch: pytest.MonkeyPatch, width: int, active: int, shift: int) -> None:
    start_B, kept_B, prompt_B = number(30, 9), number(20, 9), number(20, 9)
    end_B = start_B + number(active + 1, 9)
    length_B, seen_B, mask_B = end_B + number(2 * width, 9), end_B - number(2, 9), start_B + number(active, 9)
    place_B = Place(start_B, end_B, length_B, kept_B, prompt_B, seen_B, mask_B)
    plans = [WindowPlan(back, ahead) for back in (None, 0, 5) for ahead in (None, 0, 3)]
    plans += [WindowPlan(keeps=True, ahead=None, front=front, behind=front // 2) for front in (0, 3)]
    plans += [WindowPlan(0, 0, front=3, behind=1), WindowPlan(0, None, response=True, unseen=True)]
    modes, blocks = ((False, False), (False, True), (True, False)), ((0, False), (1, False), (4, False), (4, True))
    points = itertools.product(enumerate(plans), enumerate(blocks), enumerate(modes))
    for (i, plan), (j, (block, own)), (k, (prefill, settles)) in points:
        if (i + j + k) % 3:  # every pair of two of them remains
            continue
        work = partial(
            canvas.window_positions, plan, place_B, AttentionLayout(shift, block, own), width=width, active=active,
            prefill=prefill, keys_only=settles,
        )  # fmt: skip
        got, want = both(monkeypatch, work)
        same([made for made in got if made is not None], [made for made in want if made is not None])


def test_key_places(monkeypatch: pytest.MonkeyPatch) -> None:
    table_NP, pos_BW = number(9, SLOTS, 6), number(24, LANES, 300, low=-1)
    slot_B = torch.tensor([2, 0, 4], device=DEVICE)
    for pages in (3, 6):
        work = partial(canvas.key_places, table_NP, slot_B, pos_BW, page=4, pages=pages, null=0, scratch=1)
        same(*both(monkeypatch, work))


@pytest.mark.rest(but=1)
@pytest.mark.parametrize("block", [None, 1, 4])
def test_attention_interval(monkeypatch: pytest.MonkeyPatch, block: int | None) -> None:
    pos_BW, start_B = number(60, LANES, 7, low=-1), number(5, LANES)
    end_B = start_B + number(50, LANES)
    for start, prompt in itertools.product((start_B, None), (None, number(30, LANES))):
        same(*both(monkeypatch, partial(attention.attention_interval, pos_BW, start, end_B, block, prompt)))


@pytest.mark.rest(but=1)
@pytest.mark.parametrize(("dim", "pairs"), [(16, None), (24, None), (32, 5)])
def test_rotary_table(monkeypatch: pytest.MonkeyPatch, dim: int, pairs: int | None) -> None:
    pos_BW = number(4096, 2, 6, low=-1)
    got, want = both(monkeypatch, lambda: rotary.rotary_table(pos_BW, dim, 5e5, torch.bfloat16, pairs))
    for mine, theirs in zip(got, want, strict=True):
        assert mine.dtype == theirs.dtype == torch.float32
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


def some_stats(rows: int, length: int, dtype: torch.dtype, *, drawn: bool, broken: float) -> TokenStats:
    confidence_RL = (number(6, rows, length) / 6).to(dtype)  # many are equal
    confidence_RL = torch.where(chance(rows, length, p=broken), torch.nan, confidence_RL)
    return TokenStats(
        number(VOCAB - 1, rows, length), confidence_RL, (number(6, rows, length) / 7).to(dtype),
        mask_drawn_RL=chance(rows, length) if drawn else None,
    )  # fmt: skip


@pytest.mark.rest(but=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("above", [False, True])
def test_confident(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, drawn: bool, above: bool) -> None:
    share = Quota(number(9, 6, 1), number(5, 6, 1, low=1), number(4, 6, 1))
    for length, least in itertools.product((1, 8, 13), (1, 3, number(4, 6, 1), share)):
        stats, masked_RL = some_stats(6, length, dtype, drawn=drawn, broken=0.05), chance(6, length)
        bar_R1 = torch.tensor([0.9, 0.5, 1 / 6, 0.0, 1.0, 2 / 6], dtype=torch.float64, device=DEVICE)[:, None]
        same(*both(monkeypatch, partial(confident, stats, masked_RL, bar_R1, least=least, above=above)))


@pytest.mark.rest(but=1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("drawn", [False, True])
def test_fill_and_edit(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, drawn: bool) -> None:
    found: list[Any] = []
    for length, least in itertools.product((1, 8, 13), (1, number(4, 9, 1))):
        stats, masked_RL = some_stats(9, length, dtype, drawn=drawn, broken=0.02), chance(9, length)
        masked_RL[:6] = False  # rows that are only edited, before, at and behind the end of their budget
        bar_R1, edit_R1 = (torch.rand(9, 1, device=DEVICE, dtype=torch.float64) for _ in range(2))
        tokens_RL, given_RL = torch.where(chance(9, length), stats.token_RL, 0), chance(9, length, p=0.2)
        steps_R, budget_R1 = number(4, 9), number(4, 9, 1)

        def work(seen=(stats, masked_RL, bar_R1), held=(tokens_RL, given_RL, edit_R1), least=least,
                 counts=(steps_R, budget_R1)) -> list[Any]:  # fmt: skip
            steps_R = counts[0].clone()
            decoded = Decoded(*held, steps_R, counts[1])
            return [*fill_and_edit(*seen, decoded, least=least), steps_R]

        got, want = both(monkeypatch, work)
        same(got, want)
        found.append([flags.flatten() for flags in want[:4]])
    assert all(0 < torch.cat(flags).sum() < torch.cat(flags).numel() for flags in zip(*found, strict=True))


@pytest.mark.rest(but=1)
@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("edits", [False, True])
@pytest.mark.parametrize("masks", [True, False], ids=["masks", "noise"])
@pytest.mark.parametrize("drawn", [False, True])
def test_commit(monkeypatch: pytest.MonkeyPatch, blocks: int, edits: bool, masks: bool, drawn: bool) -> None:
    for trial in range(24):
        length = (8, 5, 1)[trial % 3]
        shape = rows, _ = LANES * blocks, length
        dtype = torch.float64 if trial % 5 == 4 else torch.float32
        made = some_canvas(blocks)
        lanes = some_lanes(made, length, blocks)
        lanes = replace(lanes, live_B=torch.tensor([True, trial % 4 > 0, False], device=DEVICE))
        pos_RL, tokens_RL, masked_RL, given_RL, quota_R = canvas.active_rows(
            made.tokens_NS, made.status_NS, lanes.slot_B, lanes.start_B, lanes.end_B, lanes.step_BK, lanes.quota_BK,
            block=length, statuses=(int(Status.OPEN), int(Status.GIVEN)),
        )  # fmt: skip
        view = BlockView(
            pos_RL, tokens_RL, masked_RL, given_RL, quota_R, quota_R, quota_R, quota_R, quota_R, quota_R, {},
            must_progress_R=chance(rows, p=0.7) if trial // 3 % 2 else None, edits=edits,
        )  # fmt: skip
        stats = some_stats(*shape, dtype, drawn=drawn, broken=0.02)
        proposal = Proposal(
            chance(*shape, p=0.3),
            token_RL=number(VOCAB + 2, *shape, low=-1) if trial % 2 else None,
            edit=Edit(
                remask_RL=chance(*shape, p=0.3) if trial // 6 % 2 else None,
                retry_R=chance(rows) if trial % 4 == 1 else None,
                source_RL=number(length + 1, *shape, low=-2) if trial // 2 % 2 else None,
            ),
            waits_R=chance(rows, p=0.4) if trial % 5 < 2 else None,
        )
        spec = scripted_spec(mask_id=MASK if masks else None)
        blank_RL = MASK if masks else number(VOCAB, *shape)

        same(*both(monkeypatch, partial(committed, made, lanes, view, stats, proposal, spec, blank_RL)))
        stats = some_stats(*shape, dtype, drawn=drawn, broken=0)
        same(*both(monkeypatch, partial(commits.with_progress, proposal.commit_RL, stats, view)))


def committed(made: Canvas, *rest: Any) -> list[Tensor]:
    """What `commit` returns, and a copy of the canvas after it."""
    mine = replace(made, tokens_NS=made.tokens_NS.clone(), status_NS=made.status_NS.clone())
    done = commits.commit(mine, *rest)
    there = [mine.tokens_NS[:, :-1], mine.status_NS[:, :-1]]  # the last column is scratch
    return [*(getattr(done, f.name) for f in fields(done)), *there]


@pytest.mark.rest(but=2)
@pytest.mark.parametrize("stop", ["block", "cut", "off"])
@pytest.mark.parametrize(("blocks", "length"), [(1, 4), (3, 5), (4, 8)])
def test_slide_blocks(monkeypatch: pytest.MonkeyPatch, stop: str, blocks: int, length: int) -> None:
    """Thresholds that quotients meet exactly, which single precision would miss."""
    count = 12
    stop_BKL, given_BKL, open_BKL = (chance(count, blocks, length, p=p) for p in (0.05, 0.3, 0.3))
    start_B, block_B = number(30, count), number(9, count)
    end_B = start_B + number(blocks * length + 1, count)
    next_B, length_B = end_B + number(4, count), end_B + number(9, count)
    finished_BK, stable_BK, hold_B = ~open_BKL.any(-1) | chance(count, blocks), torch.rand(count, blocks), chance(count)
    lanes: Any = SimpleNamespace(start_B=start_B, end_B=end_B, block_B=block_B, length_B=length_B)
    flags = {"stop_BKL": stop_BKL, "given_BKL": given_BKL, "open_BKL": open_BKL, "finished_BK": finished_BK}
    after: Any = SimpleNamespace(**flags, next_B=next_B)
    stable_BK = (stable_BK.to(DEVICE).double() * 4).round() / 4
    rules = (
        (True, 0.6, None, None),
        (False, 0.0, stable_BK, hold_B),
        (True, 2 / 3, stable_BK, None),
        (False, 1, None, None),
    )
    for align, add_at, stable, hold in rules:
        given = {"grid": sweep.Grid(length, align=align), "add_at": add_at, "stable_at": 0.75, "stop": stop}
        work = partial(sliding.slide_blocks, lanes, after, stable, hold, **given)
        same(*map(tensors_of, both(monkeypatch, work)))
        rule = {"block": length, "force_at": add_at, "first": align}
        same(*both(monkeypatch, partial(sliding.forced_blocks, open_BKL, start_B, end_B, **rule)))


@pytest.mark.rest(but=2)
@pytest.mark.parametrize("stop", ["block", "cut", "off"])
@pytest.mark.parametrize("blocks", [1, 3])
def test_sweep_on(monkeypatch: pytest.MonkeyPatch, stop: str, blocks: int) -> None:
    count = 64
    stop_BKL, given_BKL, open_BKL = (chance(count, blocks, 5, p=p) for p in (0.1, 0.5, 0.2))
    next_B, *here = (number(40, count) for _ in range(5))
    flags = {"stop_BKL": stop_BKL, "given_BKL": given_BKL, "open_BKL": open_BKL}
    after: Any = SimpleNamespace(**flags, finished_BK=chance(count, blocks, p=0.8), next_B=next_B)
    lanes: Any = SimpleNamespace(**dict(zip(("length_B", "start_B", "end_B", "block_B"), here, strict=True)))
    for grid in (sweep.Grid(5), sweep.Grid(8, align=False), sweep.Grid(4, lead=8), sweep.Grid(1)):
        same(*map(tensors_of, both(monkeypatch, partial(sweep.sweep_on, lanes, after, grid, stop))))


@pytest.mark.rest(but=1)
@pytest.mark.parametrize(
    ("grid", "blocks"),
    [
        (sweep.Grid(4), [(0, 4), (0, 4), (8, 12), (8, 12)]),
        (sweep.Grid(4, align=False), [(0, 4), (3, 7), (8, 12), (9, 13)]),
        (sweep.Grid(4, lead=8), [(0, 1), (3, 4), (8, 9), (9, 12)]),
    ],
)
def test_the_block_of_a_position(grid: sweep.Grid, blocks: list[tuple[int, int]]) -> None:
    places = [0, 3, 8, 9]
    assert [grid.block_at(place) for place in places] == blocks
    start_B, end_B = grid.block_at(torch.tensor(places))
    assert [*zip(start_B.tolist(), end_B.tolist(), strict=True)] == blocks


@pytest.mark.skipif(CUDA, reason="on a GPU, tests/gpu runs whole generations")
@pytest.mark.rest  # many seconds each in the interpreter
@pytest.mark.parametrize("combination", SAMPLE[::36], ids=str)
def test_whole_generations_have_the_same_tokens(combination: Combination, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every small kernel of the step, draws among them, and torch's network."""
    recipe = combination.recipe()
    requests = requests_for(recipe)[:2]
    want = [outcome(c) for c in completions(engine_for(recipe), requests)]
    for module in (attention, canvas, commits, rotary, selection, sweep, token_stats):
        small = module is not token_stats
        monkeypatch.setattr(
            module, "use_triton", lambda tensor, *given, small=small: not (small and tensor.is_floating_point())
        )
    assert [outcome(c) for c in completions(engine_for(recipe), requests)] == want


@pytest.mark.rest(but=1)
@pytest.mark.parametrize(("card", "depth"), [(232_448, 4), (166_912, 2), (101_376, 1), (49_152, 1)])
def test_pipelines_fit_the_card(monkeypatch: pytest.MonkeyPatch, card: int, depth: int) -> None:
    """Of 48 KB a stage, on H200, A100, RTX 4090, and what is smaller than one stage."""
    monkeypatch.setattr(launch, "max_shared_mem", lambda index: card)
    device = torch.device("cuda", card >> 11)  # another index for each: what is found of a device is kept
    assert launch.stages(device, 3 << 14, 4) == depth


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn], ids=str)
def test_versions_get_pages_of_their_own(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Windows within a page, over two and of padding alone; keys beside them are copied."""
    pool = KVPool.alloc(scripted_spec(), PoolSize(4, 64, 20, 8), dtype=dtype, device=DEVICE, candidates=5, window=9)
    pool.table_NP.random_(1, 20)
    held = [torch.randn(side.shape, device=DEVICE).to(dtype) for side in (pool.k_JPTGE, pool.v_JPTGE)]
    pos_BW = torch.tensor([[16], [5], [27]], device=DEVICE) + torch.arange(8, device=DEVICE)
    pos_BW[0, 6:], pos_BW[1] = -1, -1
    slot_B = torch.tensor([2, 0, 3], device=DEVICE)

    def made() -> tuple[Tensor, ...]:
        own = replace(pool, k_JPTGE=held[0].clone(), v_JPTGE=held[1].clone())
        return versions.forked(own, slot_B, pos_BW, 4), own.k_JPTGE.float(), own.v_JPTGE.float()

    mine, theirs = both(monkeypatch, made)
    assert all(map(torch.equal, mine, theirs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn], ids=str)
def test_the_chosen_version_gives_its_keys(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Of three lanes one keeps its own; one has a padded position, which all versions write to the same place."""
    pool = KVPool.alloc(scripted_spec(), PoolSize(4, 64, 20, 8), dtype=dtype, device=DEVICE, candidates=5, window=9)
    held = [torch.randn(side.shape, device=DEVICE).to(dtype) for side in (pool.k_JPTGE, pool.v_JPTGE)]
    places = held[0].shape[1] * held[0].shape[2]
    write_CBW = torch.randperm(places, device=DEVICE)[: 4 * 3 * 7].view(4, 3, 7).clone()
    write_CBW[:, 2, 6] = write_CBW[0, 2, 6]
    run: Any = SimpleNamespace(attend=SimpleNamespace(write_X=write_CBW.flatten()), place_BW=write_CBW[0])
    choice_B = torch.tensor([3, 0, 1], device=DEVICE)

    def made() -> list[Tensor]:
        own = replace(pool, k_JPTGE=held[0].clone(), v_JPTGE=held[1].clone())
        versions.adopt(own, run, choice_B)
        return [side.float() for side in (own.k_JPTGE, own.v_JPTGE)]

    mine, theirs = both(monkeypatch, made)
    assert all(map(torch.equal, mine, theirs))
    for before, after in zip(held, mine, strict=True):
        was, now = (side.float().flatten(1, 2) for side in (before, after))
        for lane, choice in enumerate(choice_B.tolist()):
            assert torch.equal(now[:, write_CBW[0, lane]], was[:, write_CBW[choice, lane]])
        others = torch.ones(places, dtype=torch.bool, device=DEVICE)
        others[write_CBW[0].flatten()] = False
        assert torch.equal(now[:, others], was[:, others])
