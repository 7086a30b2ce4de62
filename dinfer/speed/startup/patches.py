"""What dinfer changes in Python, torch and Triton for the whole process.

All of it works with torch 2.11 to 2.13 and Triton 3.6 to 3.9. `JITFunction.run` and `_load_module_from_path` are no
public names of Triton, so look at them first when a new version fails.
"""

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

SWITCH = 0.0005  # seconds that a thread waits for one that runs Python; usually 5 ms


@contextmanager
def quick_switches() -> Iterator[None]:
    """Within, threads that run Python wait less for each other, and garbage stays.

    The collector would look at all of torch's objects again and again, while all threads wait. It may also run Python
    code while Python parses a kernel, and the parsers of other threads then fail.
    """
    interval, collects = sys.getswitchinterval(), gc.isenabled()
    sys.setswitchinterval(SWITCH)
    gc.disable()
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
        if collects:
            gc.enable()


@contextmanager
def launches_replaced(instead: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Within, `instead` is called for each launch of a Triton kernel by this thread. Yields Triton's own launch."""
    from triton.runtime.jit import JITFunction

    thread, run = threading.get_ident(), JITFunction.run

    def launch(self: Any, *args: Any, **options: Any) -> Any:
        return (instead if threading.get_ident() == thread else run)(self, *args, **options)

    JITFunction.run = launch
    try:
        yield run
    finally:
        JITFunction.run = run


@cache
def keep_launchers_apart() -> None:
    """From now on, each kernel keeps its own launcher in C, whatever other threads load. For the rest of the process.

    Triton gives all launchers one module name. When Python loads a file again, it overwrites the functions of the
    module that was loaded last under that name. So a thread could take the launcher of another thread's kernel.
    """
    from triton.runtime import build

    loading, load = threading.Lock(), build._load_module_from_path

    def load_alone(name: str, path: str) -> SimpleNamespace:
        with loading:
            return SimpleNamespace(**vars(load(name, path)))

    build._load_module_from_path = load_alone
