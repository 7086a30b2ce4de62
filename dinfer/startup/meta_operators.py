"""Operators on the meta device without torch's own implementation in Python.

That one imports torch's compiler and a computer algebra system, over 800 files. That takes a second on a good day, and
took five beside an H200.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

aten = torch.ops.aten
META = torch.device("meta")


class Shapes(TorchDispatchMode):
    """Within, common operators on the meta device return tensors of the right shape and type.

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
        if torch.Tag.pointwise in func.tags:
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


def _summed(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty(x.shape, dtype=dtype or torch.cumsum(_one(x), 0).dtype, device=META)


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


def _stacked(tensors: list[Tensor], dim: int = 0) -> Tensor:
    return _joined([each.unsqueeze(dim) for each in tensors], dim)


def _product(x: Tensor, y_KO: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    if y_KO.dim() != 2:
        raise NotImplementedError
    return torch.empty((*x.shape[:-1], y_KO.shape[1]), dtype=dtype or x.dtype, device=META)


def _linear(x: Tensor, weight_OK: Tensor, bias_O: Tensor | None = None) -> Tensor:
    return _product(x, weight_OK.mT)


def _embedded(weight_VD: Tensor, token: Tensor, *how: Any) -> Tensor:
    return torch.empty((*token.shape, weight_VD.shape[1]), dtype=weight_VD.dtype, device=META)


def _reduced(x: Tensor, dims: list[int], keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    gone = {dim % x.dim() for dim in dims}
    shape = [1 if dim in gone else size for dim, size in enumerate(x.shape) if keepdim or dim not in gone]
    return torch.empty(shape, dtype=dtype or _one(x).sum().dtype, device=META)


def _largest(x: Tensor, count: int, dim: int = -1, *how: Any, **more: Any) -> tuple[Tensor, Tensor]:
    shape = list(x.shape)
    shape[dim] = count
    return torch.empty(shape, dtype=x.dtype, device=META), torch.empty(shape, dtype=torch.int64, device=META)


def _sorted(x: Tensor, *given: Any, **more: Any) -> tuple[Tensor, Tensor]:
    return _like(x), _like(x, dtype=torch.int64)


def _gathered(x: Tensor, dim: int, index: Tensor, **more: Any) -> Tensor:
    return torch.empty(index.shape, dtype=x.dtype, device=META)


KNOWN: dict[Any, Callable[..., Any]] = {
    aten.empty_like.default: _like, aten.zeros_like.default: _like, aten.ones_like.default: _like,
    aten.full_like.default: _like, aten.clone.default: _like, aten.cumsum.default: _summed,
    aten.arange.default: _range, aten.arange.start: _range, aten.arange.start_step: _range,
    aten.cat.default: _joined, aten.stack.default: _stacked, aten.repeat.default: _repeated,
    aten.mm.default: _product, aten.mm.dtype: _product, aten.matmul.default: _product, aten.linear.default: _linear,
    aten.embedding.default: _embedded, aten.gather.default: _gathered, aten.sort.default: _sorted,
    aten.sort.stable: _sorted, aten._to_copy.default: _like,
    aten.logsumexp.default: _reduced, aten.sum.dim_IntList: _reduced, aten.topk.default: _largest,
}  # fmt: skip
