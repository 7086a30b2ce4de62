"""Generation cases with several blocks at once: the canvas after every step, and the forwards it took to get there.

A recorded run may go on behind what ends ours: blocks right of a stop token change nothing before it. Nor does a
forward of its own that only stores keys. So ours may end earlier, and take fewer forwards, never more. A prefill is not
counted: the references compute the prompt's keys in the first step.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from dinfer.core.engine.engine import Engine
from dinfer.core.engine.request import Request, Wants
from dinfer.core.engine.runtime import Runtime
from dinfer.core.registry import CACHES, DECODERS, ITERATIONS
from dinfer.core.step.cursors import Phase
from tests.parity.compare import at_most, same
from tests.parity.golden import Fields, Golden, GoldenError
from tests.parity.references import ReferenceRecipe, build

LIMITS = ("max_new_tokens_reached", "max_nfe_reached")  # the reference stopped before the answer was complete
Trail = list[tuple[list[int], int]]  # the canvas after each step that changed it, and the forwards so far


@dataclass(frozen=True, slots=True)
class Plan:
    """The components and settings that repeat a run of the goldens."""

    iteration: dict[str, Any]
    decoder: dict[str, Any]
    caches: tuple[Any, ...]  # the run is repeated with each
    new_tokens: int
    spec: dict[str, Any]  # what differs from the model's own `ModelSpec`
    sweep: dict[str, Any] = field(default_factory=dict)  # options that only the reference's iteration has
    rule: dict[str, Any] = field(default_factory=dict)  # and its decoder


def _diffulex(prompt: list[int], params: Fields, doc: Fields, decoder: dict[str, Any]) -> Plan:
    """Diffulex: blocks from position 0, of which a window is open; its length counts blocks that are not open yet."""
    if params.take("temperature"):
        raise GoldenError("Diffulex: only greedy cases are known")
    for name in ("page_size", "max_tokens", "max_nfe"):
        params.take(name, None)
    names = {"blocks": "buffer_size", "block": "block_size", "add_at": "add_block_threshold"}
    iteration = {ours: params.take(theirs) for ours, theirs in names.items()}
    stop = "off" if params.take("ignore_eos") else "block"
    iteration |= {"name": "multi_block", "reference": "diffulex", "align": True, "stop": stop}
    iteration |= {"force_at": params.take("semi_complete_threshold")}
    iteration |= {"stable_at": params.take("token_stability_threshold", 0.0)}
    block, end = iteration["block"], doc.take("decoded_end")
    new_tokens = end + block * iteration["blocks"] - len(prompt)
    return Plan(iteration, decoder, ("none", "block"), new_tokens, {"causal_block": block})


def _multi_bd(prompt: list[int], params: Fields, doc: Fields) -> Plan:
    decoder = {"name": "threshold", "reference": "diffulex", "threshold": params.take("accept_threshold")}
    return _diffulex(prompt, params, doc, decoder)


def _multi_bd_edit(prompt: list[int], params: Fields, doc: Fields) -> Plan:
    names = {"threshold": "accept_threshold", "edit_threshold": "edit_threshold", "post_edits": "max_post_edit_steps"}
    decoder = {"name": "joint_threshold", "reference": "diffulex", **{a: params.take(b) for a, b in names.items()}}
    plan = _diffulex(prompt, params, doc, decoder)
    return replace(plan, sweep={"forces": False})


def _dmax(prompt: list[int], params: Fields, doc: Fields) -> Plan:
    decoder = {"name": "dmax", "reference": "diffulex_decoder", "threshold": params.take("accept_threshold")}
    plan = _diffulex(prompt, params, doc, decoder)
    feed = {"name": "dmax", "rescale": params.take("token_merge_renormalize", True)}
    mode, top = params.take("token_merge_mode", "dmax_topk"), params.take("token_merge_top_k", None)
    if mode == "iter_smooth_topk":
        feed |= {"mix": "topk", "top": top, "weight": params.take("token_merge_weight")}
    fast = params.take("dmax_sampler_fast_path", True)
    return replace(
        plan, iteration=plan.iteration | feed, sweep={"forces": False, "fast": fast}, rule={"fast": fast},
        caches=("none", "block"),
    )  # fmt: skip


def _d2f(prompt: list[int], params: Fields, doc: Fields) -> Plan:
    """D2F. Blocks are unlimited there."""
    if params.take("temperature"):
        raise GoldenError("D2F: only greedy cases are known")
    block, names = params.take("block_size"), {"add_at": "block_add_threshold", "force_at": "decoded_token_threshold"}
    iteration = {ours: params.take(theirs) for ours, theirs in names.items()}
    iteration |= {"name": "multi_block", "blocks": 16, "block": block}
    decoder = {"name": "threshold", "reference": "d2f", "threshold": params.take("skip_threshold")}
    new_tokens, spec = params.take("max_new_tokens") // block * block, {"causal_block": block, "prompt_block": True}
    return Plan(
        iteration, decoder, ("none", "block"), new_tokens, spec, rule={"score": params.take("sampling_strategy")}
    )


def _lopa(prompt: list[int], params: Fields, doc: Fields) -> Plan:
    """LoPA over D2F. A present state that always wins, or is alone, is D2F."""
    scores = {"default": ("confidence", "default"), "margin": ("margin", "margin_confidence")}
    by, score = scores.get(params.text("sampling_strategy"), ("entropy", "neg_entropy"))
    branches, part, trust = (params.take(n) for n in ("branching_factor", "branch_topp", "selection_conf_alpha"))
    stays, races = params.take("branch_verification_mode"), params.take("base_branch_competition")
    alone = params.take("verification_force_base_winner") or (stays and not races)
    full = params.take("use_full_attention")
    given = {"algorithm": "d2f", "sampling_strategy": score}
    names = ("temperature", "block_size", "block_add_threshold", "decoded_token_threshold", "skip_threshold")
    given |= {name: params.take(name) for name in (*names, "max_new_tokens")}
    plan = _d2f(prompt, Fields(params.where, given), doc)
    race = {"branches": branches, "part": part, "trust": trust, "by": by, "stay": stays}
    plan = replace(plan, iteration=plan.iteration | ({} if alone else {"name": "lopa"} | race))
    if not full:
        return plan
    decoder = plan.decoder | {"reference": "lopa"}
    return replace(
        plan, decoder=decoder, caches=({"name": "none", "reference": "lopa"},), spec={},
        rule=plan.rule | {"blocks": plan.iteration["blocks"]},
    )  # fmt: skip


def _full_attention(prompt: list[int], params: Fields, doc: Fields) -> Plan:
    """d3LLM's rules without a cache, as SGLang has them: every row sees all masks; blocks say what may be written."""
    names = {"block": "block_length", "add_at": "block_add_threshold", "force_at": "decoded_token_threshold"}
    iteration = {ours: params.take(theirs) for ours, theirs in names.items()}
    iteration |= {"name": "multi_block", "force": "first", "stop": "off", "blocks": 16}
    decoder = {"name": "entropy_bound", "limits": "each", "bound": params.take("entropy_threshold")}
    return Plan(iteration, decoder, ("none",), params.take("gen_length"), {})


