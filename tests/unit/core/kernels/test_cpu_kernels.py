"""Kernels in C on a CPU: as near as rounded inputs allow, rows by themselves, and torch without a compiler."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import gguf
import pytest
import torch
from torch import Tensor

from dinfer.core.kernels import dispatch
from dinfer.core.kernels.attention import paged_attention
from dinfer.core.kernels.dispatch import native_few_bits
from dinfer.core.kernels.linear import linear, round_rows
from dinfer.core.kernels.norm import add_rms_norm, swiglu
from dinfer.core.kernels.rotary import projections, rotary_table, rotate_and_store
from dinfer.core.kernels.token_stats import token_stats
from dinfer.core.kernels.types import HeadNorm, WeightPart
from dinfer.core.terms.stats import Draw
from dinfer.formats.gguf_file import dequantised
from dinfer.formats.kernels import packed
from dinfer.formats.kernels.packed import widened
from dinfer.formats.kernels.scaled import scaled_linear
from dinfer.formats.rounding.blocks import Blocks, Section
from dinfer.kernels.cpu import linear as native

SHAPES = [(2, 64, 7), (3, 128, 13), (4, 2048, 12), (9, 4160, 29)]  # rows, inputs, outputs: whole tiles and the rest

pytestmark = pytest.mark.skipif(native.library() is None, reason="no compiler, or no CPU with AVX2")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def int8_linear(x: Tensor, weight_OK: Tensor, scale_O: Tensor) -> Tensor:
    return native.native_linear(x, [WeightPart("int8", weight_OK, scale_O[:, None])])


def int4_linear(x: Tensor, weight_OH: Tensor, scale_OG: Tensor) -> Tensor:
    return native.native_linear(x, [WeightPart("int4", weight_OH, scale_OG)])


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.parametrize("shape", SHAPES)
def test_8_bits(shape: tuple[int, int, int]) -> None:
    """Inputs are rounded to 16 bits, so an error is far below that of bfloat16, 2e-3."""
    rows, width, outputs = shape
    x, made = torch.randn(rows, width), round_rows(torch.randn(outputs, width), torch.int8)
    want = x.double() @ (made.values.double() * made.scale[:, None].double()).T
    assert error(int8_linear(x, made.values, made.scale), want) < 1e-4
    bias = torch.randn(outputs)
    got = scaled_linear(x.bfloat16()[None], made.values, made.scale, bias)
    assert got.dtype == torch.bfloat16 and got.shape == (1, rows, outputs)
    assert error(got[0], want + bias.double()) < 6e-3


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("shape", SHAPES)
def test_4_bits(shape: tuple[int, int, int], group: int) -> None:
    """Each group of inputs is rounded to 8 bits; scales may lie in memory in either order, and be negative."""
    rows, width, outputs = shape
    if width % group:
        group = 64
    x, values = torch.randn(rows, width), torch.randint(16, (outputs, width))
    scale = torch.randn(outputs, width // group).half()
    held = packed.halves(values, group)
    want = x.double() @ packed.unpack(held, scale.float()).double().T
    assert error(int4_linear(x, held, scale), want) < 1.5e-2
    assert torch.equal(int4_linear(x, held, scale.T.contiguous().T), int4_linear(x, held, scale))


def blocks(kind: str, *rows: int, width: int) -> WeightPart:
    """Random blocks. Small bytes make finite scales."""
    size = gguf.quant_shape_to_byte_shape((width,), gguf.GGMLQuantizationType[kind])[0]
    return WeightPart(kind, torch.randint(48, (*rows, size), dtype=torch.uint8))


@pytest.mark.parametrize("kind", native.KINDS[2:])
def test_blocks_of_gguf_files(kind: str) -> None:
    """A whole tile and a rest, of several pieces of inputs, beside outputs of another type. Whole tiles are decoded in
    another way, and few rows have loops of their own."""
    x, parts = torch.randn(9, 1536), [blocks(kind, 23, width=1536), blocks("Q6_K", 9, width=1536)]
    got, want = native.native_linear(x, parts), x.double() @ widened(parts, dequantised).double().T
    for here in (slice(0, 23), slice(23, 32)):
        assert error(got[:, here], want[:, here]) < (1e-4 if kind == "IQ4_NL" and not here.start else 1.5e-2)
    assert torch.equal(native.native_linear(x, [WeightPart(kind, parts[0].values[:9])]), got[:, :9])
    assert all(torch.equal(native.native_linear(x[:rows], parts), got[:rows]) for rows in range(1, 9))


@pytest.mark.parametrize("kind", packed.TILES)
def test_blocks_in_tiles(kind: str) -> None:
    """What the same blocks give row by row, of experts too; and they become rows of blocks again."""
    x, part = torch.randn(9, 1536), blocks(kind, 2, 48, width=1536)
    tiled = WeightPart(f"{kind} in tiles", packed.in_tiles(kind, part.values))
    assert packed.plain(tiled).kind == kind and torch.equal(packed.plain(tiled).values, part.values)
    count = torch.tensor([2, 7])
    if native.reads_tiles():
        assert torch.equal(native.native_linear(x, [tiled], count), native.native_linear(x, [part], count))
        one, own = (WeightPart(held.kind, held.values[1].contiguous()) for held in (tiled, part))
        for rows in range(1, 10):  # up to eight of them meet what is decoded at once
            assert torch.equal(native.native_linear(x[:rows], [one]), native.native_linear(x, [own])[:rows])
        x[5:] = 0  # rows that nobody reads are left out
        assert torch.equal(native.native_linear(x, [one])[:5], native.native_linear(x[:5], [own]))
        assert not native.native_linear(x, [one])[5:].any() and not native.native_linear(x[5:], [one]).any()
    held = Blocks([Section(kind, 48, part.values.shape[-1])], dequantised, tiles=True)
    (weight,) = held.empty((48, 1536), torch.float32)
    held.place((weight,), 0, part.values[1])
    want, index = dequantised(kind, part.values[1]), torch.tensor([[47, 0], [16, 31]])
    assert not torch.equal(weight, part.values[1].flatten()) and torch.equal(held.widened((weight,)), want)
    assert torch.equal(held.rows((weight,), index), want[index])


def test_experts() -> None:
    """Each expert's rows meet its own matrix, and some have none."""
    x, part = torch.randn(14, 256), blocks("Q4_K", 3, 40, width=256)
    got = native.native_linear(x, [part], torch.tensor([3, 0, 11]))
    assert torch.equal(got[:3], native.native_linear(x[:3], [WeightPart("Q4_K", part.values[0])]))
    assert torch.equal(got[3:], native.native_linear(x[3:], [WeightPart("Q4_K", part.values[2])]))


