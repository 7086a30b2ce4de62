"""Generation cases: whole runs of the engine. Token ids must be equal, and forwards no more than the reference's."""

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dinfer.core.engine.engine import Engine
from dinfer.core.engine.request import Wants
from dinfer.core.engine.runtime import Runtime
from dinfer.core.recipe.recipe import Recipe
from dinfer.core.registry import CACHES, DECODERS, ITERATIONS
from tests.parity import causal, multi_block
from tests.parity.compare import at_most, same
from tests.parity.golden import Case, Fields, Golden, GoldenError, Skip, need
from tests.parity.plans import ALGORITHMS, FURTHER, Plan
from tests.parity.references import ReferenceRecipe, build

FILES = "generation/**/*.json"


def takes(doc: Fields) -> bool:
    return "algorithm" in doc.fields("params")


def cases(golden: Golden, path: Path, doc: Fields) -> Iterator[Case]:
    several = doc.fields("params").text("algorithm") in multi_block.PLANS
    yield Case(golden.name(path), partial(multi_block.run if several else run, golden, doc))


@dataclass(frozen=True, slots=True)
class Found:
    """What our run of some prompts did: canvases with the prompt and its padding, by row."""

    rows: list[list[int]]
    forwards: list[int]
    trail: list[list[list[int]]]  # the canvas after each step
    computed: list[list[int]] = field(default_factory=list)  # positions of each forward, of a single row


def run(golden: Golden, doc: Fields) -> str:
    """Generates as the reference did; compares the tokens of every row, and the forwards of the longest."""
    golden.family(doc.text("model"), doc.text("family"))
    prompts, mask_id = doc.rows("prompt_ids", int), doc.take("mask_id")
    plan = _plan(prompts, doc)
    if any(mask_id in prompt for prompt in prompts):
        raise Skip("prompts that hold mask tokens are not there yet")
    with TemporaryDirectory() as scratch:
        found = generated(golden, doc, plan, prompts, Path(scratch))
    if plan.computed:
        everything = [*range(len(prompts[0]) + plan.new_tokens)]
        want = [everything if step["computed"] is None else step["computed"] for step in doc.take("steps")]
        same("positions of each forward", want, found.computed)
    if plan.every_step:
        for row, prompt in enumerate(prompts):
            _same_steps(doc, plan, found, row, snapshots(doc, row, prompt + [mask_id] * plan.new_tokens))
    _same_answers(doc, plan, prompts, found.rows)
    forwards = (doc.fields("without_drafts") if plan.further else doc).take("num_forwards")
    at_most("num_forwards", forwards + plan.spare, max(found.forwards))
    return f"{max(found.forwards)} forwards, reference {forwards}"


def generated(golden: Golden, doc: Fields, plan: Plan, prompts: list[list[int]], scratch: Path) -> Found:
    """Runs the plan. `scratch`: a folder for files that components read."""
    pads_B = plan.pads_B or [0] * len(prompts)
    bare = [prompt[pad:] for prompt, pad in zip(prompts, pads_B, strict=True)]
    pads = [prompt[:pad] for prompt, pad in zip(prompts, pads_B, strict=True)]
    found = Found([[] for _ in bare], [0 for _ in bare], [[] for _ in bare])
    recipe = _recipe(golden, doc, plan, bare, scratch, found.computed)
    mask_id = doc.take("mask_id")
    requests = [
        plan.request(prompt, mask_id, recipe.resolve(plan.options | {"seed": row})) for row, prompt in enumerate(bare)
    ]
    engine = Engine(recipe, Runtime(rows=len(requests), speculate=plan.speculate))
    for update in engine.run(requests, Wants(snapshots=plan.keep_masks or plan.every_step)):
        row, pad = update.index, pads[update.index]
        if plan.every_step:
            found.trail[row].append(pad + (update.tokens or []))
        if update.completion is not None:
            canvas = update.tokens if plan.keep_masks else update.completion.canvas
            found.rows[row] = pad + (canvas or [])
            found.forwards[row] = update.completion.counts.forwards
    return found


def _recipe(
    golden: Golden, doc: Fields, plan: Plan, bare: list[list[int]], scratch: Path, computed: list[list[int]]
) -> Recipe:
    """The network with the plan's components. Its forwards note in `computed` which positions they compute."""
    network = copy.copy(golden.network(doc.text("model"), doc.text("family"), plan.adapted))  # shares the weights
    eos_id = doc.take("eos_id")  # None: the reference knows of none, and the plan minds none
    ids = {"mask_id": doc.take("mask_id")} | ({} if eos_id is None else {"eos_id": eos_id, "stop_ids": (eos_id,)})
    network.spec = replace(network.spec, **ids, **plan.spec)
    if not all(0 <= token < network.spec.vocab for prompt in bare for token in prompt):
        raise GoldenError(f"{doc.where}: prompt_ids must be tokens of the model's vocabulary of {network.spec.vocab}")
    if plan.wraps is not None:
        network.forward = plan.wraps(network)
    if plan.computed:
        network.forward = heard(network.forward, computed)
    options = dict(plan.decoder)
    if "token_counts" in doc:
        (scratch / "token_counts.json").write_text(json.dumps(doc.take("token_counts")))
        options["frequencies"] = str(scratch / "token_counts.json")
    decoder = build(DECODERS, options) if plan.drawn is None else plan.drawn(options, doc, bare, plan.new_tokens)
    if plan.swept is not None:
        iteration = plan.swept(plan.iteration, doc)
    else:
        iteration = build(ITERATIONS, plan.iteration, **plan.sweep)
    sampling = {} if plan.sampled is None else {"sampling": plan.sampled(doc)}
    return ReferenceRecipe(network, iteration, decoder, build(CACHES, plan.cache), **sampling)


