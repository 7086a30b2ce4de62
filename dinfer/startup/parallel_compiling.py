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
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.experimental.gluon.nvidia import hopper
from triton.runtime import build
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from dinfer.kernels import triton as triton_kernels
from dinfer.kernels.dispatch import compiling_for
from dinfer.startup.interpreter_lock import taking_turns

THREADS = 32  # at most; a step has some dozens of kernels
_TURN, _LOADING = threading.Lock(), threading.Lock()
_load = build._load_module_from_path


def _load_alone(name: str, path: str) -> SimpleNamespace:
    """The functions of a launcher in C.

    Triton gives all launchers one module name. When Python loads a file again, it overwrites the functions of the
    module that was loaded last under that name. So a thread could take the launcher of another thread's kernel.
    """
    with _LOADING:
        return SimpleNamespace(**vars(_load(name, path)))


build._load_module_from_path = _load_alone


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
    thread, run, kernels = threading.get_ident(), JITFunction.run, dict[Any, Any]()

    def compile_or_run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if threading.get_ident() != thread:
            return run(self, *args, grid=grid, warmup=warmup, **options)
        call = (self, *map(_special, args), *((name, _special(value)) for name, value in options.items()))
        if call not in kernels:  # layers launch the same kernels over and over again
            kernels[call] = run(self, *args, grid=grid, warmup=True, **options)
        return kernels[call]

    with _TURN, _Compiler(min(cores(), THREADS), initializer=torch.cuda.set_device, initargs=(device,)) as compiler:
        JITFunction.run = compile_or_run
        try:
            # If the mode raised errors, it would stay on. `result` raises those that it ignores.
            with taking_turns(), compiling_for(device), triton.AsyncCompileMode(compiler, ignore_errors=True):
                yield
        finally:
            JITFunction.run = run
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
