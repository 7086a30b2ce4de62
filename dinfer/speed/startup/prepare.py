"""Prepares the compilers of kernels in threads, while a model loads."""

import importlib
import pkgutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache

import torch

from dinfer.speed.startup.patches import quick_switches


def prepare(device: torch.device) -> None:
    """Starts to prepare if kernels run on `device`, so that the first request waits less for compilers."""
    if device.type == "cuda":
        _begin()


def imported(device: torch.device) -> None:
    """Waits for the imports that `prepare` has started. Call it before code that may import the same.

    Python may give a module that is half imported to code that imports it meanwhile.
    """
    if device.type == "cuda":
        wait(_begin()[:1])


def prepared() -> None:
    """Prepares, or waits until threads have. An error is left to the first launch, which meets it again."""
    wait(_begin())


@cache
def _begin() -> tuple[Future[None], ...]:
    """One thread imports, before the others begin: what two threads import may be half imported for one of them."""
    pool = ThreadPoolExecutor(2, "dinfer-prepare")
    first = pool.submit(_import_kernels)

    def then(work: Callable[[], object]) -> None:
        first.result()
        work()

    rest = [pool.submit(then, work) for work in (_make_driver, _read_compiler)]
    pool.shutdown(wait=False)
    return first, *rest


@quick_switches()
def _import_kernels() -> None:
    from dinfer.kernels import triton as kernels  # only here: these kernels are optional

    for module in pkgutil.iter_modules(kernels.__path__, f"{kernels.__name__}."):
        importlib.import_module(module.name)


def _make_driver() -> None:
    """Triton's driver is in C, and gcc compiles it at the first start."""
    from triton.runtime import driver

    _ = driver.active


def _read_compiler() -> None:
    """The names of Triton's cache hold a hash of its compiler, which has half a gigabyte."""
    from triton.runtime.cache import triton_key

    triton_key()
