"""Compiles kernels in parallel, before they are launched.

Triton compiles a kernel at its first launch, and the launch waits. So one core would compile all kernels of the first
step, one after the other.
"""

import hashlib
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import triton
from triton.experimental.gluon.nvidia import hopper
from triton.tools.tensor_descriptor import TensorDescriptor

from dinfer.core.kernels.dispatch import compiling_for
from dinfer.kernels import triton as triton_kernels
from dinfer.speed.startup.patches import keep_launchers_apart, launches_replaced, quick_switches

THREADS = 32  # at most; a step has some dozens of kernels
_TURN = threading.Lock()
keep_launchers_apart()


class _Compiler(ThreadPoolExecutor):
    """Compiles a kernel, and does what its first launch does: loads its code and compiles a launcher in C."""

    def submit(self, compile: Any, /, *args: Any, **options: Any) -> Future[Any]:
        def loaded() -> Any:
            kernel = compile(*args, **options)
            _ = kernel.run
            return kernel

        return super().submit(loaded)


def cores() -> int:
    """The number of kernels that this process can compile at a time."""
    return len(os.sched_getaffinity(0))


@contextmanager
def compiled_beside(device: torch.device) -> Iterator[None]:
    """Within, a kernel that this thread launches on tensors of the meta device is compiled for `device`, not run.

    At the end all of them are compiled and loaded. Other threads launch kernels as usual. Raises the compiler's errors.
    """
    kernels: dict[Any, Any] = {}

    def compile_once(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        call = (self, *map(_special, args), *((name, _special(value)) for name, value in options.items()))
        if call not in kernels:  # layers launch the same kernels over and over again
            kernels[call] = run(self, *args, grid=grid, warmup=True, **options)
        return kernels[call]

    with _TURN, _Compiler(min(cores(), THREADS), initializer=torch.cuda.set_device, initargs=(device,)) as compiler:
        # If the mode raised errors, it would stay on. `result` raises those that it ignores.
        asynchronous = triton.AsyncCompileMode(compiler, ignore_errors=True)
        with launches_replaced(compile_once) as run, quick_switches(), compiling_for(device), asynchronous:
            yield
        for kernel in kernels.values():
            if isinstance(kernel, triton.FutureKernel):
                kernel.result()


def _special(value: Any) -> Any:
    """What a kernel may be specialised for. Triton looks at no more of an argument."""
    if isinstance(value, TensorDescriptor | hopper.TensorDescriptor):
        return value.base.dtype, tuple(value.block_shape)
    return (value.dtype, value.data_ptr() % 16) if isinstance(value, torch.Tensor) else (type(value), value)


def compiled_before(what: str, device: torch.device) -> Path:
    """A file that marks the kernels of `what` as compiled. The caller creates it once Triton's cache has them.

    Its name changes with the sources of the kernels, the versions of torch and Triton, and the card.
    """
    sha = hashlib.sha256()
    for source in sorted(Path(triton_kernels.__path__[0]).glob("*.py")):
        sha.update(source.read_bytes())
    sha.update("|".join((what, triton.__version__, torch.__version__, torch.cuda.get_device_name(device))).encode())
    return Path(triton.knobs.cache.dir) / f"dinfer-{sha.hexdigest()}"
