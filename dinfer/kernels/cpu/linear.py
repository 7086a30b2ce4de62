"""Kernels in C for CPUs, compiled at first use and kept, and linear maps with weights in few bits (`linear.c`).

The compiler is that of the system, and the code is for the CPU it runs on. Where there is no compiler, or no x86 CPU
with AVX2, torch computes the same, with weights widened at every call.

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
from collections.abc import Sequence
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
"""What the kernels read: our own formats, and the types of blocks in GGUF files. In the order of `blocks.h`."""
SCALES = (torch.float32, torch.float16, torch.bfloat16)
log = logging.getLogger(__name__)


class Part(NamedTuple):
    """Some outputs of a weight, or of each of several weights, all of one kind.

    `values`: bytes [O, B], or [S, O, B], of which outputs are next to each other. `scale`: of int8 [O, 1], of int4
    [O, G], or [S, O, ...]; blocks hold their own.
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
    """Compiles the kernels now, where they will be needed, so that no request waits for it."""
    if device.type == "cpu":
        library()


def native_linear(x: Tensor, parts: Sequence[Part], count_S: Tensor | None = None) -> Tensor:
    """x times the transpose of a weight whose outputs are those of the parts, one after the other. [..., K] -> [..., O]

    `count_S`: x is [R, K], its first so many rows go to the first weight of each part, and so on. Each row of x is
    rounded to 16 bits for values in 8 bits, and each group of 32 or 16 inputs to 8 bits for values in fewer.
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
    """The compiled kernels; None where they cannot be had. A log line says which."""
    cpu = torch.backends.cpu.get_cpu_capability()
    if platform.machine() not in ("x86_64", "AMD64") or not cpu.startswith("AVX"):
        log.info("all by torch, as this CPU (%s, %s) has no AVX2", platform.machine(), cpu)
        return None
    flags = (*FLAGS, *(AVX2 if cpu == "AVX2" else ("-march=native",)))
    try:
        path = _compiled(flags)
        found = ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or error
        log.warning("weights in 8 and 4 bits: by torch and slower, as the kernels in C cannot be had: %s", said)
        return None
    log.info(
        "weights in 8 and 4 bits, and attention, norms and activations in float32: kernels in C for %s, %s", cpu, path
    )
    return found


def _compiled(flags: tuple[str, ...]) -> Path:
    """The shared library, from the cache or made now. OSError or SubprocessError if it cannot be made."""
    compiler = shlex.split(os.environ.get("CC", "")) or [shutil.which("cc") or shutil.which("gcc") or "cc"]
    cpu = [line for line in _text(Path("/proc/cpuinfo")).splitlines() if line.startswith(("flags", "model name"))][:2]
    what = "\n".join([*(source.read_text() for source in SOURCES), *compiler, *flags, *cpu])
    name = f"linear-{hashlib.sha256(what.encode()).hexdigest()[:16]}.so"
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dinfer"
    if (folder / name).is_file():
        return folder / name
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        made = tempfile.NamedTemporaryFile(dir=folder, suffix=".so", delete=False)  # noqa: SIM115, the linker writes it
    except OSError:  # a home that cannot be written to: compiled for this process alone
        folder = Path(tempfile.mkdtemp())
        made = tempfile.NamedTemporaryFile(dir=folder, suffix=".so", delete=False)  # noqa: SIM115
    made.close()
    try:
        command = [*compiler, *flags, "-o", made.name, *(str(one) for one in SOURCES if one.suffix == ".c"), "-lm"]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
        os.replace(made.name, folder / name)  # so that two processes may make it at once
    finally:
        Path(made.name).unlink(missing_ok=True)
    return folder / name


def _text(path: Path) -> str:
    return path.read_text() if path.is_file() else ""
