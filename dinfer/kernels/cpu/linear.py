"""Kernels in C for CPUs, compiled at first use and cached: linear maps with weights in 8 or fewer bits, and float32.

The system's compiler makes code for the CPU it runs on. Without a compiler, or without AVX2, torch computes the same
and widens the weights at every call. The functions of float32 (`float.c`) do in one pass what takes torch several, and
what their namesakes in `dinfer.kernels` do, for tensors that `dispatch.native` accepts. Those of languages
(`languages.c`) are those of `dinfer.structure.kernels.languages`, where torch takes a call for each position and set.

Shape suffixes: R rows, K inputs, O outputs, G groups, S segments (experts), B lanes, W queries, H query heads, G key
heads, E head size; of languages as in `dinfer.structure.kernels.lines`.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dinfer.core.kernels.deferred import close
from dinfer.core.kernels.dispatch import native_few_bits
from dinfer.core.kernels.moe import ExpertWeight, Gate
from dinfer.core.kernels.types import HeadNorm, WeightPart
from dinfer.core.terms.stats import Draw

NAMES = "linear.c", "float.c", "draw.c", "copies.c", "languages.c", "layers.c", "blocks.h", "vectors.h"
SOURCES = tuple(Path(__file__).with_name(name) for name in NAMES)
FLAGS = ("-O3", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-shared", "-fPIC")
AVX2 = ("-mavx2", "-mfma", "-mf16c")
KINDS = (
    "int8", "int4", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL",
)  # fmt: skip
"""Formats that the kernels read: our own, and the block types of GGUF files. In the order of `blocks.h`."""
TILED = "Q8_0 in tiles", "Q4_0 in tiles", "Q4_1 in tiles"
"""Formats that the kernels also read, where `reads_tiles`: see `dinfer.formats.kernels.packed.in_tiles`."""
SCALES = (torch.float32, torch.float16, torch.bfloat16)
EXPONENT = {torch.bfloat16: (0x7F80, 16), torch.float16: (0x7C00, 16), torch.float32: (0x7F800000, 32)}  # and the bits
ALL_AT_ONCE = 1 << 18  # bytes; fewer are faster through the caches
COMPILING = threading.Lock()
log = logging.getLogger(__name__)


def fields(part: WeightPart, width: int) -> list[int]:
    """The struct `WeightPart` of `linear.c`."""
    of_segment = part.values.stride(0) if part.values.dim() == 3 else 0
    where = [(*KINDS, *TILED).index(part.kind), part.outputs, part.values.data_ptr(), part.values.shape[-1], of_segment]
    if part.scale is None:
        return [*where, 0, 0, 0, 0, 0, 0]
    *lead, by_output, by_group = part.scale.stride()
    at = [part.scale.data_ptr(), SCALES.index(part.scale.dtype), by_output, by_group, *(lead or [0])]
    return [*where, *at, width // part.scale.shape[-1]]


@cache
def reads_tiles() -> bool:
    """Whether there are kernels that read weights in tiles."""
    return (found := library()) is not None and bool(found.dinfer_in_tiles())


@cache
def begin() -> None:
    """Starts to compile the kernels."""
    threading.Thread(target=library, name="dinfer-compile").start()


def native_linear(x: Tensor, parts: Sequence[WeightPart], count_S: Tensor | None = None) -> Tensor:
    """x times the transpose of a weight, whose outputs are those of the parts in order. [..., K] -> [..., O]

    `count_S`: x is [R, K], and its first `count_S[0]` rows go to weight 0 of each part, the next to weight 1, and so
    on. For values in 8 bits each row of x is rounded to 16 bits, for narrower values each group of 32 or 16 inputs to
    8 bits.
    """
    rows_RK = x.reshape(-1, x.shape[-1]).float()
    counts = [len(rows_RK)] if count_S is None else count_S.tolist()
    first = [0, *accumulate(counts)]
    structs = [one for part in parts for one in fields(part, x.shape[-1])]
    outputs = sum(part.outputs for part in parts)
    out = x.new_empty(*x.shape[:-1], outputs, dtype=torch.float32)
    call(
        "linear", rows_RK, *rows_RK.shape, (ctypes.c_int64 * len(first))(*first), len(counts),
        (ctypes.c_int64 * len(structs))(*structs), len(parts), out, outputs, torch.get_num_threads(),
    )  # fmt: skip
    return out


def call(name: str, *given: Tensor | ctypes.Array | float | None) -> None:
    """Calls a function of the library. Tensors go as addresses; those that it writes to must be contiguous.

    Raises MemoryError if the function finds no room for what it computes in between.
    """
    kept = [one.contiguous() if isinstance(one, Tensor) else one for one in given]
    if library()[f"dinfer_{name}"](*map(_plain, kept)):  # type: ignore[index]
        raise MemoryError(f"{name}: no memory for its intermediate values")


def _plain(given: Tensor | ctypes.Array | float | None) -> Any:
    if given is None or isinstance(given, Tensor):
        return ctypes.c_void_p(None if given is None else given.data_ptr())
    if isinstance(given, float):
        return ctypes.c_float(given)
    return ctypes.c_int64(given) if isinstance(given, int) else given


@cache
def library() -> ctypes.CDLL | None:
    """What `built` returns. One thread compiles, and the others wait for it."""
    with COMPILING:
        return built()


@cache
def built() -> ctypes.CDLL | None:
    """The compiled kernels; None if this CPU or system cannot have them. A log line says why."""
    cpu = torch.backends.cpu.get_cpu_capability()
    if platform.machine() not in ("x86_64", "AMD64") or not cpu.startswith("AVX"):
        log.info("torch computes everything: this CPU (%s, %s) has no AVX2", platform.machine(), cpu)
        return None
    flags = (*FLAGS, *(AVX2 if cpu == "AVX2" else ("-march=native",)))
    try:
        found = _loaded(flags)
    except (OSError, subprocess.SubprocessError) as error:
        said = (error.stderr if isinstance(error, subprocess.CalledProcessError) else "") or error
        log.warning("the kernels in C cannot be compiled, so weights in 8 and 4 bits are slower: %s", said)
        return None
    log.info("kernels in C for %s: %s", cpu, found._name)
    return found


def _loaded(flags: tuple[str, ...]) -> ctypes.CDLL:
    """The shared library, from the cache or compiled now. Raises OSError or SubprocessError."""
    compiler = shlex.split(os.environ.get("CC", "")) or [shutil.which("cc") or shutil.which("gcc") or "cc"]
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    cpu = [line for line in lines if line.startswith(("flags", "model name"))][:2]
    what = "\n".join([*(source.read_text() for source in SOURCES), *compiler, *flags, *cpu])
    name = f"linear-{hashlib.sha256(what.encode()).hexdigest()[:16]}.so"
    with suppress(OSError, RuntimeError):  # damaged, or without a home
        return ctypes.CDLL(str(_cache() / name))
    with tempfile.TemporaryDirectory() as folder:
        own = Path(folder) / name
        command = [*compiler, *flags, "-o", str(own), *(str(one) for one in SOURCES if one.suffix == ".c"), "-lm"]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
        try:
            return ctypes.CDLL(str(_kept(own)))
        except (OSError, RuntimeError):  # a cache that is full, or that nobody may write to or run from
            return ctypes.CDLL(str(own))


def _kept(own: Path) -> Path:
    """A copy in the cache. Raises OSError, and RuntimeError without a home."""
    folder = _cache()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    part = folder / f".{os.getpid()}.{own.name}"
    try:
        shutil.copy(own, part)
        return part.replace(folder / own.name)  # so that two processes may compile it at once
    finally:
        part.unlink(missing_ok=True)


def _cache() -> Path:
    """Raises RuntimeError without a home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dinfer"


