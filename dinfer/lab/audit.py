"""How far a recipe's cached logits are from those of a pass without a cache, at every step.

The recipe runs as it always does (`runtime.kv` included), one request at a time. Beside each of its forwards the
network computes the whole canvas once more, with the same input and without a cache. The positions that are still
masked are compared, since the step decides these.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dinfer.core.engine.engine import Engine
from dinfer.core.engine.request import Request, Update, Wants
from dinfer.core.engine.runtime import Runtime
from dinfer.core.kernels.attention import interval_mask
from dinfer.core.layers.transformer import WholeAttend
from dinfer.core.pipeline import Pipeline
from dinfer.core.registry import CACHES
from dinfer.core.step.ability import Step
from dinfer.core.step.contracts import Phase
from dinfer.core.step.cursors import Status
from dinfer.core.step.mixins import Feeds, scores_of
from dinfer.core.step.model import Attend
from dinfer.core.step.shape import StepShape
from dinfer.core.step.step import seen
from dinfer.core.step.window import exact

EQUAL = 1e-9  # nats; a plot shows less as this much, since it is rounding


@dataclass(frozen=True, slots=True)
class Sample:
    """One step of one request. Divergences are in nats, KL(without cache || with cache), over the masked positions."""

    request: int
    forward: int  # from 1
    block: int  # from 0
    step: int  # in the block, from 0
    full: bool  # the step was a pass over the whole canvas
    masked: int  # positions compared
    kl: float  # mean
    kl_worst: float
    top1: float  # share of positions where the most likely token is the same
    committed: int
    agreed: int  # committed tokens that are the most likely ones without the cache, the mask token left out


@dataclass(frozen=True, slots=True)
class Audit:
    """All steps, and what became of the answers."""

    recipe: dict[str, str]
    exact: bool  # what the cache says of itself for this model's attention
    samples: list[Sample]
    same_tokens: float  # share of generated tokens equal to those of the recipe with cache=none

    @property
    def overall(self) -> dict[str, float]:
        """Means over all steps, weighted by the positions that each compared."""
        return _pooled(self.samples)

    def by(self, key: Callable[[Sample], int]) -> dict[int, dict[str, float]]:
        """The means for each value of a field, such as `lambda s: s.block`."""
        groups: dict[int, list[Sample]] = {}
        for sample in self.samples:
            groups.setdefault(key(sample), []).append(sample)
        return {value: _pooled(group) for value, group in sorted(groups.items())}

    def write(self, path: Path) -> None:
        """The numbers as JSON; raises OSError."""
        found = {
            "recipe": self.recipe,
            "exact": self.exact,
            "overall": self.overall,
            "same_tokens": self.same_tokens,
            "by_block": self.by(lambda s: s.block),
            "by_step": self.by(lambda s: s.step),
            "samples": [asdict(sample) for sample in self.samples],
        }
        path.write_text(json.dumps(found, indent=1) + "\n")


class Watched:
    """A model that keeps the positions its last forward computed, and the logits that it gave if it was asked."""

    def __init__(self, model: Any) -> None:
        self.model, self.spec = model, model.spec
        self.pos_W = torch.empty(0, dtype=torch.int64)
        self.logits_XLV: Tensor | None = None
        self.before: Callable[[], None] | None = None  # called when a forward begins

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def forward(self, x_BWD: Tensor, attend: Attend) -> Tensor:
        if self.before is not None:
            self.before()
        self.pos_W, self.logits_XLV = attend.pos_BW[0], None
        return self.model.forward(x_BWD, attend)

    def logits(self, h_BLD: Tensor) -> Tensor:
        logits_XLV = self.model.logits(h_BLD)
        self.logits_XLV = logits_XLV.clone()  # the step takes tokens out of its own in place
        return logits_XLV


def check_ranks(count: int) -> None:
    """Raises ValueError for a model on several ranks."""
    if count > 1:
        raise ValueError("an audit compares whole logits, which one rank does not have: use runtime.tensor_parallel=1")


def audit(pipe: Pipeline, prompts: Sequence[Sequence[int]], *, max_new_tokens: int | Sequence[int]) -> Audit:
    """Runs the pipeline's recipe on prompts of token ids and compares every step. Raises as `generate_ids` does."""
    requests = [replace(request, padding=0) for request in pipe.requests(prompts, max_new_tokens, None)]
    recipe, kv = pipe.recipe, pipe.engine.runtime.kv
    check_ranks(recipe.ranks.size)
    watch = Watched(recipe.model)
    # One row at a time, so that a step is one forward, and slot 0 is the one.
    engine = Engine(replace(recipe, model=watch), Runtime(rows=1, kv=kv))
    plain = Engine(replace(recipe, cache=CACHES.build("none")), Runtime(rows=1))
    samples: list[Sample] = []
    same = total = 0
    for index, request in enumerate(requests):
        canvas: list[int] = []
        for sample, update in _steps(engine, watch, index, request):
            samples += [] if sample is None else [sample]
            canvas = update.completion.canvas if update.completion else canvas
        uncached = next(u.completion.canvas for u in plain.run([request]) if u.completion is not None)
        answer = slice(request.start, None)
        same += sum(a == b for a, b in zip(canvas[answer], uncached[answer], strict=True))
        total += request.length - request.start
    parts = {"iteration": recipe.iteration, "decoder": recipe.decoder, "cache": recipe.cache}
    names = {kind: repr(part) for kind, part in parts.items()}
    spec = recipe.model.spec
    faithful = exact(recipe.cache, spec.attention_layout, recipe.alignment)
    if kv != "model":
        names["cache"], faithful = f"{names['cache']} with runtime.kv={kv}", False
    return Audit({"model": recipe.model.spec.family, **names}, faithful, samples, same / max(total, 1))


