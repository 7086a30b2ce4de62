"""Launches denoising steps as CUDA graphs, one per `StepShape`."""

import logging
import math
import threading
import time
import warnings
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import median
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor, nn

from dinfer.core.engine.runner import Runner
from dinfer.core.engine.runtime import Runtime
from dinfer.core.kernels.canvas import upload
from dinfer.core.kernels.dispatch import untouched
from dinfer.core.recipe.recipe import Recipe
from dinfer.core.step.shape import StepShape, power_of_2
from dinfer.core.step.state import BatchState
from dinfer.core.step.step import denoise_step
from dinfer.speed import addresses
from dinfer.speed.memory import extend_segments

MOST = 32  # measurements that may run, or wait to be read


class StepClock:
    """The time of steps. A GPU measures with its own clock, which leaves out the host's time between steps."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._running: deque[tuple[StepShape, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._measured: deque[tuple[StepShape, float]] = deque(maxlen=MOST)  # only rank 0 reads

    @contextmanager
    def around(self, shape: StepShape) -> Iterator[None]:
        """Measures the step that is launched within."""
        if not self._cuda:
            began = time.perf_counter()
            yield
            self._measured.append((shape, time.perf_counter() - began))
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        yield
        end.record()
        if len(self._running) < MOST:
            self._running.append((shape, begin, end))

    def read(self) -> list[tuple[StepShape, float]]:
        """Shapes and seconds of the steps that have ended since the last call."""
        while self._running and self._running[0][2].query():
            shape, begin, end = self._running.popleft()
            self._measured.append((shape, begin.elapsed_time(end) / 1000))
        measured = [*self._measured]
        self._measured.clear()
        return measured


WORTH = 32  # launches after which a shape is captured although a larger one could stand in
SCARCE = 0.25  # the share of the card's memory that a capture may need
SPARE = 1.5  # a shape with at most so many times the positions of another stands in whatever a step of it takes


class StepCompiler(Protocol):
    """Compiles the kernels of steps before these are launched."""

    def compile(self, shape: StepShape) -> None:
        """Compiles for a step of this shape, and waits until that has ended."""

    def ready(self, shape: StepShape) -> bool:
        """Whether `compile` would return at once. If not, it begins to compile, and does not wait."""


logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    slot_B: Tensor  # the graph reads its slots here
    lanes: list[int]  # the values of `slot_B`
    measured: bool = False  # whether a replay was


class GraphRunner(Runner):
    """Runs steps over one `BatchState`. With graphs, shapes are rounded up to buckets, so that few are captured.

    A shape runs eagerly the first time and is captured the second time. So a shape that comes up once, such as the
    width of a prompt, costs no capture. A capture takes as long as many steps, and the kernels of a new shape may take
    longer to compile than a hundred. So a larger captured shape stands in meanwhile, until the positions that it
    computed in vain have taken as long as a capture, or until the other has come up `WORTH` times. One that differs in
    what is free alone stands in for good. All graphs share a memory pool. A step cannot be captured if a component
    waits for the device. It then always runs eagerly, and a warning says why.
    """

    def __init__(self, recipe: Recipe, runtime: Runtime) -> None:
        super().__init__(recipe, runtime)
        self.graphs, self.steady = runtime.graphs, runtime.deterministic
        self.compiler: StepCompiler | None = None  # compiles for steps of new shapes
        self._seen: Counter[StepShape] = Counter()  # launches
        self._captured: dict[StepShape, _Captured] = {}
        self._pool: Any = None
        self._side: torch.cuda.Stream | None = None  # of captures
        self._replays: StepClock | None = None  # measures one replay of each graph
        self._seconds: dict[StepShape, float] = {}  # what it says
        # By shape, the seconds of positions that other shapes computed in vain for it.
        self._wasted: defaultdict[StepShape, float] = defaultdict(float)
        self._captures: deque[float] = deque(maxlen=32)  # seconds of each
        self._places: tuple[addresses.Reserved, addresses.Reserved] | None = None  # of the state, and of graphs
        _runners.add(self)

    def placing(self) -> AbstractContextManager[None]:
        """The context in which its next state is allocated. That of a network that has slept keeps its addresses."""
        self.open(None)
        if addresses.of(self.recipe.model) is None:
            return nullcontext()
        device = self.recipe.model.device
        self._places = addresses.Reserved(device), addresses.Reserved(device)
        return self._places[0].within()

    @property
    def stays(self) -> bool:
        """Whether the state and the graphs can sleep, and wake as they were."""
        return self._places is not None and self.opened

    def sleep(self) -> None:
        """Gives back the memory of the state and of graphs until `wake`, and forgets keys and values. Nothing runs."""
        assert self._places is not None
        kv, (state, graphs) = self.state.kv, self._places
        pools = [kv] if kv.local is None else [kv, kv.local]
        state.sleep(keep=True, zeros={one.data_ptr() for pool in pools for one in (pool.k_JPTGE, pool.v_JPTGE)})
        graphs.sleep(keep=False)

    def wake(self) -> None:
        """Takes it again. Raises torch.OutOfMemoryError."""
        for place in self._places or ():
            place.wake()

    def open(self, state: BatchState | None, again: Callable[..., BatchState] | None = None, key: Any = None) -> None:
        """As of any runner; drops the graphs of the last state."""
        super().open(state)
        self._pool, device = None, self.recipe.model.device
        self.graphs = self.runtime.graphs and not adapted(self.recipe.model)
        if again is not None and device.type == "cuda" and self.runtime.compile == "none":
            from dinfer.speed.startup.kernel_compiler import KernelCompiler  # slow to import

            self.compiler = KernelCompiler(self.recipe, again, key)
        for held in (self.refused, self._seen, self._captured, self._seconds, self._wasted):
            held.clear()
        if state is None:
            self._places = None  # behind graphs and state
        if self.graphs and state is not None:
            extend_segments()
            self._replays = StepClock(device)
            self._pool = torch.cuda.graph_pool_handle() if self._places is None else self._places[1].pool.id

    def drop_graphs(self) -> None:
        """The next steps are captured anew."""
        self._captured.clear()

    @property
    def captured(self) -> int:
        """Number of graphs."""
        return len(self._captured)

    def run_as(self, shape: StepShape) -> StepShape:
        """The shape as which a step of `shape` runs now: its bucket, or a captured shape that stands in for it.

        Ranks may differ in what they have captured, since one of them may lack memory for a graph, and in how long that
        took. So rank 0 decides for all of them.
        """
        return self._present(self._bucket(shape)) if self.graphs else shape

    def launch(self, asked: StepShape, slots: list[int], run: StepShape | None = None) -> None:
        """As of any runner. `run` None: what `run_as` says, or what ranks without a leader all say alike."""
        kind = self._bucket(asked)
        if run is None and self.graphs:
            run = self._present(kind) if self.recipe.ranks.size == 1 else self._alike(kind)
        shape = run or asked
        met = shape in self._captured or shape in self.refused or (kind in self._seen and not self.graphs)
        self.meeting = None if met else shape
        try:
            super().launch(asked, slots, shape)
        finally:
            self.meeting = None
            self._seen[kind] += 1  # buckets, since the number of shapes has no bound

    def _bucket(self, shape: StepShape) -> StepShape:
        kv, canvas = self.state.kv, self.state.canvas
        return bucket(shape, kv.page, kv.table_NP.shape[1], canvas.capacity, self.recipe.model.spec.vocab)

    def _present(self, kind: StepShape) -> StepShape:
        """The bucket, or the captured shape that stands in for it."""
        if kind in self._captured or self.steady:
            return kind
        self._seconds.update(self._replays.read() if self._replays is not None else ())
        ready = self.compiler is None or self.compiler.ready(kind)
        price = median(self._captures) if self._captures and ready else math.inf
        other = stand_in(kind, self._captured, self._seconds, price)
        paid = self._seen[kind] >= WORTH or self._wasted[kind] >= price
        if ready and paid and kind not in self.refused and other.bare() != kind.bare():
            return kind
        if other != kind:
            self._wasted[kind] += in_vain(kind, other, self._seconds, 0)
        return other

    def _alike(self, kind: StepShape) -> StepShape:
        """As `_present`, but by nothing that was timed: ranks of other shapes would wait for each other for ever."""
        if kind in self._captured or self.steady:
            return kind
        bare = kind.bare()
        return stand_in(kind, [other for other in self._captured if other.bare() == bare], {}, 0.0)

    def run(self, shape: StepShape, lanes: list[int]) -> None:
        if self.meeting is not None and self.compiler is not None:
            self.compiler.compile(shape)
        captured = self._graph(self.state, shape) if self.graphs else None
        if captured is None:
            super().run(shape, lanes)
            return
        if captured.lanes != lanes:
            upload(captured.slot_B, torch.tensor(lanes))
            captured.lanes = lanes
        clock = None if captured.measured else self._replays
        captured.measured = True
        with nullcontext() if clock is None else clock.around(shape):
            captured.graph.replay()

    def _graph(self, state: BatchState, shape: StepShape) -> _Captured | None:
        """The graph of a shape that has come up before; None: run it eagerly."""
        if shape in self._captured:
            return self._captured[shape]
        if shape in self.refused or shape not in self._seen:
            return None
        began = time.perf_counter()
        try:
            self._captured[shape] = self._capture(state, shape)
            self._captures.append(time.perf_counter() - began)
        except RuntimeError as error:  # of CUDA; the request does not need the graph
            self.refused[shape] = str(error).strip().split("\n")[0]
            self._pool = torch.cuda.graph_pool_handle()  # CUDA may think that the old one is still being recorded
            logger.warning("%s runs eagerly, not as a CUDA graph: %s", shape, self.refused[shape])
            return None
        return self._captured[shape]

    def _capture(self, state: BatchState, shape: StepShape) -> _Captured:
        """Captures the step while every lane is scratch, so that neither warm-up nor capture changes a request."""
        device, scratch = state.canvas.tokens_NS.device, state.canvas.scratch
        slot_B = torch.full((shape.lanes,), scratch, dtype=torch.int64, device=device)
        self._side = side = self._side or torch.cuda.Stream(device)  # one, whose warm-ups share their memory
        side.wait_stream(torch.cuda.current_stream(device))
        graph, (free, total) = torch.cuda.CUDAGraph(), torch.cuda.mem_get_info(device)
        if free < SCARCE * total:  # `torch.cuda.graph` always does so, and waits for the device, too
            torch.cuda.empty_cache()
        with torch.cuda.stream(side), no_waiting():
            denoise_step(self.recipe, state, shape, slot_B)
        torch.cuda.current_stream(device).wait_stream(side)
        with torch.cuda.stream(side):
            # Other threads may use the device meanwhile, so the rules of a capture hold for this one only.
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                denoise_step(self.recipe, state, shape, slot_B)
            finally:
                graph.capture_end()
        return _Captured(graph, slot_B, [scratch] * shape.lanes)


def adapted(model: Any) -> bool:
    """Whether somebody put an adapter or a hook into a network of this package: a graph would not see it switched."""
    if not isinstance(model, nn.Module) or not type(model).__module__.startswith("dinfer."):
        return False
    ours = ("dinfer.", "torch.nn.modules.")
    return any(not untouched(one) or not type(one).__module__.startswith(ours) for one in model.modules())


@contextmanager
def no_waiting() -> Iterator[None]:
    """Raises RuntimeError if this thread has waited for the device, which would break a capture.

    Torch's switch is for the whole process. So it drops warnings about other threads.
    """
    thread, waits, before = threading.get_ident(), list[str](), torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        show = warnings.showwarning

        def heard(message: Warning | str, *place: Any, **more: Any) -> None:
            if "synchronizing" not in str(message):
                show(message, *place, **more)
            elif threading.get_ident() == thread:
                waits.append(str(message))

        warnings.showwarning = heard
        warnings.filterwarnings("always", ".*synchronizing")
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
    if waits:
        raise RuntimeError(waits[0])


_runners: WeakSet[GraphRunner] = WeakSet()


def drop_graphs() -> None:
    """Drops the graphs of all runners. A process cannot leave an NCCL group whose collectives a graph still holds."""
    for runner in [*_runners]:
        runner.drop_graphs()


def in_vain(shape: StepShape, other: StepShape, seconds: Mapping[StepShape, float], unknown: float) -> float:
    """The seconds that a step of the shape `other` takes for what one of `shape` does not compute.

    `seconds`: what is known of whole steps. `unknown`: what others are taken for.
    """
    return seconds.get(other, unknown) * (1 - shape.lanes * shape.width / (other.lanes * other.width))


def stand_in(
    shape: StepShape, captured: Iterable[StepShape], seconds: Mapping[StepShape, float], price: float
) -> StepShape:
    """The smallest captured shape that holds a step of this one, if there is one that does not cost too much.

    That is one which is hardly larger, or computes in vain for at most `price` seconds. Otherwise the shape itself.
    """

    def pays(other: StepShape) -> bool:
        hardly = other.lanes * other.width <= SPARE * shape.lanes * shape.width
        return hardly or in_vain(shape, other, seconds, math.inf) <= price

    able = [other for other in captured if other.holds(shape) and pays(other)]
    return min(able, key=lambda other: (other.lanes * other.width, other.pages), default=shape)


@lru_cache(maxsize=4096)
def bucket(shape: StepShape, page: int, table: int, capacity: int, vocab: int) -> StepShape:
    """The next larger shape of a small set. A row has at most `capacity` positions in `table` pages of `page`."""
    pages = min(power_of_2(-(-shape.pages * page // 128)) * 128 // page, table)
    grain = 64 if shape.width <= 1024 else 512
    wide = shape.width if shape.width <= 64 else min(-(-shape.width // grain) * grain, capacity)
    lanes = power_of_2(shape.lanes)
    if wide > 64:  # unused lanes are computed too
        grain = max(min(lanes // (8 if lanes > 8 else 4), 8), 1)
        lanes = -(-shape.lanes // grain) * grain
    elif shape.lanes > 8:
        grain = max(lanes // 32, 8)
        lanes = -(-shape.lanes // grain) * grain
    rounded = replace(shape, lanes=lanes, width=wide, pages=pages)
    extras = (extra.bucket(rounded, vocab) for extra in shape.extras)
    return replace(rounded, extras=tuple(extra for extra in extras if extra is not None))
