"""torch.compile for a network: what precedes attention in a block, and what follows it."""

import copy
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from dinfer.core.kernels.deferred import close
from dinfer.core.layers.linear import Formatted
from dinfer.core.layers.transformer import Block, Transformer


def compiled(model: Any, mode: str) -> Transformer:
    """The same network, its weights shared, with torch.compile for what is neither attention nor experts.

    Attention writes keys and values in place, which a traced graph would do to a copy of the whole pool. `mode` as
    torch.compile has it, but never with CUDA graphs of its own: they would be captured in ours. Raises ValueError for
    a network of other blocks.
    """
    if not isinstance(model, Transformer):
        raise ValueError(
            f"runtime.compile={mode}: the model {type(model).__name__} is not made of the blocks that can be compiled. "
            "Use runtime.compile=none."
        )
    leave_out(model)
    mode = "max-autotune-no-cudagraphs" if mode == "max-autotune" else mode
    before, behind = (torch.compile(piece, mode=mode) for piece in (Block.before, Block.after))

    def closed(block: Any, x_BWD: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
        # Dynamo would trace `before` once for each kind of deferred value, more often than it allows.
        x_BWD, delta_BWD = behind(block, x_BWD, *others)
        return x_BWD, close(delta_BWD).view_as(x_BWD)

    twin = copy.copy(model)
    twin.pieces = before, closed
    return twin


def leave_out(network: nn.Module) -> None:
    """Has torch.compile leave out what is `untraced` of the network and of the formats of its weights."""
    modules = [*network.modules()]
    formats = (held for module in modules if isinstance(module, Formatted) for held in module.formats.values())
    for owner in {base for one in (*modules, *formats) for base in type(one).__mro__}:
        for name, method in [*vars(owner).items()]:
            if isinstance(method, FunctionType) and vars(method).get("untraced"):
                setattr(owner, name, torch.compiler.disable(method))
