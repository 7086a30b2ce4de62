"""Compiles kernels in parallel, before they are launched.

Triton compiles a kernel at its first launch, and the launch waits. So one core would compile all kernels of the first
step, one after the other.
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
from triton.tools.tensor_descriptor import TensorDescriptor

from dinfer.kernels.dispatch import compiling_for

THREADS = 32  # at most; a step has some dozens of kernels
_TURN = threading.Lock()


@contextmanager
def compiled_beside(device: torch.device) -> Iterator[None]:
    """Within, a kernel that this thread launches on tensors of the meta device is compiled for `device`, not run.

    At the end all of them are compiled and loaded. Other threads launch kernels as usual. Raises the compiler's errors.
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
            # If the mode raised errors, it would stay on. `_load` raises those that it ignores.
            with compiling_for(device), triton.AsyncCompileMode(pool, ignore_errors=True):
                yield
        finally:
            JITFunction.run = run
        for _ in pool.map(_load, {id(kernel): kernel for kernel in kernels.values()}.values()):
            pass


def _special(value: Any) -> Any:
    """What a kernel may be specialised for. Triton looks at no more of an argument."""
    if isinstance(value, TensorDescriptor):
        return value.base.dtype, tuple(value.block_shape)
    return (value.dtype, value.data_ptr() % 16) if isinstance(value, torch.Tensor) else (type(value), value)


def compiled_before(what: str, device: torch.device) -> Path:
    """A file that marks the kernels of `what` as compiled. The caller creates it once Triton's cache has them.

    Its name changes with the sources of the kernels, the versions of torch and Triton, and the card.
    """
    sha = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        sha.update(source.read_bytes())
    sha.update("|".join((what, triton.__version__, torch.__version__, torch.cuda.get_device_name(device))).encode())
    return Path(triton.knobs.cache.dir) / f"dinfer-{sha.hexdigest()}"


def _load(kernel: Any) -> None:
    """Does the rest of a first launch: loads the code and, in Triton 3.6, compiles a launcher in C."""
    compiled = kernel.result() if isinstance(kernel, triton.FutureKernel) else kernel
    _ = compiled.run