def _steps(engine: Engine, watch: Watched, index: int, request: Request) -> Iterator[tuple[Sample | None, Update]]:
    """The steps of one request: the engine's update, and what it shows, if anything was masked."""
    true_SV: Tensor | None = None
    masked_S: Tensor | None = None

    def before() -> None:
        nonlocal true_SV, masked_S
        true_SV, masked_S = _uncached(engine, watch.model, request.length)

    watch.before = before
    block, step, region = -1, 0, (-1, -1)
    for update in engine.run([request], Wants(snapshots=True)):
        sample = None
        decides = update.phase != Phase.VERIFY  # the pass over a draft sees other things than a denoise step
        if decides and watch.logits_XLV is not None and true_SV is not None and masked_S is not None:  # not a prefill
            block, step = (block, step + 1) if update.region == region else (block + 1, 0)
            region = start, end = update.region
            pos_X = torch.arange(start, end, device=masked_S.device)[masked_S[start:end]]
            if len(pos_X):
                mine_XV = _cached(watch, watch.logits_XLV, pos_X, start, scores_of(engine.recipe.iteration))
                true_XV = true_SV[_row(watch, pos_X)]
                sample = _sample(index, update, block, step, pos_X, true_XV, mine_XV, watch.spec.mask_id)
        yield sample, update


def _uncached(engine: Engine, model: Any, length: int) -> tuple[Tensor, Tensor]:
    """Logits of the whole canvas as it is, fed what the iteration feeds; and which positions are masked."""
    iteration, state = engine.recipe.iteration, engine.runner.state
    slot_B = torch.zeros(1, dtype=torch.int64, device=model.device)
    pos_BT = torch.arange(length, device=slot_B.device)[None]
    tokens_BT, status_BT = state.canvas.gather(slot_B, pos_BT)
    shape = StepShape(Phase.FULL, 1, length, engine.recipe.iteration.blocks, state.block, 1)
    step = Step.of(engine.recipe, state, shape, slot_B)
    lanes = step.lanes
    x_BTD = (
        iteration.embed(model, tokens_BT, pos_BT, lanes, step.iteration_state) if isinstance(iteration, Feeds)
        else model.embed(tokens_BT)
    )  # fmt: skip
    interval, near, context_BT = seen(step, lanes, pos_BT)
    local = () if model.spec.local is None else model.spec.local.layers
    attend = WholeAttend(
        pos_BT, interval_mask(*interval, length), context_BT, local, near and interval_mask(*near, length)
    )
    logits_BTV = model.logits(model.forward(x_BTD, attend))
    there_BT = pos_BT < lanes.length_B[:, None]  # decoders that grow leave the rest of the canvas for later
    return logits_BTV[0], ((status_BT == int(Status.OPEN)) & there_BT)[0]