FEWEST = 8  # rows from which `linear` is faster than torch's
TILE, WIDEST = 32, 256  # head sizes of `attention`: multiples of TILE up to WIDEST


def faster(x: Tensor) -> bool:
    """Whether `linear` takes these inputs, and is faster than torch."""
    return x.shape[-1] % 16 == 0 and x.numel() >= FEWEST * x.shape[-1] and slow_blas()


@cache
def slow_blas() -> bool:
    """Whether torch's BLAS is MKL on an AMD CPU. MKL uses only AVX2 there, and `linear` is faster even with AVX2."""
    info = Path("/proc/cpuinfo")
    return torch.backends.mkl.is_available() and info.is_file() and "AuthenticAMD" in info.read_text()[:1000]


def linear(x: Tensor, weight_OK: Tensor) -> Tensor:
    """x times the transpose of a weight. [..., K] -> [..., O]"""
    out = x.new_empty(*x.shape[:-1], len(weight_OK))
    sizes = x.numel() // x.shape[-1], *weight_OK.shape[::-1]
    call("linear_float", x, weight_OK, out, *sizes, torch.get_num_threads())
    return out


def add_low_rank(
    y_NO: Tensor, x_NK: Tensor, open_N: Tensor, a_SK: Tensor, b_PRO: Tensor, first_P: Tensor
) -> None:  # fmt: skip
    """Adds B A x to rows of y whose gate is open. `a_SK` and `b_PRO`, by piece, are bfloat16; see `families.gated`."""
    sizes = *x_NK.shape, len(a_SK), *b_PRO.shape
    call("low_rank", x_NK, open_N, a_SK, b_PRO, first_P, y_NO, *sizes, torch.get_num_threads())


