"""Linear maps with weights in 8 and 4 bits on a CPU: `linear.c`, compiled at first use and kept for the next.

The compiler is that of the system, and the code is for the CPU it runs on. Where there is no compiler, or no x86 CPU
with AVX2, torch computes the same, with weights widened at every call.
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
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from dinfer.kernels.dispatch import VARIABLE, Group, groups_off

SOURCE = Path(__file__).with_name("linear.c")
FLAGS = ("-O3", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-shared", "-fPIC")
STEP = 64  # widths are multiples of it
log = logging.getLogger(__name__)


def use_native(x: Tensor, group: Group) -> bool:
    """Whether the compiled kernels take these inputs. `DINFER_KERNELS` turns them off, by group."""
    able = x.device.type == "cpu" and x.dtype != torch.float64 and x.shape[-1] % STEP == 0 and x.numel() > 0
    wanted = able and not x.requires_grad and group not in groups_off(os.environ.get(VARIABLE, "triton"))
    return wanted and library() is not None


def prepare(device: torch.device) -> None:
    """Compiles the kernels now, where they will be needed, so that no request waits for it."""
    if device.type == "cpu":
        library()


def int8_linear(x: Tensor, weight_OK: Tensor, scale_O: Tensor) -> Tensor:
    """x times the transpose of a weight in int8. Each row of x is rounded to 13 bits. [..., K] -> [..., O]"""
    rows_RK, out = _rows(x), x.new_empty(*x.shape[:-1], len(weight_OK), dtype=torch.float32)
    weight_OK, scale_O = weight_OK.contiguous(), scale_O.float().contiguous()
    _run("dinfer_int8_linear", rows_RK, *rows_RK.shape, weight_OK, scale_O, len(weight_OK), out)
    return out


def int4_linear(x: Tensor, weight_OH: Tensor, scale_OG: Tensor) -> Tensor:
    """As above, for a weight in 4 bits (`dinfer.kernels.packed`). Each group of x is rounded to 8 bits."""
    rows_RK, out = _rows(x), x.new_empty(*x.shape[:-1], len(weight_OH), dtype=torch.float32)
    weight_OH, scale_OG = weight_OH.contiguous(), scale_OG.float()
    group = x.shape[-1] // scale_OG.shape[1]
    _run(
        "dinfer_int4_linear", rows_RK, *rows_RK.shape, weight_OH, scale_OG, *scale_OG.stride(), group, len(weight_OH),
        out,
    )  # fmt: skip
    return out


def _rows(x: Tensor) -> Tensor:
    return x.flatten(0, -2).float().contiguous()


def _run(name: str, *given: Tensor | int) -> None:
    found = library()
    assert found is not None
    passed = [ctypes.c_void_p(one.data_ptr()) if isinstance(one, Tensor) else ctypes.c_int64(one) for one in given]
    if getattr(found, name)(*passed, ctypes.c_int64(torch.get_num_threads())):
        raise MemoryError(f"{name}: no memory for the rounded inputs")


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels; None where they cannot be had. A log line says which."""
    cpu = torch.backends.cpu.get_cpu_capability()
    if platform.machine() not in ("x86_64", "AMD64") or not cpu.startswith("AVX"):
        log.info("weights in 8 and 4 bits: by torch, as this CPU (%s, %s) has no AVX2", platform.machine(), cpu)
        return None
    flags = (*FLAGS, *(("-mavx2", "-mfma") if cpu == "AVX2" else ("-march=native",)))
    try:
        path = _compiled(flags)
        found = ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or error
        log.warning("weights in 8 and 4 bits: by torch and slower, as the kernels in C cannot be had: %s", said)
        return None
    log.info("weights in 8 and 4 bits: kernels in C for %s, %s", cpu, path)
    return found


def _compiled(flags: tuple[str, ...]) -> Path:
    """The shared library, from the cache or made now. OSError or SubprocessError if it cannot be made."""
    compiler = shlex.split(os.environ.get("CC", "")) or [shutil.which("cc") or shutil.which("gcc") or "cc"]
    cpu = [line for line in _text(Path("/proc/cpuinfo")).splitlines() if line.startswith(("flags", "model name"))][:2]
    what = "\n".join([SOURCE.read_text(), *compiler, *flags, *cpu])
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
        command = [*compiler, *flags, "-o", made.name, str(SOURCE), "-lm"]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
        os.replace(made.name, folder / name)  # so that two processes may make it at once
    finally:
        Path(made.name).unlink(missing_ok=True)
    return folder / name


def _text(path: Path) -> str:
    return path.read_text() if path.is_file() else ""
