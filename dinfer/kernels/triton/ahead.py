"""Compiling kernels beside each other, before they are launched.

Triton compiles a kernel when it is first launched, and the launch waits for it. So one core would compile all kernels
of the first step, one after the other.
"""

import hashlib
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction

from dinfer.kernels.dispatch import compiling_for

THREADS = 32  # at most; a step has some dozens of kernels
_TURN = threading.Lock()


@contextmanager
def compiled_beside(device: torch.device) -> Iterator[None]:
    """Within, a kernel that this thread launches on tensors of the meta device is compiled for `device` instead.

    In the end all of them are compiled and loaded. Other threads launch kernels as ever. Raises what the compiler
    raises.
    """
    thread, run, kernels = threading.get_ident(), JITFunction.run, dict[Any, Any]()

    def compile_or_run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if threading.get_ident() != thread:
            return run(self, *args, grid=grid, warmup=warmup, **options)
        call = (self, *map(_special, args), *((name, _special(value)) for name, value in options.items()))
        if call not in kernels:  # layers launch the same kernels over and over again
            kernels[call] = run(self, *args, grid=grid, warmup=True, **options)
        return kernels[call]

    threads = min(len(os.sched_getaffinity(0)), THREADS)
    with _TURN, ThreadPoolExecutor(threads, initializer=torch.cuda.set_device, initargs=(device,)) as pool:
        JITFunction.run = compile_or_run
        try:
            # With errors the mode would stay on behind its end. `_load` raises what it ignores.
            with compiling_for(device), triton.AsyncCompileMode(pool, ignore_errors=True):
                yield
        finally:
            JITFunction.run = run
        for _ in pool.map(_load, {id(kernel): kernel for kernel in kernels.values()}.values()):
            pass


def _special(value: Any) -> Any:
    """What a kernel may be compiled for, of an argument. Triton looks at no more than this."""
    return (value.dtype, value.data_ptr() % 16) if isinstance(value, torch.Tensor) else (type(value), value)


def compiled_before(what: str, device: torch.device) -> Path:
    """A file that says that the kernels of `what` are in Triton's cache. Whoever has compiled them makes it.

    It is there only as long as the sources of all kernels, the versions and the card are the same.
    """
    sha = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        sha.update(source.read_bytes())
    sha.update("|".join((what, triton.__version__, torch.__version__, torch.cuda.get_device_name(device))).encode())
    return Path(triton.knobs.cache.dir) / f"dinfer-{sha.hexdigest()}"


def _load(kernel: Any) -> None:
    """Does what a kernel's first launch does: loads its code and, in Triton 3.6, compiles a launcher in C."""
    compiled = kernel.result() if isinstance(kernel, triton.FutureKernel) else kernel
    _ = compiled.run