def attention(
    q_BWHE: Tensor, k_PTGE: Tensor, v_PTGE: Tensor, pages_BP: Tensor, from_BW: Tensor, to_BW: Tensor
) -> Tensor:  # fmt: skip
    """Interval attention over keys in pages. [B, W, H, E]"""
    out = torch.empty_like(q_BWHE, memory_format=torch.contiguous_format)
    lanes, queries, heads, size = q_BWHE.shape
    sizes = lanes, queries, heads, k_PTGE.shape[2], size, pages_BP.shape[1], k_PTGE.shape[1]
    call("attention", q_BWHE, k_PTGE, v_PTGE, pages_BP, from_BW, to_BW, out, *sizes, torch.get_num_threads())
    return out


def add_rms_norm(x: Tensor, delta: Tensor | None, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + delta, and its RMSNorm times the weight. [..., D] each"""
    x = x.contiguous()
    total, out = x if delta is None else torch.empty_like(x), torch.empty_like(x)
    sizes = x.numel() // x.shape[-1], x.shape[-1]
    call("add_rms_norm", x, delta, weight_D, total, out, *sizes, eps, torch.get_num_threads())
    return total, out


def swiglu(x: Tensor) -> Tensor:
    """silu of the first half of the last dimension, times the second. [..., 2 M] -> [..., M]"""
    width = x.shape[-1] // 2
    out = x.new_empty(*x.shape[:-1], width)
    call("swiglu", x, out, out.numel() // width, width, torch.get_num_threads())
    return out


def rotate_and_store(
    qkv_BWXE: Tensor, heads: int, cos: Tensor, sin: Tensor, norm: HeadNorm | None, k_YGE: Tensor, v_YGE: Tensor,
    write_X: Tensor,
) -> Tensor:  # fmt: skip
    """Writes keys and values to their places and returns the queries, normed and rotated. [B, W, H, E]"""
    lanes, width, _, size = qkv_BWXE.shape
    q_BWHE = qkv_BWXE.new_empty(lanes, width, heads, size)
    weight, eps = norm or (None, 0.0)
    sizes = lanes * width, heads, k_YGE.shape[1], size, cos.shape[-1]
    given = qkv_BWXE, cos, sin, weight, write_X, q_BWHE, k_YGE, v_YGE
    call("rotate_and_store", *given, *sizes, eps, torch.get_num_threads())
    return q_BWHE


def draw(given: Draw, mask_id: int | None, wanted_RL: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The mask token's score, the best one, and its token. `wanted_RL`: only there, elsewhere 0. [R, L] each"""
    rows, width, vocab = given.logits_RLV.shape
    wanted_RL = torch.ones(rows, width, dtype=torch.bool) if wanted_RL is None else wanted_RL
    token_RL, score_RL = torch.empty(rows, width, dtype=torch.int64), torch.empty(rows, width, dtype=torch.float64)
    lure_RL, mask = torch.empty_like(score_RL), -1 if mask_id is None else mask_id
    inputs = given.logits_RLV, given.scale_R1, given.seed_R, given.pos_RL, given.step_R, wanted_RL
    call("draw", *inputs, token_RL, score_RL, lure_RL, rows, width, vocab, mask, torch.get_num_threads())
    return lure_RL, score_RL, token_RL


def token_stats(logits_RLV: Tensor, mask_id: int | None, wanted_RL: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The likeliest token but the mask token, its probability, and that of the mask token. [R, L] each"""
    (*shape, vocab), mask = logits_RLV.shape, -1 if mask_id is None else mask_id
    wanted_RL = torch.ones(shape, dtype=torch.bool) if wanted_RL is None else wanted_RL
    token_RL, found_RL, mask_RL = torch.empty(shape, dtype=torch.int64), torch.empty(shape), torch.empty(shape)
    sizes = token_RL.numel(), vocab, mask, torch.get_num_threads()
    call("token_stats", logits_RLV, wanted_RL, token_RL, found_RL, mask_RL, *sizes)
    return token_RL, found_RL, mask_RL


def log_sums(logits_RLV: Tensor, scale_R1: Tensor, wanted_RL: Tensor | None) -> Tensor:
    """The log-sum-exp of logits divided by a scale. `wanted_RL`: only there, elsewhere 0. [R, L]"""
    out_RL = logits_RLV.new_empty(logits_RLV.shape[:2])
    wanted_RL = torch.ones_like(out_RL, dtype=torch.bool) if wanted_RL is None else wanted_RL
    call("log_sums", logits_RLV, scale_R1, wanted_RL, out_RL, *logits_RLV.shape, torch.get_num_threads())
    return out_RL


def copy(held: Tensor, values: Tensor) -> bool | None:
    """Copies values to a tensor of their type, both contiguous. Whether all are finite; None: it takes no such ones."""
    if values.dtype not in EXPONENT or held.dtype != values.dtype or values.nbytes % 4 or values.nbytes < ALL_AT_ONCE:
        return None
    (exponent, bits), broken = EXPONENT[values.dtype], torch.zeros(1, dtype=torch.int64)
    both = 1 if bits == 32 else 1 << bits | 1
    call(
        "copy", values, held, values.nbytes // 4, exponent * both, (exponent & -exponent) * both, both << (bits - 1),
        broken, torch.get_num_threads(),
    )  # fmt: skip
    return not broken.item()


def language_allowed(held: Any, line: Any) -> Tensor:
    """See `Sweeps.allowed`."""
    most = held.languages.size_GC.shape[1]
    out_BXC = torch.zeros(*line.token_BX.shape, most, dtype=torch.bool)
    given = line.token_BX, line.open_BX, line.outside_BX, line.state_B, line.room_B
    _language("allowed", held, line.token_BX.shape[1], *given, out_BXC, most)
    return out_BXC


def language_admitted(held: Any, line: Any, commit_BX: Tensor, token_BX: Tensor, order_BX: Tensor) -> Tensor:
    """See `Sweeps.admitted`. `order_BX`: the order in which positions are tried."""
    out_BX = torch.zeros_like(commit_BX, memory_format=torch.contiguous_format)
    own = (x.clone(memory_format=torch.contiguous_format) for x in (line.token_BX, line.open_BX))
    given = *own, line.outside_BX, line.state_B, line.room_B, commit_BX, token_BX, order_BX
    _language("admitted", held, line.token_BX.shape[1], *given, out_BX)
    return out_BX


def language_run(held: Any, state_B: Tensor, token_BX: Tensor, passed_BX: Tensor) -> Tensor:
    """See `Sweeps.run`."""
    out_B = torch.empty_like(state_B, memory_format=torch.contiguous_format)
    _language("run", held, token_BX.shape[1], state_B, token_BX, passed_BX, out_B)
    return out_B


def _language(name: str, held: Any, active: int, *given: Tensor | int) -> None:
    own, place_B = held.languages, held.language_B
    tables = place_B, own.meta_G8, own.class_GV, own.next_Y, own.pair_Y2, own.edge_Y3, own.distance_GQ
    kept = [x.contiguous() for x in tables]
    counts = own.class_GV.shape[1], own.distance_GQ.shape[1], len(place_B), active
    call(f"language_{name}", (ctypes.c_int64 * 11)(*(x.data_ptr() for x in kept), *counts), *given)


WIDENED = 1 << 19  # values of a weight that are widened at a time


def slow(x: Tensor) -> bool:
    """Whether torch multiplies such numbers far slower than float32: 16 bits on a CPU without AVX-512."""
    narrow = x.dtype.itemsize == 2 and not torch.is_grad_enabled()
    return narrow and torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2")


def widened_linear(x: Tensor, weight_OK: Tensor, bias_O: Tensor | None) -> Tensor:
    """As `linear`, in float32, block by block of outputs: a widened block stays in the cache of the CPU."""
    wide, out = x.float(), x.new_empty(*x.shape[:-1], len(weight_OK))
    first = 0
    for block in weight_OK.split(max(WIDENED // x.shape[-1], 1)):
        out[..., first : first + len(block)] = F.linear(wide, block.float())
        first += len(block)
    return out if bias_O is None else out + bias_O


def mixed_rows(
    x_ND: Tensor, experts_NC: Tensor, weights_NC: Tensor, gate_up: ExpertWeight, down: ExpertWeight, gated: Gate
) -> Tensor:
    """`expert_mixture` on a CPU, without the shared expert. Each expert takes all its rows, and no weight is copied.

    Shapes depend on the choice, so no CUDA graph can hold it.
    """
    flat_P, experts = experts_NC.flatten().long(), len(gate_up.each)
    count_X = flat_P.bincount(minlength=experts)[:experts]
    order_P = flat_P.argsort(stable=True)[: int(count_X.sum())]  # experts of other ranks have the largest numbers
    if not len(order_P):
        return torch.zeros_like(x_ND)
    token_P = order_P // experts_NC.shape[1]
    hidden_PM = close(gated(_sorted_rows(x_ND.index_select(0, token_P), gate_up, count_X), "plain"))
    out_PD = _sorted_rows(hidden_PM, down, count_X)
    weight_P = weights_NC.flatten().index_select(0, order_P).to(out_PD.dtype)
    return torch.zeros_like(x_ND).index_add(0, token_P, out_PD * weight_P[:, None])


def _sorted_rows(x_PK: Tensor, weight: ExpertWeight, count_X: Tensor) -> Tensor:
    """Rows in the order of experts, `count_X` of each, times the experts' matrices. [P, K] -> [P, O]"""
    if (parts := weight.parts()) and (kernels := native_few_bits(x_PK, "experts")) is not None:
        return kernels.native_linear(x_PK, parts, count_X).to(x_PK.dtype)
    pieces = enumerate(x_PK.split(count_X.tolist()))
    return torch.cat([weight.one(piece, expert) for expert, piece in pieces if len(piece)])
