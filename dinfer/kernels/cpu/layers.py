"""The layers of a dense transformer with weights in few bits in one call of C (`layers.c`), instead of a thousand.

In a forward of few rows on a CPU, Python took as long as the arithmetic. Results are bit for bit those of the layers
called one by one. Those run wherever something is around a layer or on it, or a layer is of another kind.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, repeat
from operator import attrgetter, contains, is_, methodcaller
from typing import Any, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from dinfer.core.kernels.canvas import at
from dinfer.core.kernels.dispatch import Group, compiled, untouched
from dinfer.core.kernels.norm import swiglu
from dinfer.core.kernels.types import InGroups, Table
from dinfer.core.layers.linear import Linear, fused, inputs_of
from dinfer.core.layers.transformer import Block, GatedMLP, RMSNorm, Transformer
from dinfer.core.memory import PagedAttend
from dinfer.kernels.cpu.linear import KINDS, TILE, TILED, WIDEST, call, fields

ADDRESS, VERSION = methodcaller("data_ptr"), attrgetter("_version")
GROUPS: tuple[Group, ...] = "linear", "packed", "attention", "rotary", "norm", "gate"


@runtime_checkable
class Switched(Protocol):
    """A linear layer with a low-rank `part` for rows whose `gate` is open, as `dinfer.families.gated` has it."""

    base: nn.Module
    gate: Any
    part: Any


class Unfit(Exception):
    """A network that has a layer of another kind."""


@dataclass(frozen=True, slots=True)
class LayersPlan:
    """What C reads of a network, and by what one sees that the network has not changed."""

    layers: ctypes.Array[ctypes.c_int64]
    held: list[Any]  # keeps alive what `layers` points to
    gates: list[Any]  # one or none
    places: list[dict[str, Any]]  # of modules and tensors
    there: list[Any]  # what is at these places
    kinds: list[type]
    owned: list[dict[str, Any]]  # the attributes of each module
    hooks: list[dict[Any, Any]]
    tensors: list[Tensor]
    addresses: list[int]
    copied: list[Tensor]  # of which C has copies
    versions: list[int]

    @classmethod
    def of(cls, network: Transformer) -> LayersPlan:
        """Raises Unfit."""
        plan = cls((ctypes.c_int64 * 0)(), *([] for _ in range(11)))
        given = [one for place, block in enumerate(network.blocks) for one in plan.block(network, place, block)]
        for module in network.blocks.modules():
            plan.places.extend((module._modules, module._parameters, module._buffers))
            plan.owned.append(vars(module))
            plan.hooks.extend((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks))
        plan.there.extend(chain.from_iterable(map(dict.values, plan.places)))
        plan.kinds.extend(map(type, plan.there))
        plan.tensors.extend(one for one in plan.there if isinstance(one, Tensor))
        plan.addresses.extend(map(ADDRESS, plan.tensors))
        plan.versions.extend(map(VERSION, plan.copied))
        return replace(plan, layers=(ctypes.c_int64 * len(given))(*given))

    def block(self, network: Transformer, place: int, block: nn.Module) -> Iterator[int]:
        """The struct `Layer` of `layers.c`."""
        if not (isinstance(block, Block) and untouched(block, Block) and block.layer == place):
            raise Unfit
        mlp, eps = block.mlp, network.spec.norm_eps
        if not (isinstance(mlp, GatedMLP) and untouched(mlp, GatedMLP) and mlp.gated is swiglu):
            raise Unfit
        for norm in (block.attn_norm, block.mlp_norm):
            if not untouched(norm, RMSNorm) or norm.eps != eps:
                raise Unfit
        if block.qk_norm is not None and not untouched(block.qk_norm, nn.RMSNorm):
            raise Unfit
        head = None if block.qk_norm is None else block.qk_norm.weight
        yield from (self.address(one) for one in (block.attn_norm.weight, head, block.mlp_norm.weight))
        for module in (block.qkv, block.out, mlp.gate_up, mlp.down):
            yield from self.map(module)

    def map(self, module: nn.Module) -> Iterator[int]:
        """The struct `Map` of `layers.c`."""
        switched = module if isinstance(module, Switched) else None
        own = module if switched is None else switched.base
        if not (fused(module) and isinstance(own, Linear) and fused(own) and own.ranks is None):
            raise Unfit
        takes, parts = inputs_of(own), own.expert("weight").parts()
        memory = own.weight.untyped_storage().data_ptr()
        held = all(
            part.kind in (*KINDS, *TILED) and part.values.untyped_storage().data_ptr() == memory for part in parts
        )
        if not parts or not held or not (takes == "plain" or isinstance(takes, InGroups)):
            raise Unfit
        structs = [one for part in parts for one in fields(part, own.in_features)]
        array = (ctypes.c_int64 * len(structs))(*structs)
        self.held.append(array)
        yield from (ctypes.addressof(array), len(parts), own.in_features, own.out_features, self.address(own.bias))
        if switched is None:
            yield from (0,) * 7
            return
        if (halves := switched.part.in_halves()) is None:
            raise Unfit
        if not self.gates:
            self.gates.append(switched.gate)
        if self.gates[0] is not switched.gate:
            raise Unfit
        part, (a_SK, b_PRO) = switched.part, halves
        self.copied.extend((part.a_SK, part.b_OS))
        self.held.extend((a_SK, b_PRO))
        yield from (a_SK.data_ptr(), b_PRO.data_ptr(), part.first_P.data_ptr(), len(a_SK), *b_PRO.shape)

    def address(self, tensor: Tensor | None) -> int:
        """0: there is none."""
        if tensor is None:
            return 0
        if tensor.dtype != torch.float32 or not tensor.is_contiguous():
            raise Unfit
        return tensor.data_ptr()

    def holds(self) -> bool:
        """Whether the network is as it was. It asks what `untouched` asks, of all modules at once.

        No loop here is Python's own: a network has some thousand modules and tensors, and each forward asks.
        """
        found = [*chain.from_iterable(map(dict.values, self.places))]
        return (
            len(found) == len(self.there)
            and all(map(is_, found, self.there))
            and [*map(type, found)] == self.kinds
            and [*map(ADDRESS, self.tensors)] == self.addresses
            and not any(self.hooks)
            and not any(map(contains, self.owned, repeat("forward")))
            and [*map(VERSION, self.copied)] == self.versions
        )


PLANS: WeakKeyDictionary[Transformer, LayersPlan] = WeakKeyDictionary()


def planned(network: Transformer) -> LayersPlan | None:
    """The plan of a network as it is; None if it has none."""
    plan = PLANS.pop(network, None)
    if plan is None or not plan.holds():
        try:
            plan = LayersPlan.of(network)
        except Unfit:
            return None
    PLANS[network] = plan
    return plan


def layers(network: Transformer, x_BWD: Tensor, table: Table, attend: Any) -> Tensor | None:
    """What `Transformer.forward` returns; None where its layers are to be called one by one."""
    if x_BWD.device.type != "cpu" or x_BWD.dtype != torch.float32 or type(attend) is not PagedAttend:
        return None
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or not all(map(compiled, GROUPS)):
        return None
    spec, pool, cos = network.spec, attend.pool, table[0]
    beside = pool.local, attend.local_BW, attend.context_BW, attend.self_key_BW, attend.queries
    plain = network.pieces == (Block.before, Block.after) and network.ranks.size == 1 and cos.dtype == torch.float32
    fits = spec.head_dim % TILE == 0 and spec.head_dim <= WIDEST and pool.k_JPTGE.dtype == torch.float32
    if not (plain and fits and all(one is None for one in beside)) or (plan := planned(network)) is None:
        return None
    opened = plan.gates[0].open_N if plan.gates else None
    lanes, width = attend.pos_BW.shape
    live = max((place + 1 for one in attend.pos_BW.tolist() for place, pos in enumerate(one) if pos >= 0), default=0)

    def filled(one: Tensor | None) -> Tensor | None:
        """The same without the padding behind the last position of all lanes, which nobody reads."""
        return one if one is None or live == width else one.view(lanes, width, -1)[:, :live].contiguous()

    out_BWD, k_JPTGE, v_JPTGE = x_BWD.contiguous().clone(), pool.k_JPTGE, pool.v_JPTGE
    own_BWD = out_BWD if live == width else out_BWD[:, :live].contiguous()
    sizes = (
        len(network.blocks), lanes, live, x_BWD.shape[2], spec.heads, spec.kv_heads, spec.head_dim, cos.shape[-1],
        spec.mlp, attend.pages_BP.shape[1], pool.page, torch.get_num_threads(), k_JPTGE.data_ptr(), v_JPTGE.data_ptr(),
        k_JPTGE.stride(0),
    )  # fmt: skip
    call(
        "layers", plan.layers, (ctypes.c_int64 * len(sizes))(*sizes), own_BWD, *map(filled, table),
        filled(attend.write_X), attend.pages_BP, *map(filled, attend.interval_BW), filled(opened), spec.norm_eps,
    )  # fmt: skip
    if live < width:
        out_BWD[:, :live] = own_BWD
    return out_BWD if attend.needed_BX is None else at(out_BWD, attend.needed_BX)