def _same_steps(doc: Fields, plan: Plan, found: Found, row: int, want: list[list[int]]) -> None:
    """The canvas after each step that changed it. `want`: that of the reference, with the one before the first step."""
    got = found.trail[row]
    if not plan.grows:
        changes, ours = (
            [now for last, now in pairwise(canvases) if now != last] for canvases in (want, [want[0], *got])
        )
        same(f"steps of row {row}", changes, ours)
        return
    got, want = got[1 - len(want) :], want[1:]  # until the length is fixed, no step changes what exists
    beyond = {token for ours, theirs in zip(got, want, strict=True) for token in ours[len(theirs) :]}
    same(f"tokens behind the end of row {row}", [doc.take("eos_id")] * len(beyond), [*beyond])
    same(f"steps of row {row}", want, [ours[: len(theirs)] for ours, theirs in zip(got, want, strict=True)])
    found.rows[row] = found.rows[row][: len(want[-1])]


def _same_answers(doc: Fields, plan: Plan, prompts: list[list[int]], rows: list[list[int]]) -> None:
    """The canvases at the end, and what the reference returned."""
    eos_id = doc.take("eos_id")
    if (limit := plan.new_tokens if plan.cut else plan.answer) is not None:
        rows = [answer(row, len(prompt), limit, eos_id) for row, prompt in zip(rows, prompts, strict=True)]
    if doc.take("final_array", None) is not None:
        same("final_array", doc.take("final_array"), rows)
    if plan.answer is not None or plan.response:
        rows = [row[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)]
    if plan.drop_eos and len(rows) == 1:
        rows = [[token for token in rows[0] if token != eos_id]]
    if plan.filled or plan.padded_with is not None:
        fill = eos_id if plan.padded_with is None else plan.padded_with
        rows = [row + [fill] * (max(map(len, rows)) - len(row)) for row in rows]
    want = doc.take("output_ids")
    if plan.left:
        want = [row[pad:] for row, pad in zip(want, doc.take("left_pads"), strict=True)]
        rows = [row[: len(told)] for row, told in zip(rows, want, strict=True)]
    same("output_ids", want, rows)


def heard(forward: Callable[..., Any], computed: list[list[int]]) -> Callable[..., Any]:
    """A forward that notes which positions it computes."""

    def noted(x_BWD: Any, attend: Any) -> Any:
        computed.append([pos for pos in attend.pos_BW[0].tolist() if pos >= 0])
        return forward(x_BWD, attend)

    return noted


def snapshots(doc: Fields, row: int, before: list[int]) -> list[list[int]]:
    """The canvas of a row before the first step and after each, from the snapshots or from what each step committed."""
    if "snapshots" in doc:
        return [before, *(snapshot[row] for snapshot in doc.take("snapshots"))]
    if "snapshots_before_each_forward" in doc:
        canvases = [*doc.take("snapshots_before_each_forward"), doc.take("final_array")]
        return [canvas[row] for canvas in canvases]
    found = [before]
    for block in doc.items("blocks") if "blocks" in doc else ():
        start = block.take("start")
        for tokens in (*block.take("inputs"), block.take("result")):
            found.append(found[-1][:start] + tokens + found[-1][start + len(tokens) :])
    for step in doc.items("steps") if "steps" in doc else ():
        found.append(found[-1].copy())
        first = step.take("block") * len(step.take("input")) if "written" in step else 0
        for position, token in step.take("written" if "written" in step else "committed"):
            found[-1][first + position] = token
    return found


def answer(row: list[int], prompt: int, limit: int, eos_id: int) -> list[int]:
    """The prompt and at most `limit` tokens behind it, the last one the first EOS among them."""
    end = next((i + 1 for i in range(prompt, len(row)) if row[i] == eos_id), len(row))
    return row[: min(end, prompt + limit)]


def _plan(prompts: list[list[int]], doc: Fields) -> Plan:
    params = doc.fields("params")
    algorithm = params.text("algorithm")
    told = causal.ALGORITHMS | FURTHER
    known = ALGORITHMS | {name: partial(plan, doc) for name, plan in told.items()}
    if algorithm not in known:
        raise Skip(f"algorithm {algorithm!r} has no translation yet")
    params.where = f"algorithm {algorithm!r}"
    plan = known[algorithm](prompts, params)
    params.finish()
    for registry, config in ((ITERATIONS, plan.iteration), (DECODERS, plan.decoder), (CACHES, plan.cache)):
        need(registry, config["name"])
    return plan
