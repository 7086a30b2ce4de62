"""Whether a function of this package runs its Triton kernel or its torch reference."""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache, wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal, ParamSpec, TypeVar, get_args

import torch
from torch import Tensor, nn

Args = ParamSpec("Args")
Result = TypeVar("Result")
VARIABLE = "DINFER_KERNELS"
Group = Literal[
    "linear", "packed", "experts", "router", "attention", "rotary", "norm", "gate", "canvas", "commit", "advance",
    "draw", "token_stats", "languages",
]  # fmt: skip
"""Kernels that are switched off together, to measure what they gain."""
GROUPS: tuple[str, ...] = get_args(Group)
_COMPILING_FOR: ContextVar[torch.device | None] = ContextVar("compiling_for", default=None)


def card(device: torch.device) -> torch.device | None:
    """The CUDA device whose kernels take tensors of `device`; None if none does: an AMD card runs the references."""
    if device.type == "meta":
        return _COMPILING_FOR.get()
    return device if device.type == "cuda" and torch.version.hip is None else None


def on_hopper(tensor: Tensor) -> bool:
    """Whether its `card` is of the Hopper generation or later: kernels start early there, an engine copies tiles."""
    return capability(card(tensor.device)) >= (9, 0)


def multiplies_in_groups_of_warps(tensor: Tensor) -> bool:
    """Whether its `card` is of the Hopper generation itself: no other has the instruction (`wgmma`)."""
    return capability(card(tensor.device))[0] == 9


def multiplies_integers(tensor: Tensor) -> bool:
    """Whether kernels on its `card` multiply 8-bit integers: Triton compiles that from Ampere on."""
    return capability(card(tensor.device)) >= (8, 0)


@cache
def capability(device: torch.device | None) -> tuple[int, int]:
    return (0, 0) if device is None else torch.cuda.get_device_capability(device)


@contextmanager
def compiling_for(device: torch.device) -> Iterator[None]:
    """Within, tensors of the meta device take the kernels of this CUDA device (`triton.ahead`)."""
    before = _COMPILING_FOR.set(device)
    try:
        yield
    finally:
        _COMPILING_FOR.reset(before)


def use_triton(tensor: Tensor, group: Group, head_dim: int = 16) -> bool:
    """Whether to run the Triton kernel: on a `card`, without gradients, float64 or a head size it cannot take.

    Head sizes are powers of two from 16 to 256. `DINFER_KERNELS` in the environment turns groups off: `torch` all of
    them, `triton,-canvas,-commit` these two. torch.compile compiles the references instead. Raises ValueError for an
    unknown group.
    """
    if torch.compiler.is_compiling():
        return False
    able = 16 <= head_dim <= 256 and head_dim & (head_dim - 1) == 0
    asked = wanted(group) and card(tensor.device) is not None and has_triton()
    if asked and not able:
        _tell(head_dim)
    return asked and able and tensor.dtype != torch.float64 and not torch.is_grad_enabled()


def wanted(group: Group) -> bool:
    """Whether `DINFER_KERNELS` leaves kernels of this group on."""
    return group not in groups_off(os.environ.get(VARIABLE, "triton"))


@cache
def has_triton() -> bool:
    """Whether `dinfer.kernels.triton` is there, which is optional."""
    try:
        return find_spec("dinfer.kernels.triton") is not None
    except ModuleNotFoundError:
        return False


@cache
def triton(module: str) -> Any:
    """A module of `dinfer.kernels.triton`, for a function that is about to run its kernel."""
    return import_module(f"dinfer.kernels.triton.{module}")


@cache
def in_c() -> Any | None:
    """The kernels in C for CPUs; None without `dinfer.kernels.cpu`, which is optional."""
    try:
        return import_module("dinfer.kernels.cpu.linear")
    except ModuleNotFoundError:
        return None


def native(group: Group, *tensors: Tensor | None) -> Any | None:
    """`dinfer.kernels.cpu.linear`, if these tensors are float32 on a CPU that has the kernels, without gradients.

    `DINFER_KERNELS` turns them off, by group.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    plain = all(x is None or (x.device.type == "cpu" and x.dtype == torch.float32) for x in tensors)
    return compiled(group) if plain else None


def native_few_bits(x: Tensor, group: Group) -> Any | None:
    """`dinfer.kernels.cpu.linear`, if it takes these inputs, for weights in 8 or fewer bits."""
    able = x.device.type == "cpu" and x.dtype != torch.float64 and x.shape[-1] % 32 == 0 and x.numel() > 0
    return compiled(group) if able and not x.requires_grad else None


def compiled(group: Group) -> Any | None:
    """`dinfer.kernels.cpu.linear`, if kernels of this group are wanted, and this CPU and system have them."""
    return in_c() if wanted(group) and has_native() else None


def has_native() -> bool:
    """Whether this CPU and system have the kernels in C."""
    return (kernels := in_c()) is not None and kernels.library() is not None


def prepare_native(device: torch.device) -> None:
    """Starts to compile the kernels in C if `device` is a CPU, while a model loads, so that no request waits for it."""
    if device.type == "cpu" and wanted("linear") and (kernels := in_c()) is not None:
        kernels.begin()


@cache
def groups_off(choice: str) -> frozenset[str]:
    """The groups that a value of `DINFER_KERNELS` turns off. Raises ValueError for any other value."""
    first, *others = choice.split(",")
    names = {part.removeprefix("-") for part in others}
    if first == "torch" and not others:
        return frozenset(GROUPS)
    if first != "triton" or not names <= {*GROUPS} or not all(part.startswith("-") for part in others):
        raise ValueError(
            f"{VARIABLE}={choice!r} must be 'triton', 'torch', or 'triton' and groups to turn off, such as "
            f"'triton,-canvas,-commit'. Groups: {', '.join(GROUPS)}."
        )
    return frozenset(names)


def untouched(module: nn.Module, kind: type[nn.Module] | None = None) -> bool:
    """Whether a module does what its class says: of the class `kind` (None: any) itself, without a hook on it.

    Only then may a kernel or its owner read its weights instead of calling it.
    """
    own = vars(module)
    hooks = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
    return (kind is None or type(module) is kind) and "forward" not in own and not any(own[name] for name in hooks)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Makes a CUDA device the current one. Triton kernels, events and graphs go there, wherever their tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def on_own_device(work: Callable[Args, Result]) -> Callable[Args, Result]:
    """Runs a function with the device of its first argument, a network, as the current one."""

    @wraps(work)
    def placed(*args: Args.args, **kwargs: Args.kwargs) -> Result:
        network: Any = args[0]
        with on_device(network.device):
            return work(*args, **kwargs)

    return placed


@cache
def _tell(head_dim: int) -> None:
    """Warns once for each size."""
    logging.getLogger(__name__).warning("heads of size %d: attention runs without the Triton kernels", head_dim)
