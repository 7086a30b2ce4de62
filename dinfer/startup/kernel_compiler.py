"""Compiles the kernels of a step in parallel, before its first launch.

The step runs on the meta device first, where tensors have shapes but no values. So all its kernels are known before the
first of them runs, and each core can compile one (`dinfer.startup.parallel_compiling`). Kernels depend only on a
model's shapes, so this computes nothing and uses no memory of the card.

A file in Triton's cache notes what is compiled. The next start on the machine launches at once, and each launch reads
its kernel from the cache.
"""

import copy
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextvars import copy_context
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from dinfer.recipe.recipe import Recipe
from dinfer.startup.meta_operators import META, Shapes
from dinfer.step.canvas import Cursors, Phase
from dinfer.step.shape import StepShape
from dinfer.step.state import BatchState
from dinfer.step.step import denoise_step
from dinfer.step.window import width_of

logger = logging.getLogger(__name__)


class KernelCompiler:
    """Compiles the kernels of steps, once for each kind of step. If that fails, the first launch compiles as usual."""

    def __init__(self, recipe: Recipe, alloc: Callable[[Recipe, torch.device], BatchState], sizes: object) -> None:
        """`alloc` makes the state of the steps on another device. `sizes`: everything that its shapes depend on."""
        self._recipe, self._alloc, self._sizes = recipe, alloc, sizes
        self._twin: tuple[Recipe, BatchState] | None = None
        self._known: set[StepShape] = set()
        self._able = isinstance(recipe.model, nn.Module) and recipe.ranks.size == 1

    def compile(self, shape: StepShape) -> None:
        """Compiles for a step of this shape, and for the other phases of its rows."""
        lanes, width = shape.lanes.bit_length(), shape.width.bit_length()
        kind = replace(shape, lanes=lanes, width=width, pages=0)
        kind = replace(kind, extras=tuple(extra.kernels() for extra in shape.extras))
        if not self._able or kind in self._known:
            return
        self._known.add(kind)
        began = time.perf_counter()
        try:
            copy_context().run(self._compile, shape)  # an interrupt leaves Triton 3.6's mode on in its context
        except Exception as error:  # if the step itself is at fault, the launch raises a better error
            self._able = False
            logger.info("kernels are compiled at their first launch from now on: %s", error)
        logger.info("kernels of %s: %.1f s", shape, time.perf_counter() - began)

    @property
    def _what(self) -> str:
        """Everything but the step's shape that its kernels depend on."""
        recipe, settings = self._recipe, {k: v for k, v in os.environ.items() if k.startswith("DINFER_")}
        weights = {(name, weight.dtype) for name, weight in recipe.model.state_dict().items()}  # type: ignore[attr-defined]
        parts = recipe.iteration, recipe.decoder, recipe.cache, recipe.sampling
        return repr((recipe.model.spec, sorted(map(repr, weights)), parts, self._sizes, sorted(settings.items())))

    def _compile(self, shape: StepShape) -> None:
        from dinfer.startup.parallel_compiling import compiled_before, compiled_beside, cores
        from dinfer.startup.prepare import prepared

        device = self._recipe.model.device
        done = compiled_before(f"{self._what} {shape}", device)
        prepared()  # a launch needs it, too
        if done.exists() or cores() == 1:
            return
        with compiled_beside(device), Shapes():
            if self._twin is None:
                recipe = on_meta(self._recipe)
                self._twin = recipe, self._alloc(recipe, META)
            recipe, state = self._twin
            slot_B = torch.empty(shape.lanes, dtype=torch.int64, device=META)
            for each in dict.fromkeys((shape, *followers(recipe, state, shape))):
                denoise_step(recipe, state, each, slot_B)
        done.parent.mkdir(parents=True, exist_ok=True)
        done.touch()


def on_meta(recipe: Recipe) -> Recipe:
    """The recipe, with a copy of its network on the meta device."""
    model: Any = recipe.model
    memo: dict[int, object] = {id(buffer): buffer.to(META) for buffer in model.buffers()}
    memo |= {id(weight): nn.Parameter(weight.to(META), requires_grad=False) for weight in model.parameters()}
    return replace(recipe, model=copy.deepcopy(model, memo))


def followers(recipe: Recipe, state: BatchState, shape: StepShape) -> Iterator[StepShape]:
    """The steps that rows most likely need after one of this shape: each phase, as they enter a block and later."""
    length, spec = state.canvas.capacity, recipe.model.spec
    start = max(length - shape.blocks * state.block, 0)
    for phase in set(recipe.phases) - {shape.phase, Phase.PREFILL, Phase.VERIFY}:
        for kept, seen in ((max(start - state.block, 0), start), (start, start), (start, length)):
            row = Cursors(phase=phase, prompt=start, length=length, start=start, end=length, kept=kept, seen=seen)
            yield replace(shape, phase=phase, width=width_of(recipe.cache, spec, row))
