"""Languages on a CPU by `languages.c`; see `dinfer.kernels.languages`. torch takes a call for each position and set."""

import ctypes

import torch
from torch import Tensor

from dinfer.kernels.cpu.linear import library
from dinfer.kernels.lines import Languages, Line


def allowed(languages: Languages, place_B: Tensor, line: Line) -> Tensor:
    """See `Sweeps.allowed`."""
    most = languages.size_GC.shape[1]
    out_BXC = torch.zeros(*line.token_BX.shape, most, dtype=torch.bool)
    given = line.token_BX, line.open_BX, line.outside_BX, line.state_B, line.room_B
    _run("allowed", languages, place_B, line.token_BX.shape[1], *given, out_BXC, most)
    return out_BXC


def admitted(
    languages: Languages, place_B: Tensor, line: Line, commit_BX: Tensor, token_BX: Tensor, order_BX: Tensor
) -> Tensor:
    """See `Sweeps.admitted`. `order_BX`: the order in which positions are tried."""
    out_BX = torch.zeros_like(commit_BX, memory_format=torch.contiguous_format)
    own = (x.clone(memory_format=torch.contiguous_format) for x in (line.token_BX, line.open_BX))
    given = *own, line.outside_BX, line.state_B, line.room_B, commit_BX, token_BX, order_BX, out_BX
    _run("admitted", languages, place_B, line.token_BX.shape[1], *given)
    return out_BX


def run(languages: Languages, place_B: Tensor, state_B: Tensor, token_BX: Tensor, passed_BX: Tensor) -> Tensor:
    """See `Sweeps.run`."""
    out_B = torch.empty_like(state_B, memory_format=torch.contiguous_format)
    _run("run", languages, place_B, token_BX.shape[1], state_B, token_BX, passed_BX, out_B)
    return out_B


def _run(name: str, languages: Languages, place_B: Tensor, active: int, *given: Tensor | int) -> None:
    held = languages
    tables = held.meta_G8, held.class_GV, held.next_Y, held.pair_Y2, held.edge_Y3, held.distance_GQ
    counts = held.class_GV.shape[1], held.distance_GQ.shape[1], len(place_B), active
    kept = [x.contiguous() for x in (place_B, *tables)]
    rows = (ctypes.c_int64 * 11)(*(x.data_ptr() for x in kept), *counts)
    plain = [x.contiguous() if isinstance(x, Tensor) else x for x in given]
    values = [x if isinstance(x, int) else x.data_ptr() for x in plain]
    if library()[f"dinfer_language_{name}"](ctypes.byref(rows), *map(ctypes.c_int64, values)):  # type: ignore[index]
        raise MemoryError("no memory for the states of the constraints")
