"""Decoder cases: one block, the reference's logits of every step, the block after every step.

Every step is the real `denoise_step`, of a recipe whose model is scripted. A row that is done stays as it is, also
where the reference keeps stepping it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from dinfer.core.memory import PoolSize
from dinfer.core.recipe.recipe import Recipe
from dinfer.core.registry import CACHES, DECODERS, SAMPLINGS, values_of
from dinfer.core.step.contracts import BlockView, Decoder, Proposal, State, TokenStats
from dinfer.core.step.cursors import Phase, Status
from dinfer.core.step.model import Sampling
from dinfer.core.step.request import Request
from dinfer.core.step.shape import StepShape
from dinfer.core.step.state import BatchState, Entry
from dinfer.core.step.step import denoise_step
from tests.parity.compare import same
from tests.parity.golden import Case, Fields, Golden, GoldenError, Skip, need
from tests.parity.kinds.uniform import Recorded, renoise
from tests.parity.references import ReferenceRecipe, build
from tests.parity.scripted import ScriptedModel, ScriptedSweep

PAGE = 16


@dataclass(frozen=True, slots=True)
class Rule:
    """The decoder and settings that repeat a decoder case of the goldens."""

    config: dict[str, Any]  # name and options of the decoder; `reference`: whose rule it has, see `references`
    decay: float | None = None  # the least confidence is 1 - step * decay as long as that is above the threshold
    # Which positions are given: the first so many, all but the masked ones, or all before the first masked one.
    given: int | Literal["unmasked", "prefix"] = "unmasked"
    # What the reference's flags `done` mean; "idle by": it may say so later.
    done: Literal["unmasked before", "idle after", "idle by"] = "unmasked before"
    part: int | None = None  # so many positions are decoded before the next; None: all together
    shift: int = 0  # logits predict the token so many positions to the right
    first: int | None = None  # what stands at position 0, if that is masked


def renamed(name: str, names: dict[str, str], **fixed: Any) -> Callable[[Fields], Rule]:
    """A decoder whose options have other names in the goldens, theirs -> ours, beside those that are fixed."""

    def rule(params: Fields) -> Rule:
        return Rule({"name": name, **{ours: params.take(theirs) for theirs, ours in names.items()}, **fixed})

    return rule


def _dinfer_threshold(params: Fields) -> Rule:
    precision = "float64" if params.take("use_float64", False) else "float32"
    config = {"name": "threshold", "threshold": params.take("threshold"), "precision": precision, "reference": "dinfer"}
    return Rule(config, decay=params.take("iter_threshold_decay", None))


def _credit(params: Fields) -> Rule:
    names = {"threshold": "threshold", "credit_alpha": "alpha", "boost_gamma": "gamma", "decay_beta": "decay"}
    config = {ours: params.take(theirs) for theirs, ours in names.items()}
    return Rule({"name": "credit", "reference": "dinfer", **config}, decay=params.take("iter_threshold_decay", None))


def _hierarchy(params: Fields, ties: str) -> Rule:
    # null: no such rule. No probability is above 1, and all are above 0.
    config = {name: params.take(name) for name in ("threshold", "low_threshold")}
    absent = {"threshold": 1.0, "low_threshold": 0.0}
    config = {name: absent[name] if value is None else value for name, value in config.items()}
    return Rule({"name": "hierarchical", "ties": ties, **config})


def _remasking(params: Fields) -> Rule:
    config = {name: params.take(name) for name in ("threshold", "low_threshold", "remask_threshold")}
    return Rule({"name": "remasking", **config}, given=0)


def _joint_threshold(params: Fields) -> Rule:
    names = {
        "threshold": "threshold", "edit_threshold": "edit_threshold", "max_post_edit_steps": "post_edits",
        "penalty_lambda": "penalty",
    }  # fmt: skip
    config = {ours: params.take(theirs) for theirs, ours in names.items()}
    given: dict[str, Any] = {"derived": "unmasked", "first2": 2}
    config |= {"name": "joint_threshold", "reference": "sglang"}
    return Rule(config, given=given[params.take("prompt")], done="idle after")


def _hierarchy_block(params: Fields) -> Rule:
    """Parts of a block one after the other, as `block_diffusion` has them where the attention block is longer."""
    config = {"name": "threshold", "threshold": params.take("threshold"), "reference": "sglang"}
    part, shift, first = params.take("sub_block_size"), params.take("token_shift"), params.take("inherited", None)
    return Rule(config, part=part, shift=shift, first=first)


def _renoise(params: Fields) -> Rule:
    return Rule(renoise(params), given=0, done="idle after")


def _insert_delete(params: Fields) -> Rule:
    params.take("block_length")  # of the sequence, too
    prompt: str = params.take("prompt")
    given: Any = "prefix" if prompt == "derived" else int(prompt.removeprefix("first"))
    return Rule(insert_delete(params), given=given, done="idle by")


def insert_delete(params: Fields) -> dict[str, Any]:
    """The decoder of insertions and deletions, of decoder cases and of generations."""
    names = {"threshold": "threshold", "edit_threshold": "edit_threshold", "max_post_edit_steps": "post_edits"}
    return {"name": "insert_delete"} | {ours: params.take(name) for name, ours in names.items()}


# Decoder of the goldens -> rule. Whoever adds a decoder adds an entry here.
TRANSLATIONS: dict[str, Callable[[Fields], Rule]] = {
    "dinfer_threshold": _dinfer_threshold,
    "dinfer_minimal_topk": renamed("threshold", {"threshold": "threshold", "minimal_topk": "least"}),
    "fastdllm_threshold": renamed("threshold", {"threshold": "threshold"}, precision="float64"),
    "fixed_steps_low_confidence": renamed("fixed", {"steps": "steps"}, precision="float64"),
    "sglang_low_confidence": renamed("threshold", {"threshold": "threshold"}, reference="sglang"),
    "dinfer_credit": _credit,
    "dinfer_hierarchy": partial(_hierarchy, ties="all"),
    "dinfer_hierarchy_fast_v2": partial(_hierarchy, ties="first"),
    "dinfer_hierarchy_remask": _remasking,
    "fastdllm_factor": renamed("factor", {"factor": "factor"}, reference="fastdllm"),
    "sglang_joint_threshold": _joint_threshold,
    "sglang_eb_sampling": renamed("entropy_bound", {"gamma": "bound"}, suppress_mask=True, precision="float64"),
    "sglang_entropy_threshold": renamed("entropy_bound", {"threshold": "bound"}, limits="each"),
    "sglang_hierarchy_block": _hierarchy_block,
    "sglang_gemma4_renoise": _renoise,
    "sglang_joint_threshold_indel": _insert_delete,
}


def translate(decoder: str, params: Fields) -> Rule:
    """The rule for a decoder of the goldens. Raises Skip if dinfer does not have it, or not with these parameters."""
    if decoder not in TRANSLATIONS:
        raise Skip(f"golden decoder {decoder!r} has no translation yet")
    rule = TRANSLATIONS[decoder](params)
    params.finish()
    need(DECODERS, rule.config["name"])
    return rule


FILES = "decoders/*.json"


def takes(doc: Fields) -> bool:
    return True


def cases(golden: Golden, path: Path, doc: Fields) -> Iterator[Case]:
    """The cases of one decoder; the file that only describes the sequences has none."""
    if "sequences" not in doc:
        for case in doc.items("cases"):
            yield Case(f"{golden.name(path)}/{case.take('case')}", partial(run, golden, path, doc, case))


def run(golden: Golden, path: Path, doc: Fields, case: Fields) -> str:
    """Steps the block as often as the reference did, and compares it after each step."""
    decoder, params = doc.take("decoder"), case.fields("params")
    params.where = f"decoder {decoder!r}"  # one reason for all cases that lack the same
    rule = translate(decoder, params)
    sequences, name = inputs(path, doc.take("sequences_file", "sequences")), case.take("sequence")
    logits_SBLV, x0_BL = golden.tensors(sequences, f"{name}.logits", f"{name}.x0")
    if (row := case.take("row", None)) is not None:
        logits_SBLV, x0_BL = logits_SBLV[:, row : row + 1], x0_BL[row : row + 1]
    (want_SBL,) = golden.tensors(path.with_suffix(".safetensors"), f"{case.take('case')}.tokens")
    if want_SBL.shape[1:] != x0_BL.shape or len(want_SBL) > len(logits_SBLV):
        raise GoldenError(f"tokens of shape {tuple(want_SBL.shape)} do not fit logits {tuple(logits_SBLV.shape)}")
    done_SB = case.take("done", None)
    if done_SB is not None and len(done_SB) != len(want_SBL):
        raise GoldenError(f"done has {len(done_SB)} steps, tokens has {len(want_SBL)}")
    (batch, length), following = x0_BL.shape, case.take("next_inherited_token", None)
    sampling: Sampling = SAMPLINGS.build("standard")
    mask_id = doc.take("mask_id")
    if "random_canvas" in case:  # of a model without a mask token
        sampling, mask_id = Recorded(canvas_XBC=golden.tensor(random_canvases(case, x0_BL))), None
    elif rule.shift:  # the last logits predict the first position behind the block
        x0_BL = torch.nn.functional.pad(x0_BL, (0, 1), value=mask_id)
    moving = {f"{name}_id": doc.take(f"{name}_token_id", None) for name in ("delete", "split")}
    model = ScriptedModel(logits_SBLV, mask_id=mask_id, eos_id=doc.take("eos_id"), shift=rule.shift, **moving)
    flags = f"{case.take('case')}.original_mask"
    original_SBL = golden.tensors(path.with_suffix(".safetensors"), flags)[0] if "post_edit_steps" in case else None
    recipe, state = begin(model, rule, x0_BL, sampling)
    slot_B = torch.arange(batch, device=golden.device)
    shape = StepShape(Phase.FULL, batch, x0_BL.shape[1], 1, state.block, -(-x0_BL.shape[1] // PAGE))

    def step(s: int) -> list[list[int]]:
        model.step = s
        denoise_step(recipe, state, shape, slot_B)
        return state.canvas.tokens_NS[:batch, : x0_BL.shape[1]].tolist()

    for s, want_BL in enumerate(want_SBL):
        open_BL = state.canvas.status_NS[:batch, :length] == int(Status.OPEN)
        same(f"step {s}: tokens", want_BL.tolist(), [row[:length] for row in step(s)])
        if done_SB is not None:
            idle_B = state.canvas.lanes(slot_B, Phase.IDLE).live_B
            done_B = ~open_BL.any(-1) if rule.done == "unmasked before" else idle_B
            told_B = golden.tensor(done_SB[s])
            same(f"step {s}: done", done_SB[s], (done_B & told_B if rule.done == "idle by" else done_B).tolist())
        if original_SBL is not None:
            kept = state.decoder.rows
            same(f"step {s}: original masks", original_SBL[s].bool().tolist(), kept["original"][:batch].tolist())
            same(f"step {s}: steps of editing", case.take("post_edit_steps")[s], kept["post"][:batch].tolist())
    if rule.shift and following is not None:
        same("next_inherited_token", following, step(len(want_SBL))[0][length])
    return f"{len(want_SBL)} steps"


def inputs(path: Path, stem: str) -> Path:
    """The file of the logits: beside the cases, or in the folder `goldens` beside theirs, which later sets build on."""
    name = f"{stem}.safetensors"
    for folder in (path.parent, path.parents[2] / "goldens" / "decoders"):
        if (folder / name).is_file():
            return folder / name
    raise Skip(f"decoders/{name} is neither in this folder nor in ../goldens")


def random_canvases(case: Fields, x0_BL: Tensor) -> list[list[list[int]]]:
    """What open positions hold at first, and after each step; of rows that are done, anything. X, B, L."""
    blank = x0_BL[0].tolist()
    canvases = [case.take("initial_canvas"), *case.take("random_canvas")]
    return [[blank if row is None else row for row in canvas] for canvas in canvases]


def unforced(decoder: Any) -> Decoder:
    """The decoder as if every row had to progress, and free to mask again what it likes, as the references do."""

    class Unforced(type(decoder)):  # type: ignore[misc]
        def select(self, stats: TokenStats, view: BlockView, state: State) -> Proposal:
            found = super().select(stats, replace(view, must_progress_R=None), state)
            return replace(found, edit=replace(found.edit, retry_R=torch.ones_like(view.masked_RL[:, 0])))

    return Unforced(**values_of(decoder))


def begin(model: ScriptedModel, rule: Rule, x0_BL: Tensor, sampling: Sampling) -> tuple[Recipe, BatchState]:
    """A recipe, and a batch in which every row is the block at the start."""
    (batch, length), mask_id = x0_BL.shape, model.spec.mask_id
    sweep = ScriptedSweep(block=rule.part or length, align=True, stop="off", decay=rule.decay)
    recipe = ReferenceRecipe(model, sweep, unforced(build(DECODERS, rule.config)), CACHES.build("none"), sampling)
    pages = -(-length // PAGE)
    state = BatchState.alloc(
        recipe, PoolSize(batch, length, batch * pages, PAGE), dtype=model.dtype, device=model.device
    )  # fmt: skip
    masked_BL = torch.ones_like(x0_BL, dtype=torch.bool) if mask_id is None else x0_BL == mask_id
    if rule.first is not None:
        x0_BL, masked_BL = x0_BL.clone(), masked_BL.clone()
        x0_BL[:, 0] = torch.where(masked_BL[:, 0], rule.first, x0_BL[:, 0])
        masked_BL[:, 0] = False
    place_L = torch.arange(length, device=x0_BL.device)
    for slot in range(batch):
        if isinstance(rule.given, int):
            given_L = place_L < rule.given
        else:
            given_L = ~masked_BL[slot] if rule.given == "unmasked" else masked_BL[slot].cumsum(0) == 0
        masked_L = masked_BL[slot] & ~given_L
        options = recipe.resolve({"seed": slot})
        state.admit(recipe, [Entry(slot, Request(x0_BL[slot].tolist(), masked_L.tolist(), options, first=0))])
        state.canvas.status_NS[slot, :length][~given_L & ~masked_BL[slot]] = int(Status.DONE)
    return recipe, state