@pytest.mark.parametrize("shape", [(8, 16, 1), (13, 272, 40), (29, 528, 71), (201, 64, 33)])
def test_float32(shape: tuple[int, int, int]) -> None:
    """Whole tiles and the rest; rows are as alone."""
    rows, width, outputs = shape
    x, weight = torch.randn(rows, width), torch.randn(outputs, width)
    got = native.linear(x[None], weight)[0]
    assert error(got, x.double() @ weight.double().T) < 1e-6
    assert torch.equal(native.linear(x[3:], weight), got[3:])


@pytest.mark.skipif(not native.slow_blas(), reason="torch's own is as fast here")
def test_where_float32_is_ours() -> None:
    x, weight, bias = torch.randn(13, 272), torch.randn(40, 272), torch.randn(40)
    assert dispatch.native("linear", x, weight) is None, "training keeps to torch"
    with torch.no_grad():
        assert dispatch.native("linear", x, weight) is native and native.faster(x) and not native.faster(x[:2])
        assert torch.equal(linear(x, weight, bias), native.linear(x, weight) + bias)


def both(monkeypatch: pytest.MonkeyPatch, work: Callable[[], tuple[Tensor, ...]]) -> None:
    """Holds what the kernels find to what torch does, without gradients."""
    with torch.no_grad():
        got = work()
        monkeypatch.setenv("DINFER_KERNELS", "torch")
        want = work()
    for one, other in zip(got, want, strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        assert error(one, other.double()) < 1e-6


@pytest.mark.parametrize(("heads", "size", "queries"), [((4, 4), 64, 5), ((6, 2), 32, 70), ((2, 1), 256, 1)])
def test_attention_over_pages(
    heads: tuple[int, int], size: int, queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Intervals that begin and end within pages, one of a single key, and one that reaches behind the pages."""
    query_heads, key_heads = heads
    pages = torch.randperm(9)[None].expand(2, -1).reshape(3, 6)
    k, v = torch.randn(2, 9, 16, key_heads, size)
    q, first = torch.randn(3, queries, query_heads, size), torch.randint(40, (3, queries))
    last = first + torch.randint(1, 80, (3, queries))
    last[0, 0] = first[0, 0] + 1
    both(monkeypatch, lambda: (paged_attention(q, k, v, pages, (first, last)),))
    with torch.no_grad():
        monkeypatch.delenv("DINFER_KERNELS")
        alone = paged_attention(q[1:2, :1], k, v, pages[1:2], (first[1:2, :1], last[1:2, :1]))
        assert torch.equal(alone, paged_attention(q, k, v, pages, (first, last))[1:2, :1])


def test_numbers_that_are_none_stay_in_their_row() -> None:
    q, pages = torch.randn(2, 3, 2, 32), torch.arange(4).view(2, 2)
    k, v = torch.randn(2, 4, 16, 2, 32)
    k[3, 15, 0, 7] = torch.nan
    with torch.no_grad():
        got = paged_attention(q, k, v, pages, (torch.zeros(2, 3, dtype=torch.int64), torch.full((2, 3), 32)))
        rows = got.flatten(2), add_rms_norm(got.flatten(2), None, torch.ones(64), 1e-5)[1], swiglu(got)[:, :, 0]
    for row in rows:
        assert row[0].isfinite().all() and row[1].isnan().any(-1).all()


def test_norms_and_activation(monkeypatch: pytest.MonkeyPatch) -> None:
    x, delta, weight = torch.randn(2, 5, 144), torch.randn(2, 5, 144), torch.randn(144)
    large = torch.cat((x * 100, x), -1)

    def work() -> tuple[Tensor, ...]:
        plain, summed = add_rms_norm(x, None, weight, 1e-5), add_rms_norm(x, delta, weight, 1e-5)
        return *plain, *summed, swiglu(large)  # type: ignore[return-value]

    both(monkeypatch, work)


@pytest.mark.parametrize("mask", [None, 0, 70, 129])
@pytest.mark.parametrize("spread", [0.0, 1.0, 20.0])
def test_draws(mask: int | None, spread: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of torch, which adds noise to every logit."""
    logits_RLV, wanted_RL = spread * torch.randn(4, 33, 130), torch.rand(4, 33) < 0.7
    logits_RLV[1, :, 5:90] = logits_RLV[2, :9] = float("-inf")
    scale_R1, noisy_R1 = torch.tensor([[1.0], [0.5], [1.0], [0.0]]).double(), torch.ones(4, 1, dtype=torch.bool)
    seed_R, pos_RL, step_R = torch.randint(2**53, (4,)), torch.arange(33).repeat(4, 1), torch.arange(4)
    given = Draw(logits_RLV, logits_RLV, scale_R1, noisy_R1, seed_R, pos_RL, step_R)

    def stats() -> list[Tensor | None]:
        found = token_stats(logits_RLV, mask, torch.float32, draw=given, wanted_RL=wanted_RL)
        return [found.token_RL, found.confidence_RL, found.mask_confidence_RL, found.mask_drawn_RL]

    with torch.inference_mode():
        got = stats()
        monkeypatch.setenv("DINFER_KERNELS", "torch")
        torch.testing.assert_close(got, stats(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("mask", [None, 0, 70, 129])
def test_statistics(mask: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of torch, of logits that are masked, or no numbers, too."""
    logits_RLV, wanted_RL = 5 * torch.randn(3, 9, 130), torch.rand(3, 9) < 0.7
    logits_RLV[0, :4, 5:] = logits_RLV[0, 1, :] = float("-inf")
    logits_RLV[1, 0, 3], logits_RLV[1, 1, 3] = float("nan"), float("inf")
    wanted_RL[0, :4] = wanted_RL[1, :2] = True
    logits_RLV[2, 0, [7, 99]] = 40.0  # the first of the best

    def stats() -> list[Tensor | None]:
        found = token_stats(logits_RLV, mask, torch.float32, wanted_RL=wanted_RL, needs=["best"])
        token_RL = found.token_RL.where(found.finite_RL, -1)  # of others nobody takes a token
        assert torch.equal(found.token_RL, found.stat("best"))
        return [token_RL, found.confidence_RL, found.mask_confidence_RL.where(found.finite_RL, -1)]

    with torch.inference_mode():
        monkeypatch.setattr(Tensor, "softmax", Mock(side_effect=AssertionError("torch goes over all logits again")))
        got = stats()
        monkeypatch.undo()
        monkeypatch.setenv("DINFER_KERNELS", "torch")
        torch.testing.assert_close(got, stats(), rtol=1e-5, atol=1e-30, equal_nan=True)


def test_log_sums() -> None:
    logits_RLV, wanted_RL, scale_R1 = (
        20 * torch.randn(3, 5, 130),
        torch.rand(3, 5) < 0.7,
        torch.tensor([[1.0], [2], [0.5]]),
    )
    logits_RLV[0, 0, 3:] = float("-inf")
    with torch.inference_mode():
        want_RL = (logits_RLV.double() / scale_R1[..., None]).logsumexp(-1).float().masked_fill(~wanted_RL, 0)
        torch.testing.assert_close(native.log_sums(logits_RLV, scale_R1, wanted_RL), want_RL, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("dim", "normed"), [(64, True), (64, False), (24, False)])
def test_rotation(dim: int, normed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of whole heads and of a part of them, with QK-norm and without; places of other rows stay as they are."""
    qkv, write = torch.randn(2, 3, 8, 64), torch.tensor([5, 0, 7, 1, 2, 9])
    table = rotary_table(torch.randint(99, (2, 3)), dim, 1e4, torch.float32)
    norm = HeadNorm(torch.randn(128), 1e-5) if normed else None

    def work() -> tuple[Tensor, ...]:
        k, v = torch.ones(2, 10, 2, 64)
        return rotate_and_store(projections(qkv.flatten(2), 64, 4, table, norm), k, v, write), k, v

    both(monkeypatch, work)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    """Zeros, large values and few rows: each row is as alone."""
    x, made = torch.randn(6, 2112), round_rows(torch.randn(40, 2112), torch.int8)
    x[1], x[3] = 0, x[3] * 1e20
    weight, scale = packed.pack(torch.randn(40, 2112))
    x[4, 7], x[5, 9] = torch.nan, torch.inf
    for out in (
        lambda rows: int8_linear(rows, made.values, made.scale),
        lambda rows: int4_linear(rows, weight, scale),
    ):
        together = out(x)
        for i in range(6):
            assert torch.equal(together[i].nan_to_num(7), out(x[i : i + 1])[0].nan_to_num(7))
        assert not together[1].any() and together[:4].isfinite().all() and together[4:].isnan().all()


def test_what_the_kernels_do_not_take() -> None:
    assert not native_few_bits(torch.randn(2, 80), "linear")
    assert not native_few_bits(torch.randn(2, 64, dtype=torch.float64), "linear")
    assert not native_few_bits(torch.randn(0, 64), "linear")
    assert native_few_bits(torch.randn(2, 64), "linear")


def test_they_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DINFER_KERNELS", "triton,-packed")
    assert native_few_bits(torch.randn(2, 64), "linear") and not native_few_bits(torch.randn(2, 64), "packed")


@pytest.fixture
def not_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """As if this process had no kernels yet, and no cache on the disk."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for known in (native.library, native.built):
        known.cache_clear()
    yield
    for known in (native.library, native.built):
        known.cache_clear()


@pytest.mark.usefixtures("not_compiled")
def test_without_a_compiler_torch_computes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    x, made = torch.randn(2, 64), round_rows(torch.randn(5, 64), torch.int8)
    monkeypatch.setenv("CC", "no-such-compiler")
    with caplog.at_level(logging.WARNING):
        got = scaled_linear(x, made.values, made.scale)
    assert "no-such-compiler" in caplog.text and not [*tmp_path.rglob("*.so")]
    assert torch.equal(got, torch.nn.functional.linear(x, made.values.float()) * made.scale)


@pytest.mark.usefixtures("not_compiled")
def test_a_compiler_that_says_nothing_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", "false")
    with caplog.at_level(logging.WARNING):
        assert native.library() is None
    assert "'false'" in caplog.text and not [*tmp_path.rglob("*linear*")]


@pytest.mark.usefixtures("not_compiled")
@pytest.mark.parametrize("home", ["none", "a file", "full"])
def test_without_a_home_to_write_to_nothing_is_left(home: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Such as a container's user without an entry in /etc/passwd."""
    if home == "none":
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "home", Path("~nobody-of-this-name").expanduser)
    elif home == "full":
        monkeypatch.setattr(native.shutil, "copy", Mock(side_effect=OSError("No space left on device")))
    else:
        (tmp_path / "file").touch()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(native.tempfile, "tempdir", str(tmp_path / "scratch"))
    monkeypatch.setattr(native, "FLAGS", tuple(flag for flag in native.FLAGS if flag != "-O3"))
    assert native.library() is not None and not [*(tmp_path / "scratch").iterdir()]


@pytest.mark.usefixtures("not_compiled")
def test_a_damaged_library_is_compiled_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(native, "FLAGS", tuple(flag for flag in native.FLAGS if flag != "-O3"))
    assert native.library() is not None
    (kept,) = (tmp_path / "dinfer").iterdir()
    damaged = tmp_path / "other" / "dinfer" / kept.name
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(b"half of it")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    for known in (native.library, native.built):
        known.cache_clear()
    assert native.library() is not None and [*damaged.parent.iterdir()] == [damaged]
    assert damaged.stat().st_size > 1000


@pytest.mark.usefixtures("not_compiled")
def test_what_the_thread_of_the_load_compiles_no_other_compiles_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where nothing can be kept, such as a home that nobody may write to."""
    began, go_on, runs = threading.Event(), threading.Event(), list[str]()

    def compiler(*given: Any, **named: Any) -> None:
        runs.append(threading.current_thread().name)
        began.set()
        go_on.wait(120)
        raise OSError("nothing was kept")

    monkeypatch.setattr(native.subprocess, "run", compiler)
    threads = [threading.Thread(target=native.library) for _ in range(2)]
    threads[0].start()
    assert began.wait(120)
    threads[1].start()
    time.sleep(0.05)  # in which the second comes to wait
    go_on.set()
    for thread in threads:
        thread.join(120)
    assert runs == [threads[0].name] and native.library() is None


def test_16_bits_on_a_cpu_without_avx_512(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are widened block by block, so that a result differs from torch's by one rounding at most."""
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX2")
    monkeypatch.setattr("dinfer.kernels.cpu.linear.WIDENED", 7 * 33)
    x, weight, bias = torch.randn(2, 3, 33).bfloat16(), torch.randn(20, 33).bfloat16(), torch.randn(20).bfloat16()
    with torch.no_grad():
        got = linear(x, weight)
        assert got.dtype == torch.bfloat16 and torch.equal(got, (x.float() @ weight.float().T).bfloat16())
        assert torch.equal(linear(x, weight, bias), got + bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_copy_sees_what_is_not_finite(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before and behind what lies at an address that vectors can be written to, too."""
    size, wrong = 2 * 67 + 64, [float("nan"), float("inf"), -float("inf")]
    values, held = torch.randn(size + 16).to(dtype), torch.zeros(size + 32, dtype=dtype)
    for shift in (0, 2, 6):
        own, target = values[shift : size + shift], held[16 - shift : size + 16 - shift]
        assert native.copy(target, own) is None  # so few go through the caches
        monkeypatch.setattr(native, "ALL_AT_ONCE", 0)
        own[5], own[6] = torch.finfo(dtype).max, torch.finfo(dtype).min
        for at in (None, 0, 1, 70, 101, size - 2, size - 1):
            good, held[:] = own.clone(), 7
            if at is not None:
                good[at] = wrong[at % 3]
            assert native.copy(target, good) is (at is None)
            assert torch.equal(target.view(torch.uint8), good.view(torch.uint8))
            assert int((held == 7).sum()) == 32
        monkeypatch.undo()
    assert native.copy(held.double(), held) is native.copy(held[:5].half(), held[:5].half()) is None
