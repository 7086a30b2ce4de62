"""Compiles the kernels of a step in parallel, before its first launch.

The step runs on the meta device first, where tensors have shapes but no values. So all its kernels are known before the
first of them runs, and each core can compile one (`dinfer.speed.startup.parallel_compiling`). Kernels depend only on a
model's shapes, so this computes nothing and uses no memory of the card.

A file in Triton's cache notes what is compiled. The next start on the machine launches at once, and each launch reads
its kernel from the cache.
"""

import copy
import logging
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from dinfer.core.recipe.recipe import Recipe
from dinfer.core.step.cursors import Cursors, Phase
from dinfer.core.step.shape import StepShape, power_of_2
from dinfer.core.step.state import BatchState
from dinfer.core.step.step import denoise_step
from dinfer.core.step.window import width_of

logger = logging.getLogger(__name__)
aten = torch.ops.aten
META = torch.device("meta")


class KernelCompiler:
    """Compiles the kernels of steps, once for each kind of step. If that fails, the first launch compiles as usual.

    It does so in a thread of its own, so that steps of other shapes can run meanwhile.
    """

    def __init__(self, recipe: Recipe, alloc: Callable[[Recipe, torch.device], BatchState], sizes: object) -> None:
        """`alloc` makes the state of the steps on another device. `sizes`: everything that its shapes depend on."""
        self._recipe, self._alloc, self._sizes = recipe, alloc, sizes
        self._twin: tuple[Recipe, BatchState] | None = None
        self._begun: dict[KernelKind, Future[None]] = {}
        self._thread = ThreadPoolExecutor(1, "dinfer-kernels")
        self._able = isinstance(recipe.model, nn.Module) and recipe.ranks.size == 1

    def compile(self, shape: StepShape) -> None:
        """Compiles for a step of this shape, and for the other phases of its rows. Waits until that has ended."""
        if self._able:
            self._begin(shape).result()

    def ready(self, shape: StepShape) -> bool:
        """Whether `compile` would return at once. If not, it begins to compile, and does not wait."""
        return not self._able or self._begin(shape).done()

    def _begin(self, shape: StepShape) -> Future[None]:
        kind = kind_of(shape)
        if kind not in self._begun:
            self._begun[kind] = Future()
            self._thread.submit(self._work, shape, self._begun[kind])
        return self._begun[kind]

    def _work(self, shape: StepShape, done: Future[None]) -> None:
        began = time.perf_counter()
        try:
            copy_context().run(self._compile, shape)  # an interrupt leaves Triton 3.6's mode on in its context
        except Exception as error:  # if the step itself is at fault, the launch raises a better error
            self._able = False
            logger.info("kernels are compiled at their first launch from now on: %s", error)
        finally:
            done.set_result(None)
        logger.info("kernels of %s: %.1f s", shape, time.perf_counter() - began)

    @property
    def _what(self) -> str:
        """Everything but the step's shape that its kernels depend on."""
        recipe, settings = self._recipe, {k: v for k, v in os.environ.items() if k.startswith("DINFER_")}
        weights = {(name, weight.dtype) for name, weight in recipe.model.state_dict().items()}  # type: ignore[attr-defined]
        parts = recipe.iteration, recipe.decoder, recipe.cache, recipe.sampling
        return repr((recipe.model.spec, sorted(map(repr, weights)), parts, self._sizes, sorted(settings.items())))

    def _compile(self, shape: StepShape) -> None:
        from dinfer.speed.startup.parallel_compiling import compiled_before, compiled_beside, cores
        from dinfer.speed.startup.prepare import prepared

        device = self._recipe.model.device
        done = compiled_before(f"{self._what} {shape}", device)
        prepared()  # a launch needs it, too
        if done.exists() or cores() == 1:
            return
        with torch.inference_mode(), compiled_beside(device), Shapes():
            if self._twin is None:
                recipe = on_meta(self._recipe)
                self._twin = recipe, self._alloc(recipe, META)
            recipe, state = self._twin
            slot_B = torch.empty(shape.lanes, dtype=torch.int64, device=META)
            denoise_step(recipe, state, shape, slot_B)
            for each in followers(recipe, state, shape):
                if kind_of(each) not in self._begun:
                    self._begun[kind_of(each)] = self._begun[kind_of(shape)]
                    denoise_step(recipe, state, each, slot_B)
        done.parent.mkdir(parents=True, exist_ok=True)
        done.touch()


KernelKind = tuple[StepShape, int]


def kind_of(shape: StepShape) -> KernelKind:
    """One that stands for all that most likely have the same kernels. They differ with rows, widths, and positions."""
    extras = tuple(extra.kernels() for extra in shape.extras)
    lanes, width, positions = (power_of_2(count) for count in (shape.lanes, shape.width, shape.lanes * shape.width))
    return replace(shape, lanes=lanes, width=width, pages=0, extras=extras), positions


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