def _row(watch: Watched, pos_X: Tensor) -> Tensor:
    """Where the logits of positions are: one to the left where they predict the next token."""
    return (pos_X - watch.spec.shift).clamp_min(0)


def _cached(watch: Watched, logits_XLV: Tensor, pos_X: Tensor, start: int, scores: str) -> Tensor:
    """The logits that the step saw at these positions: of the active blocks, or of the whole window. [X, V]"""
    if scores != "window":
        return logits_XLV.flatten(0, 1)[pos_X - start]
    found_XW = watch.pos_W[None, :] == _row(watch, pos_X)[:, None]
    return logits_XLV[0][found_XW.to(torch.int64).argmax(-1)]


def _sample(
    index: int, update: Update, block: int, step: int, pos_X: Tensor, true_XV: Tensor, mine_XV: Tensor,
    mask_id: int | None,
) -> Sample:  # fmt: skip
    true_XV, mine_XV = true_XV.double(), mine_XV.double()
    log_true_XV, log_mine_XV = true_XV.log_softmax(-1), mine_XV.log_softmax(-1)
    gap_XV = torch.where(log_true_XV.isfinite(), log_true_XV - log_mine_XV, 0.0)
    kl_X = (log_true_XV.exp() * gap_XV).sum(-1).clamp_min(0)
    top1_X = true_XV.argmax(-1) == mine_XV.argmax(-1)
    token_XV = true_XV.clone()
    if mask_id is not None:
        token_XV[:, mask_id] = float("-inf")
    best = dict(zip(pos_X.tolist(), token_XV.argmax(-1).tolist(), strict=True))
    tokens, masked = update.tokens or [], update.masked or []
    commits = [p for p in best if not masked[p]]
    return Sample(
        request=index, forward=update.forwards, block=block, step=step, full=update.full, masked=len(best),
        kl=float(kl_X.mean()), kl_worst=float(kl_X.max()), top1=float(top1_X.double().mean()),
        committed=len(commits), agreed=sum(tokens[p] == best[p] for p in commits),
    )  # fmt: skip


def _pooled(samples: Sequence[Sample]) -> dict[str, float]:
    masked, committed = sum(s.masked for s in samples), sum(s.committed for s in samples)
    return {
        "steps": len(samples),
        "kl": sum(s.kl * s.masked for s in samples) / max(masked, 1),
        "kl_worst": max((s.kl_worst for s in samples), default=0.0),
        "top1": sum(s.top1 * s.masked for s in samples) / max(masked, 1),
        "committed_agreement": sum(s.agreed for s in samples) / committed if committed else 1.0,
    }


def plot(audit: Audit, path: Path) -> None:
    """Divergence and agreement by step of a block and by block, as PNG. Raises ImportError without matplotlib."""
    from matplotlib.figure import Figure  # an extra; needs no display
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(10, 6), layout="constrained")
    axes = figure.subplots(2, 2, sharex="col")
    for column, (name, means) in enumerate(
        (("step in the block", audit.by(lambda s: s.step)), ("block", audit.by(lambda s: s.block)))
    ):
        above, below = axes[0][column], axes[1][column]
        places = list(means)
        above.plot(places, [max(m["kl"], EQUAL) for m in means.values()], marker=".", label="mean")
        above.plot(places, [max(m["kl_worst"], EQUAL) for m in means.values()], ls=":", label="worst")
        above.set_yscale("log")
        above.set_ylim(bottom=EQUAL / 2)
        above.set_ylabel("KL(without || with cache), nats")
        for key, label in (("top1", "most likely token"), ("committed_agreement", "committed tokens")):
            below.plot(places, [m[key] for m in means.values()], marker=".", label=label)
        below.set_ylim(-0.05, 1.05)
        below.set_ylabel("share that agrees")
        below.set_xlabel(name)
        below.xaxis.set_major_locator(MaxNLocator(integer=True))
        above.legend()
        below.legend()
    figure.suptitle(f"{audit.recipe['cache']}\n{audit.recipe['decoder']}", fontsize=9)
    figure.savefig(path, dpi=120)
