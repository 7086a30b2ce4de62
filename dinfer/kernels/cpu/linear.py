"""Kernels in C for CPUs, compiled at first use and cached, and linear maps with weights in 8 or fewer bits.

The system's compiler makes code for the CPU it runs on. Without a compiler, or without AVX2, torch computes the same
and widens the weights at every call.

Shape suffixes: R rows, K inputs, O outputs, G groups, S segments (experts).
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
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dinfer.kernels.dispatch import VARIABLE, Group, groups_off

SOURCES = tuple(Path(__file__).with_name(name) for name in ("linear.c", "float.c", "blocks.h", "vectors.h"))
FLAGS = ("-O3", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-shared", "-fPIC")
AVX2 = ("-mavx2", "-mfma", "-mf16c")
STEP = 32  # widths are multiples of it
KINDS = (
    "int8", "int4", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL",
)  # fmt: skip
"""Formats that the kernels read: our own, and the block types of GGUF files. In the order of `blocks.h`."""
SCALES = (torch.float32, torch.float16, torch.bfloat16)
COMPILING = threading.Lock()
log = logging.getLogger(__name__)


class Part(NamedTuple):
    """Some outputs of a weight, or of each of S weights, in one format.

    `values`: bytes [O, B] or [S, O, B], with outputs next to each other. `scale`: [O, 1] for int8, [O, G] for int4, S
    in front of them for several weights. Blocks hold their own scales.
    """

    kind: str
    values: Tensor
    scale: Tensor | None = None

    @property
    def outputs(self) -> int:
        return self.values.shape[-2]

    def fields(self, width: int) -> list[int]:
        """The struct `Part` of `linear.c`."""
        of_segment = self.values.stride(0) if self.values.dim() == 3 else 0
        where = [KINDS.index(self.kind), self.outputs, self.values.data_ptr(), self.values.shape[-1], of_segment]
        if self.scale is None:
            return [*where, 0, 0, 0, 0, 0, 0]
        *lead, by_output, by_group = self.scale.stride()
        at = [self.scale.data_ptr(), SCALES.index(self.scale.dtype), by_output, by_group, *(lead or [0])]
        return [*where, *at, width // self.scale.shape[-1]]


def use_native(x: Tensor, group: Group) -> bool:
    """Whether the compiled kernels take these inputs. `DINFER_KERNELS` turns them off, by group."""
    able = x.device.type == "cpu" and x.dtype != torch.float64 and x.shape[-1] % STEP == 0 and x.numel() > 0
    return able and not x.requires_grad and wanted(group) and library() is not None


def wanted(group: Group) -> bool:
    """Whether `DINFER_KERNELS` leaves kernels of this group on."""
    return group not in groups_off(os.environ.get(VARIABLE, "triton"))


def prepare(device: torch.device) -> None:
    """Starts to compile the kernels if `device` is a CPU, while a model loads, so that no request waits for it."""
    if device.type == "cpu" and wanted("linear"):
        _begin()


@cache
def _begin() -> None:
    threading.Thread(target=library, name="dinfer-compile").start()


def native_linear(x: Tensor, parts: Sequence[Part], count_S: Tensor | None = None) -> Tensor:
    """x times the transpose of a weight, whose outputs are those of the parts in order. [..., K] -> [..., O]

    `count_S`: x is [R, K], and its first `count_S[0]` rows go to weight 0 of each part, the next to weight 1, and so
    on. For values in 8 bits each row of x is rounded to 16 bits, for narrower values each group of 32 or 16 inputs to
    8 bits. Raises MemoryError if the rounded inputs find no room.
    """
    found = library()
    assert found is not None
    rows_RK = x.reshape(-1, x.shape[-1]).float().contiguous()
    counts = [len(rows_RK)] if count_S is None else count_S.tolist()
    first = [0]
    for rows in counts:
        first.append(first[-1] + rows)
    fields = [field for part in parts for field in part.fields(x.shape[-1])]
    outputs = sum(part.outputs for part in parts)
    out = x.new_empty(*x.shape[:-1], outputs, dtype=torch.float32)
    failed = found.dinfer_linear(
        ctypes.c_void_p(rows_RK.data_ptr()), *map(ctypes.c_int64, rows_RK.shape),
        (ctypes.c_int64 * len(first))(*first), ctypes.c_int64(len(counts)), (ctypes.c_int64 * len(fields))(*fields),
        ctypes.c_int64(len(parts)), ctypes.c_void_p(out.data_ptr()), ctypes.c_int64(outputs),
        ctypes.c_int64(torch.get_num_threads()),
    )  # fmt: skip
    if failed:
        raise MemoryError(f"a linear map of {len(rows_RK)} rows: no memory for the rounded inputs")
    return out


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
