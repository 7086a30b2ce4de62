"""What CUDA-graph capture refuses, refused on a CPU."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from support.matrix import may_speculate
from torch.utils._python_dispatch import TorchDispatchMode

from dinfer.core.abilities.guidance import Guided
from dinfer.core.abilities.reports import Reported, Reporting
from dinfer.core.memory import PoolSize
from dinfer.core.recipe.recipe import Recipe
from dinfer.core.step.cursors import Cursors
from dinfer.core.step.mixins import Feeds
from dinfer.core.step.shape import Extra, KeysOnly, Sampled, StepShape, Versioned, extras_of
from dinfer.core.step.state import BatchState
from dinfer.core.step.step import denoise_step
from dinfer.core.step.told import Level
from dinfer.core.step.window import deciding, width_of
from dinfer.research.abilities.branches import branches_of
from dinfer.speed.abilities.open_positions import OpenOnly, scores_open

COPIES = ("aten::_to_copy", "aten::copy_", "aten::lift_fresh", "aten::_local_scalar_dense")
LENGTH, PAGE, LANES = 51, 4, 3


class CaptureRefused(AssertionError):
    """The step did what a graph cannot hold."""


class DeviceOnly(TorchDispatchMode):
    """Refuses every operation that touches host memory.

    The meta device itself refuses what needs values: `.item()`, `if tensor`, boolean indexing, `nonzero`. What it lets
    through is a tensor made on the host: copied to the device, or, as a scalar, simply mixed in.

    An operation that was let through once, on tensors of the same shapes, is not looked at again: torch works out the
    shape of a result in Python, which takes five times as long.
    """

    made: ClassVar[dict[Any, tuple[Any, ...]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        call = (func, signature([*args, *kwargs.items()]))
        if call in self.made:
            return torch.empty_strided(*self.made[call][:2], dtype=self.made[call][2], device="meta")
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
        devices = {tensor.device.type for tensor in tensors}
        if kwargs.get("device") is not None:
            devices.add(torch.device(kwargs["device"]).type)
        out = func(*args, **kwargs)
        devices |= {t.device.type for t in (out if isinstance(out, (tuple, list)) else [out]) if torch.is_tensor(t)}
        if devices - {"meta"}:
            raise CaptureRefused(f"{func.name()} touches {', '.join(sorted(devices))}")
        written_or_shared = [part.alias_info for part in (*func._schema.arguments, *func._schema.returns)]
        if torch.is_tensor(out) and not any(written_or_shared):
            self.made[call] = (out.shape, out.stride(), out.dtype)
        return out


def signature(value: Any) -> Any:
    """All that the shape of a result depends on."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    return tuple(map(signature, value)) if isinstance(value, (list, tuple)) else (type(value), value)


def meta_steps(recipe: Recipe, level: Level = Level.NOTHING) -> None:
    """Every phase of the recipe's step, on the meta device. `recipe.model` must be there."""
    iteration, cache = recipe.iteration, recipe.cache
    pages = -(-LENGTH // PAGE)
    able = may_speculate(recipe)
    guessed = [deciding(recipe)] if able or branches_of(iteration) else []  # phases that may have candidates
    state = BatchState.alloc(
        recipe, PoolSize(LANES, LENGTH, LANES * pages, PAGE), dtype=recipe.model.dtype, device=torch.device("meta"),
        extras=(Versioned(int(able)),),
    )  # fmt: skip
    state.kept[Reporting].want_logprobs()
    slot_B = torch.empty(LANES, dtype=torch.int64, device="meta")
    end = min(5 + iteration.blocks * state.block, LENGTH)
    row = Cursors(prompt=5, start=5, end=end, length=LENGTH)
    for phase in recipe.phases:
        width = max(width_of(cache, recipe.model.spec, row._replace(phase=phase)), 1)
        for more, candidates in [
            (False, 0),
            (True, 0),
            *((False, branches_of(iteration) or 1) for _ in guessed if phase in guessed),
        ]:
            guided = more and not isinstance(iteration, Feeds) and recipe.model.spec.mask_id is not None
            extras: list[Extra] = [Sampled(8), KeysOnly()] if more else []
            extras += [Guided()] * guided + [Versioned(candidates)] * (candidates > 0) + [Reported(level)] * (level > 0)
            if scores_open(recipe) and not any(extra.whole_logits for extra in extras):
                extras.append(OpenOnly(7))
            shape = StepShape(phase, LANES, width, iteration.blocks, state.block, pages, extras_of(extras))
            with DeviceOnly():
                denoise_step(recipe, state, shape, slot_B)