PLANS: dict[str, Callable[[list[int], Fields, Fields], Plan]] = {
    "d2f": _d2f,
    "lopa": _lopa,
    "diffulex_multi_bd": _multi_bd,
    "diffulex_multi_bd_edit": _multi_bd_edit,
    "diffulex_dmax": _dmax,
    "sglang_full_attn_multi_block": _full_attention,
}


def run(golden: Golden, doc: Fields) -> str:
    """Generates as the reference did; compares every step of every row."""
    prompts, params = doc.rows("prompt_ids", int), doc.fields("params")
    mask_id, eos_id = doc.take("mask_id"), doc.take("eos_id")
    plans = [PLANS[params.text("algorithm")](prompt, params, doc) for prompt in prompts]
    params.finish()
    runs = [
        (row, prompt, plan, cache)
        for row, (prompt, plan) in enumerate(zip(prompts, plans, strict=True))
        for cache in plan.caches
    ]
    for row, prompt, plan, cache in runs:
        network = copy.copy(golden.network(doc.text("model"), doc.text("family")))  # shares the weights
        network.spec = replace(network.spec, mask_id=mask_id, eos_id=eos_id, stop_ids=(eos_id,), **plan.spec)
        recipe = ReferenceRecipe(
            network,
            iteration=build(ITERATIONS, plan.iteration, **plan.sweep),
            decoder=build(DECODERS, plan.decoder, **plan.rule),
            cache=build(CACHES, {"name": cache} if isinstance(cache, str) else cache),
        )
        engine = Engine(recipe, Runtime(rows=1))
        blank = prompt + [mask_id] * plan.new_tokens
        want = recorded(doc, row, blank)
        most = len(want) if doc.take("finish", None) in LIMITS else len(want) + 1
        got, forwards = trail(engine, Request.behind(prompt, plan.new_tokens, recipe.resolve({})), blank, most)
        _compare(row, got, want, len(prompt), eos_id)
    return f"{forwards} forwards, reference {doc.take('num_forwards')}"


def trail(engine: Engine, request: Request, blank: list[int], most: int) -> tuple[Trail, int]:
    """What a run of ours did in at most so many steps that changed something, and its forwards."""
    found: Trail = []
    forwards, last = 0, blank
    for update in engine.run([request], Wants(snapshots=True)):
        forwards += update.phase != Phase.PREFILL
        if update.tokens is not None and update.tokens != last:
            last = update.tokens
            found.append((last, forwards))
            if len(found) == most:
                break
    return found, forwards


def recorded(doc: Fields, row: int, blank: list[int]) -> Trail:
    """What the reference's run did, a step a forward."""
    if "snapshots" in doc:
        canvases = [step[row] for step in doc.take("snapshots")]
    else:
        canvases, now = [], blank
        for turn in doc.items("rounds") if "rounds" in doc else ():
            branches, now = turn.items("branches"), now.copy()
            added = branches[turn.take("winner")].take("added")
            for position, token in [*turn.take("committed"), *([added] if added else [])]:
                now[position] = token
            canvases += [now] * len(branches)  # each was a forward
        for step in doc.items("steps") if "steps" in doc else ():
            now = now.copy()
            for position, *_, token in step.take("committed" if "committed" in step else "writes"):
                now[position] = token
            canvases.append(now)
    found: Trail = []
    for forwards, canvas in enumerate(canvases, 1):
        if canvas != (found[-1][0] if found else blank):
            found.append((canvas, forwards))
    return found


def _compare(row: int, got: Trail, want: Trail, prompt: int, eos_id: int) -> None:
    """Step by step, as far as ours goes; then the answer up to its stop token."""
    at_most(f"steps of row {row}", len(want), len(got))
    same(f"steps of row {row}", [canvas for canvas, _ in want[: len(got)]], [canvas for canvas, _ in got])
    for (_, theirs), (_, ours) in zip(want, got, strict=False):
        at_most(f"forwards of row {row}", theirs, ours)
    last, final = got[-1][0], want[-1][0]
    end = next((i + 1 for i in range(prompt, len(last)) if last[i] == eos_id), len(last))
    same(f"answer of row {row}", final[:end], last[:end])
