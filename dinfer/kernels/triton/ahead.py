"""Compiling kernels beside each other, before they are launched.

Triton compiles a kernel when it is first launched, and the launch waits for it. So one core would compile all kernels
of the first step, one after the other.
"""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
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
    thread, run, kernels = threading.get_ident(), JITFunction.run, list[Any]()

    def compile_or_run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if threading.get_ident() != thread:
            return run(self, *args, grid=grid, warmup=warmup, **options)
        kernels.append(run(self, *args, grid=grid, warmup=True, **options))
        return kernels[-1]

    threads = min(len(os.sched_getaffinity(0)), THREADS)
    with _TURN, ThreadPoolExecutor(threads, initializer=torch.cuda.set_device, initargs=(device,)) as pool:
        JITFunction.run = compile_or_run
        try:
            with compiling_for(device), triton.AsyncCompileMode(pool):
                yield
        finally:
            JITFunction.run = run
        compiled = {id(kernel): kernel for kernel in kernels}.values()
        for _ in pool.map(_load, compiled):
            pass


def _load(kernel: Any) -> None:
    """Does what a kernel's first launch does: loads its code and, in Triton 3.6, compiles a launcher in C."""
    compiled = kernel.result() if isinstance(kernel, triton.FutureKernel) else kernel
    _ = compiled.run
