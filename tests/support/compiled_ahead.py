"""Compiles the kernels of a recipe ahead, in a process of its own: here Triton's interpreter would take their place."""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

COMPILED: list[tuple[str, str]] = []  # each kernel, and the thread that compiled it
COLLECTS: list[bool] = []  # for each, whether garbage was collected meanwhile
LOADED: list[object] = []
BROKEN: list[bool] = []  # not empty: the compiler fails


class Driver:
    """Stands for the driver of a Hopper card."""

    @property
    def utils(self) -> Driver:
        return self

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448}

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class Compiled:
    """Stands for a compiled kernel."""

    @property
    def run(self) -> Any:
        LOADED.append(self)
        return lambda *args: None


def compiled(source: Any, **options: Any) -> Compiled:
    if BROKEN:
        raise RuntimeError("ptxas is gone")
    COMPILED.append((source.name, threading.current_thread().name))
    COLLECTS.append(gc.isenabled())
    return Compiled()


def interrupted(*given: object) -> None:
    """Stands for the end of Triton 3.6's mode if Ctrl-C comes there: the mode stays on."""
    raise KeyboardInterrupt


def main() -> None:
    """Prints what was compiled and loaded: for the first step, for the same kind once more, and by the step itself."""
    driver.set_active(Driver())
    triton.compiler.compile = compiled
    torch.cuda.get_device_capability = lambda device=None: (9, 0)  # type: ignore[assignment]
    torch.cuda.current_device = lambda: 0  # type: ignore[assignment]
    torch.cuda.get_device_name = lambda device=None: "a card"  # type: ignore[assignment]
    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(multi_processor_count=132)  # type: ignore
    torch.cuda.set_device = lambda device: None  # type: ignore[assignment]
    from support.models import tiny_model

    from dinfer.core.memory import PoolSize
    from dinfer.core.recipe.recipe import Recipe, compose
    from dinfer.core.step.cursors import Phase
    from dinfer.core.step.shape import StepShape
    from dinfer.core.step.state import BatchState
    from dinfer.core.step.step import denoise_step
    from dinfer.kernels.triton import hopper_attention
    from dinfer.speed.startup.kernel_compiler import META, KernelCompiler, Shapes, on_meta
    from dinfer.speed.startup.parallel_compiling import compiled_beside
    from dinfer.speed.startup.prepare import prepare, prepared

    recipe = compose(
        tiny_model(dtype=torch.bfloat16, head_dim=16), iteration={"name": "blockwise", "block": 8}, decoder="threshold",
        cache="dual",
    )  # fmt: skip

    def alloc(recipe: Recipe, device: torch.device) -> BatchState:
        return BatchState.alloc(recipe, PoolSize(2, 64, 8, 16), dtype=torch.bfloat16, device=device, block=8)

    found: dict[str, Any] = {}
    begun, start = list[str](), threading.Thread.start
    threading.Thread.start = lambda thread: (begun.append(thread.name), start(thread))[1]  # type: ignore[method-assign]
    for device in ("cpu", "cuda"):
        prepare(torch.device(device))
        found[f"prepares for {device}"] = any(name.startswith("dinfer-prepare") for name in begun)
    threading.Thread.start = start  # type: ignore[method-assign]
    prepared()
    found["imported"] = "dinfer.kernels.triton.moe" in sys.modules

    def note(name: str) -> None:
        noted = len([*Path(triton.knobs.cache.dir).glob("dinfer-*")])
        found[name] = {
            "kernels": [kernel for kernel, _ in COMPILED], "threads": sorted({thread for _, thread in COMPILED}),
            "loaded": len(LOADED), "noted": noted,
        }  # fmt: skip
        COMPILED.clear()
        LOADED.clear()

    compiler = KernelCompiler(recipe, alloc, 64)
    shape = StepShape(Phase.FULL, 1, 64, 1, 8, 4)
    with torch.inference_mode():
        compiler.compile(shape)
        note("first")
        compiler.compile(shape)
        note("again")
        KernelCompiler(recipe, alloc, 64).compile(shape)
        note("next start")
        KernelCompiler(recipe, alloc, 65).compile(shape)
        note("other sizes")
        KernelCompiler(recipe, alloc, 64).compile(replace(shape, lanes=2))
        note("two rows")
        wider = replace(shape, lanes=40)
        affinity, os.sched_getaffinity = os.sched_getaffinity, lambda pid: {0}  # type: ignore[assignment]
        KernelCompiler(recipe, alloc, 64).compile(wider)
        os.sched_getaffinity = affinity  # type: ignore[assignment]
        note("one core")
        BROKEN.append(True)
        KernelCompiler(recipe, alloc, 64).compile(wider)
        BROKEN.clear()
        note("broken")
        found["switch interval"] = sys.getswitchinterval()
        found["collects"] = gc.isenabled(), any(COLLECTS)
        KernelCompiler(recipe, alloc, 64).compile(wider)
        note("mended")
        leave = triton.AsyncCompileMode.__exit__
        triton.AsyncCompileMode.__exit__ = interrupted
        with suppress(KeyboardInterrupt):
            KernelCompiler(recipe, alloc, 66).compile(wider)
        triton.AsyncCompileMode.__exit__ = leave
        KernelCompiler(recipe, alloc, 66).compile(wider)
        note("after an interrupt")
        with Shapes():
            twin = on_meta(recipe)
            state, slot_B = alloc(twin, META), torch.empty(1, dtype=torch.int64, device=META)
        with compiled_beside(torch.device("cuda", 0)), Shapes():  # what the steps launch
            for step in (shape, StepShape(Phase.WINDOW, 1, 8, 1, 8, 4)):
                denoise_step(twin, state, step, slot_B)
        found["steps"] = len(COMPILED)
        COMPILED.clear()
        with compiled_beside(torch.device("cuda", 0)), torch.device(META):
            q_BWHE, pool_PTGE = (
                torch.empty(*sizes, dtype=torch.bfloat16) for sizes in ((1, 64, 4, 64), (9, 16, 2, 64))
            )
            pages_BP, end_BW = torch.empty(1, 8, dtype=torch.int64), torch.empty(1, 64, dtype=torch.int64)
            for _ in range(2):
                hopper_attention.paged_attention(q_BWHE, pool_PTGE, pool_PTGE, pages_BP, end_BW, end_BW)
        found["in gluon"] = [kernel for kernel, _ in COMPILED]
    found["heavy"] = sorted({"torch._dynamo", "sympy"} & sys.modules.keys())
    print(json.dumps(found))


if __name__ == "__main__":
    main()
