"""What an engine takes of a card: `runtime.memory` decides how many pages of keys fit beside weights and steps.

The largest steps run once, as the first requests would run them, and what they took is measured. The rest is for keys.
A card's memory grows in segments that can be extended (`extend_segments`), so what a small graph needs lies within what
a large one took, whatever came first.

Bytes are those of one card. Ranks that divide a model take about the same, and rank 0 plans for all.
"""

import logging
import math
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dinfer.core.engine.runtime import BatchSize, Runtime
from dinfer.core.engine.worker import Worker
from dinfer.core.memory import KVPool, PoolSize
from dinfer.core.models.family import ModelFamily
from dinfer.core.provided import needed, provided
from dinfer.core.ranks.split import Rank
from dinfer.core.step.cursors import Cursors, Phase
from dinfer.core.step.shape import Planned, Sampled, StepShape, Versioned
from dinfer.core.step.window import deciding, widest, width_of

logger = logging.getLogger(__name__)
META = torch.device("meta")
UNITS = {"KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
LEAST = 1e6  # bytes: a smaller number above 1 is no number of bytes that anybody means
MORE = "use quantize, or more cards by runtime.tensor_parallel"
SPARE = 1.15  # of what the largest steps took: others may draw, or be guided
TIMES = 3  # of a step: eagerly, as it is captured, as a graph


def memory_bytes(value: float | str, total: int) -> int:
    """The bytes that `runtime.memory` means on a card of `total` bytes. Raises ValueError."""
    number, text = value, str(value).strip()
    if isinstance(value, str):
        digits = text.rstrip("BIKMGTbikmgt ")
        unit = UNITS.get(text[len(digits) :].strip().upper())
        try:
            number = float(digits) * (1 if unit is None and digits == text else unit or math.nan)
        except ValueError:
            number = math.nan
    share = 0 < number <= 1  # type: ignore[operator]
    if not share and not LEAST <= number < math.inf:  # type: ignore[operator]
        raise ValueError(
            f"runtime.memory={value} must be a share of the card above 0 and up to 1, such as 0.9, or bytes, such as "
            "40GB or 40GiB"
        )
    return int(number * total if share else number)


def free_and_total(device: torch.device) -> tuple[int, int]:
    """Bytes of a card, or of the host."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)
    page = os.sysconf("SC_PAGE_SIZE")
    return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page


def gigabytes(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def held(network: Any) -> int:
    """Bytes of a network's weights."""
    if not isinstance(network, torch.nn.Module):
        return 0
    tensors = {tensor.data_ptr() or id(tensor): tensor for tensor in (*network.parameters(), *network.buffers())}
    return sum(tensor.nbytes for tensor in tensors.values())


def eyes_of(worker: Worker) -> Any | None:
    """What sees pictures for the network, which has weights of its own; None: nothing does."""
    own = provided("images")
    found = "" if own is None else own.eyes_of(worker.recipe.model)
    return None if isinstance(found, str) else found


def beside(worker: Worker) -> tuple[int, int]:
    """Bytes of the vision tower's weights, and of the embeddings that all requests together may bring."""
    if (eyes := eyes_of(worker)) is None:
        return 0, 0
    return eyes.nbytes, eyes.table_bytes(worker.runtime.rows, longest(worker))


def longest(worker: Worker) -> int:
    """Positions of the longest canvas."""
    most = worker.recipe.model.spec.max_length
    return min(worker.runtime.max_length or most, most)


def fits(
    family: ModelFamily, folder: Path, dtype: torch.dtype | None, quantize: str | None, runtime: Runtime,
    device: torch.device,
) -> None:  # fmt: skip
    """Raises ValueError if a card has no memory for its share of the weights. Reads no weight."""
    from dinfer.core.loading.checkpoint import LoadPlan, empty_network
    from dinfer.core.loading.files import GGUF

    wanted = None if quantize is None else needed("format_of", f"quantize={quantize}", "formats")(quantize, device)
    rank = Rank(0, runtime.tensor_parallel, runtime.expert_parallel)
    plan, (free, total) = LoadPlan.read(folder, family), free_and_total(device)
    dtype = dtype or plan.dtype
    blocks = rank.ranks == 1 and device.type == "cpu" and folder.suffix == GGUF and quantize is None
    formats = plan.formats(dtype, quantize, rank, blocks=blocks)
    weights = held(empty_network(family, plan.spec, dtype, META, formats, rank, wanted))
    weights += 0 if (tower := provided("tower_bytes")) is None else tower(family, folder, dtype)
    most, said = free, f"the card has {gigabytes(free)} free of {gigabytes(total)}"
    if runtime.memory is not None and (budget := memory_bytes(runtime.memory, total)) < free:
        most, said = budget, f"runtime.memory={runtime.memory} is {gigabytes(budget)}"
    if weights > most:
        raise ValueError(
            f"{said}, and the weights{' of each card' if rank.ranks > 1 else ''} take {gigabytes(weights)}: "
            + ("raise runtime.memory, and leave room for keys" if weights <= free else MORE)
        )


def page_bytes(worker: Worker) -> int:
    """Bytes of a page of keys and values, of all layers."""
    recipe, page = worker.recipe, worker.runtime.page
    one, two = (
        KVPool.alloc(
            recipe.model.spec, PoolSize(1, page, pages, page), dtype=worker.kv, device=META, ranks=recipe.ranks
        )
        for pages in (1, 2)
    )
    return pool_bytes(two) - pool_bytes(one)


def pool_bytes(pool: KVPool) -> int:
    """Bytes of keys and values."""
    own = pool.k_JPTGE.nbytes + pool.v_JPTGE.nbytes
    return own if pool.local is None else own + pool_bytes(pool.local)


def within(worker: Worker) -> Runtime:
    """The settings, with as many pages in place of `runtime.memory` as that has room for. Raises ValueError."""
    runtime, device = worker.runtime, worker.recipe.model.device
    assert runtime.memory is not None
    free, total = free_and_total(device)
    budget = memory_bytes(runtime.memory, total)
    tower, table = beside(worker)
    weights = held(worker.recipe.model) + tower
    before = max(torch.cuda.memory_reserved(device), weights) if device.type == "cuda" else weights
    steps, page = int(SPARE * measured(worker)), page_bytes(worker)
    need = -(-(runtime.max_length or 1) // runtime.page)
    pages = min(budget - before, free_and_total(device)[0]) - steps - table
    if (pages := pages // page) < need:
        least = before + steps + table + need * page
        fix = f"use at least {math.ceil(100 * least / total) / 100:.2f}, which is {gigabytes(least)}"
        if least > before + free:
            fix = "lower runtime.rows, runtime.positions or runtime.max_length, or use quantize"
            fix += ", or lower model.image_tokens" if table else ""
        raise ValueError(
            f"runtime.memory={runtime.memory} is {gigabytes(budget)}, and {gigabytes(free)} are free. Weights take "
            f"{gigabytes(weights)}, what else this process holds {gigabytes(before - weights)}, steps and graphs "
            f"{gigabytes(steps)}, {f'images of all requests {gigabytes(table)}, ' if table else ''}and keys of the "
            f"longest request {gigabytes(need * page)}: {fix}"
        )
    return replace(runtime, pages=pages, memory=None)


def measured(worker: Worker) -> int:
    """Bytes that the largest steps and a picture take beyond weights, keys and what requests bring.

    0 on a CPU, whose memory nobody reserves.
    """
    device = worker.recipe.model.device
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    before, runtime = torch.cuda.mem_get_info(device)[0], worker.runtime
    length = longest(worker)
    block = min(worker.recipe.iteration.block or length, length)
    pages = -(-length // runtime.page)
    with torch.inference_mode():
        worker.open(BatchSize(runtime.rows, length, block, pages))
        for shape in largest(worker, length, block):
            for _ in range(TIMES if runtime.graphs else 1):
                worker.launch(shape, [])
        if (eyes := eyes_of(worker)) is not None:
            eyes.rehearse()
        torch.cuda.synchronize(device)
        taken = before - torch.cuda.mem_get_info(device)[0] - pages * page_bytes(worker)
        taken -= beside(worker)[1]
        worker.close()
    torch.cuda.empty_cache()
    return max(taken, 0)


def largest(worker: Worker, length: int, block: int) -> Iterator[StepShape]:
    """The largest step of each phase for rows of so many positions, of which some draw, the largest of all first."""
    recipe, runtime = worker.recipe, worker.runtime
    start, shapes = max(length - recipe.iteration.blocks * block, 0), list[StepShape]()
    for phase in recipe.phases:
        places = ((max(start - block, 0), start), (start, start), (start, length))
        rows = [
            Cursors(phase=phase, prompt=start, length=length, start=start, end=length, kept=kept, seen=seen)
            for kept, seen in places
        ]
        width = max(width_of(recipe.cache, recipe.model.spec, row) for row in rows)
        if phase == Phase.PREFILL:
            width = min(start, runtime.positions)
        if width > 0:
            lanes = max(min(runtime.rows, runtime.positions // width), 1)
            shape = StepShape(phase, lanes, width, recipe.iteration.blocks, block, -(-length // runtime.page))
            shapes += [shape] if phase == Phase.PREFILL else asked(worker, shape, length)
    return iter(sorted(shapes, key=computed, reverse=True))


def computed(shape: StepShape) -> int:
    """Positions of a step, in all versions of its rows."""
    return shape.lanes * (1 + shape.versions) * shape.width


def asked(worker: Worker, shape: StepShape, length: int) -> list[StepShape]:
    """A step with the largest that requests may bring and abilities add to it.

    Where rows have versions, fewer rows may have more of them: the largest of these steps, too.
    """
    recipe, found = worker.recipe, list[StepShape]()
    count = (recipe.facts.versions or worker.runtime.speculate) if shape.phase == deciding(recipe) else 0
    shape = shape.adding(Sampled(), *recipe.facts.asks)
    for rows in (shape.lanes, *(1 << n for n in range((shape.lanes - 1).bit_length() * (count > 0)))):
        one = replace(shape, lanes=rows)
        if count:
            width = min(shape.width, widest(recipe, shape.block, length))
            one = replace(one, width=width).adding(Versioned(count))
        for ability in recipe.abilities:
            if (extra := ability.adds(recipe, one, Planned(rows, worker.runtime.positions))) is not None:
                one = one.adding(extra)
        found.append(one)
    return [found[0], *([max(found[1:], key=computed)] if found[1:] else [])]


def told(worker: Worker) -> str:
    """What an engine takes of its card, in a sentence."""
    device, runtime = worker.recipe.model.device, worker.runtime
    parts = [f"weights {gigabytes(held(worker.recipe.model))}"]
    if any(beside(worker)):
        tower, table = beside(worker)
        parts.append(f"vision tower {gigabytes(tower)}, images of all requests {gigabytes(table)}")
    if runtime.pages is not None:
        keys = runtime.pages * page_bytes(worker)
        parts.append(f"keys {gigabytes(keys)} ({runtime.pages} pages of {runtime.page} positions)")
    elif worker.runner.opened:
        parts.append(f"keys {gigabytes(pool_bytes(worker.runner.state.kv))}")
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        parts.append(f"graphs {gigabytes(graph_bytes(device))}")
        parts.append(f"free now {gigabytes(free)} of {gigabytes(total)}")
    return "memory: " + ", ".join(parts)


def graph_bytes(device: torch.device) -> int:
    """Bytes that all CUDA graphs of this process hold of a card."""
    segments = [one for one in torch.cuda.memory_snapshot() if one["device"] == (device.index or 0)]
    return sum(one["total_size"] for one in segments if tuple(one.get("segment_pool_id", (0, 0))) != (0, 0))


def extend_segments() -> None:
    """Has torch extend segments of memory in place of taking new ones, unless the environment says how it shall do.

    Otherwise each larger shape takes new segments, and what smaller ones have left is too small for it.
    """
    given = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys()
    change = vars(torch._C).get("_accelerator_setAllocatorSettings")
    if not given and change is not None:
        change("expandable_segments:True")
