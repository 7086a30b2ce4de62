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

import torch
from torch import Tensor

from dinfer.kernels.types import Part

NAMES = "linear.c", "float.c", "languages.c", "blocks.h", "vectors.h"
SOURCES = tuple(Path(__file__).with_name(name) for name in NAMES)
FLAGS = ("-O3", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-shared", "-fPIC")
AVX2 = ("-mavx2", "-mfma", "-mf16c")
KINDS = (
    "int8", "int4", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL",
)  # fmt: skip
"""Formats that the kernels read: our own, and the block types of GGUF files. In the order of `blocks.h`."""
SCALES = (torch.float32, torch.float16, torch.bfloat16)
COMPILING = threading.Lock()
log = logging.getLogger(__name__)


def fields(part: Part, width: int) -> list[int]:
    """The struct `Part` of `linear.c`."""
    of_segment = part.values.stride(0) if part.values.dim() == 3 else 0
    where = [KINDS.index(part.kind), part.outputs, part.values.data_ptr(), part.values.shape[-1], of_segment]
    if part.scale is None:
        return [*where, 0, 0, 0, 0, 0, 0]
    *lead, by_output, by_group = part.scale.stride()
    at = [part.scale.data_ptr(), SCALES.index(part.scale.dtype), by_output, by_group, *(lead or [0])]
    return [*where, *at, width // part.scale.shape[-1]]


@cache
def begin() -> None:
    """Starts to compile the kernels."""
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
    structs = [one for part in parts for one in fields(part, x.shape[-1])]
    outputs = sum(part.outputs for part in parts)
    out = x.new_empty(*x.shape[:-1], outputs, dtype=torch.float32)
    failed = found.dinfer_linear(
        ctypes.c_void_p(rows_RK.data_ptr()), *map(ctypes.c_int64, rows_RK.shape),
        (ctypes.c_int64 * len(first))(*first), ctypes.c_int64(len(counts)), (ctypes.c_int64 * len(structs))(*structs),
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