class Shapes(TorchDispatchMode):
    """Within, common operators on the meta device return tensors of the right shape and type, without torch's own code.

    That one imports torch's compiler and a computer algebra system, over 800 files. That takes a second on a good day,
    and took five beside an H200.

    The type of an elementwise operator's result is that of its result on a CPU for one value of each tensor. All other
    operators are left to torch.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or torch wraps the next method, and its first call imports the compiler

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, Tensor)]
        if not any(each.is_meta for each in tensors) and kwargs.get("device") != META:
            return func(*args, **kwargs)
        if func._schema.is_mutable and torch.Tag.inplace_view not in func.tags and len(func._schema.returns) == 1:
            return kwargs.get("out", args[0])
        if func in KNOWN:
            with suppress(NotImplementedError):
                return KNOWN[func](*args, **kwargs)
        if torch.Tag.pointwise in func.tags or func is aten.cumsum.default:
            return _elementwise(func, tensors, args, kwargs)
        if func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
            with self:
                return func.decompose(*args, **kwargs)
        return func(*args, **kwargs)


def _elementwise(func: Any, tensors: list[Tensor], args: Any, kwargs: Any) -> Tensor:
    few_args, few_kwargs = tree_map_only(Tensor, _one, (args, kwargs))
    dims = max(each.dim() for each in tensors)  # torch's own function for the rest imports the algebra, too
    sizes = zip(*((1,) * (dims - each.dim()) + each.shape for each in tensors), strict=True)
    shape = [next((size for size in some if size != 1), 1) for some in sizes]
    return torch.empty(shape, dtype=func(*few_args, **few_kwargs).dtype, device=META)


def _one(tensor: Tensor) -> Tensor:
    return torch.ones((1,) * tensor.dim(), dtype=tensor.dtype)


def _like(
    x: Tensor, *value: Any, dtype: torch.dtype | None = None, memory_format: Any = torch.preserve_format, **more: Any
) -> Tensor:
    made = torch.empty(x.shape, dtype=dtype or x.dtype, device=META)
    kept = memory_format in (None, torch.preserve_format) and not x.is_contiguous()
    return made.as_strided(x.shape, x.stride()) if kept else made


def _range(*given: Any, dtype: torch.dtype | None = None, **more: Any) -> Tensor:
    counted = torch.arange(*given, dtype=dtype)
    return torch.empty(counted.shape, dtype=counted.dtype, device=META)


def _joined(tensors: list[Tensor], dim: int = 0) -> Tensor:
    shape = list(tensors[0].shape)
    shape[dim] = sum(each.shape[dim] for each in tensors)
    return torch.empty(shape, dtype=torch.cat([_one(each) for each in tensors], dim).dtype, device=META)


def _repeated(x: Tensor, times: list[int]) -> Tensor:
    shape = [1] * (len(times) - x.dim()) + list(x.shape)
    return torch.empty([size * count for size, count in zip(shape, times, strict=True)], dtype=x.dtype, device=META)


def _product(x: Tensor, y_KO: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    if y_KO.dim() != 2:
        raise NotImplementedError
    return torch.empty((*x.shape[:-1], y_KO.shape[1]), dtype=dtype or x.dtype, device=META)


def _reduced(x: Tensor, dims: list[int], keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    gone = {dim % x.dim() for dim in dims}
    shape = [1 if dim in gone else size for dim, size in enumerate(x.shape) if keepdim or dim not in gone]
    return torch.empty(shape, dtype=dtype or _one(x).sum().dtype, device=META)


def _largest(x: Tensor, count: int, dim: int = -1, *how: Any, **more: Any) -> tuple[Tensor, Tensor]:
    shape = list(x.shape)
    shape[dim] = count
    return torch.empty(shape, dtype=x.dtype, device=META), torch.empty(shape, dtype=torch.int64, device=META)


def _sorted(x: Tensor, *how: Any, **more: Any) -> tuple[Tensor, Tensor]:
    return _like(x), _like(x, dtype=torch.int64)


KNOWN: dict[Any, Callable[..., Any]] = {
    aten.empty_like.default: _like, aten.zeros_like.default: _like, aten.ones_like.default: _like,
    aten.full_like.default: _like, aten.clone.default: _like,
    aten.arange.default: _range, aten.arange.start: _range, aten.arange.start_step: _range,
    aten.cat.default: _joined, aten.repeat.default: _repeated,
    aten.stack.default: lambda tensors, dim=0: _joined([each.unsqueeze(dim) for each in tensors], dim),
    aten.mm.default: _product, aten.mm.dtype: _product, aten.matmul.default: _product,
    aten.linear.default: lambda x, weight_OK, bias_O=None: _product(x, weight_OK.mT),
    aten.embedding.default: lambda weight_VD, token, *how: torch.empty(
        (*token.shape, weight_VD.shape[1]), dtype=weight_VD.dtype, device=META
    ),
    aten.gather.default: lambda x, dim, index, **more: torch.empty(index.shape, dtype=x.dtype, device=META),
    aten.sort.default: _sorted, aten.sort.stable: _sorted, aten._to_copy.default: _like,
    aten.logsumexp.default: _reduced, aten.sum.dim_IntList: _reduced, aten.topk.default: _largest,
}  # fmt: skip
