"""Generation cases: whole runs of the engine. Token ids must be equal, and forwards no more than the reference's."""

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dinfer.engine.engine import Engine
from dinfer.engine.runtime import Runtime
from dinfer.recipe.recipe import compose
from dinfer.recipe.registry import CACHES, DECODERS, ITERATIONS
from tests.parity import likelihood, multi_block, uniform
from tests.parity.compare import at_most, same
from tests.parity.decoders import translate
from tests.parity.draws import recorded
from tests.parity.further import FURTHER
from tests.parity.golden import Case, Fields, Golden, GoldenError, Skip, broken, need, read_json
from tests.parity.plan import Algorithms, Plan, aligned, fixed_blocks
from tests.parity.references import build


def _blockwise(prompts: list[list[int]], params: Fields, *, smooth: bool = False, vicinity: bool = False) -> Plan:
    """dInfer's BlockWise and its relatives. Unrolling is left out: dinfer's results do not depend on it."""
    params.take("maximum_unroll", None)
    params.take("expected_tpf", None)
    early_stop, interval = params.take("early_stop", True), params.take("cache_update_freq", None) or 0
    if len({len(prompt) for prompt in prompts}) > 1:
        raise Skip("dInfer: prompts of several lengths in a batch share their blocks in the reference")
    if len(prompts) > 1 and (interval or not early_stop):
        raise Skip("dInfer: rows of a batch share the refresh interval and, without early_stop, the end")
    iteration = {"name": "blockwise", "reference": "dinfer", "block": params.take("block_length")}
    iteration |= {"align": params.take("start_block_align", False)}
    sweep: dict[str, Any] = {}
    cache = {"name": params.take("cache", None) or "none"}
    if vicinity:
        names = {"prefix_look": "back", "after_look": "ahead", "warmup_steps": "warmup"}
        cache = {"name": "vicinity", "reference": "dinfer", **{ours: params.take(name) for name, ours in names.items()}}
        sweep["linger"] = cache["warmup"]
    if smooth:
        names = {"cont_weight": "weight", "cont_weight_init": "weight_init", "cont_weight_growth": "weight_growth"}
        iteration |= {ours: params.take(name) for name, ours in names.items()}
        iteration |= {"name": "smooth", "threshold_decay": params.take("threshold_decay")}
        sweep["lockstep"] = len(prompts) > 1
        if cache["name"] != "none":  # the schedule counts every pass
            sweep.setdefault("linger", 0)
    return Plan(
        iteration,
        _decoder(params.fields("decoder")),
        cache | ({"interval": interval} if interval else {}),
        params.take("gen_length"),
        sweep=sweep,
        spec={"shift": 1} if params.take("use_shift", False) else {},
        keep_masks=not early_stop,
        drop_eos=True,
    )


def _decoder(values: Fields) -> dict[str, Any]:
    """A decoder of dInfer: its decoder cases have the same rule under a longer name."""
    name = values.take("name")
    values.where = f"decoder {name!r}"
    if "iter_threshold_decay" in values:
        raise Skip("a decaying threshold in a generation case is not there yet")
    return translate(f"dinfer_{name}", values).config


def _official(prompts: list[list[int]], params: Fields) -> Plan:
    """LLaDA's own sampler. Positions start behind the padding, which is the same: rotary positions are relative."""
    guidance = params.take("cfg_scale", 0.0)
    if params.take("temperature", 0.0):
        raise Skip("the random numbers of the reference are not ours (temperature > 0)")
    if (remasking := params.take("remasking", "low_confidence")) != "low_confidence":
        raise Skip(f"remasking {remasking!r} is not there yet")
    return Plan(
        *fixed_blocks(params, "float32"),
        {"name": "none"},
        params.take("gen_length"),
        pads_B=_pads(params),
        options={"guidance": guidance},
    )


def _pads(params: Fields) -> list[int] | None:
    """Padding in front of each prompt."""
    mask_BP = params.take("attention_mask", None)
    if mask_BP is not None and any(sorted(mask) != mask for mask in mask_BP):
        raise Skip("padding behind or between tokens is not there yet")
    return None if mask_BP is None else [mask.count(0) for mask in mask_BP]


def _dream(prompts: list[list[int]], params: Fields) -> Plan:
    """Dream's own. It takes its counts from the mean number of masks in a row, which is every row's own here."""
    if params.take("temperature"):
        raise Skip("the random numbers of the reference are not ours (temperature > 0)")
    params.take("rand_seed_used", None)  # of draws that are recorded
    decoder = {"name": "dream"} | {name: params.take(name) for name in ("steps", "alg", "eps")}
    plan = Plan({"name": "full"}, decoder, {"name": "none"}, params.take("max_new_tokens"), pads_B=_pads(params))
    return replace(plan, drawn=recorded if decoder["alg"] == "origin" else None, every_step=True)


def _fastdllm(cache: str) -> Callable[[list[list[int]], Fields], Plan]:
    def plan(prompts: list[list[int]], params: Fields) -> Plan:
        if params.take("early_stop", False):
            raise Skip("Fast-dLLM: filling up behind EOS after every step is not there yet")
        factor, threshold = params.take("factor", None), params.take("threshold", None)
        iteration, decoder = fixed_blocks(params, "float64")
        if factor is not None:
            decoder = translate("fastdllm_factor", Fields("decoder 'factor'", {"factor": factor})).config
        elif threshold is not None:
            decoder = translate("fastdllm_threshold", Fields("decoder 'threshold'", {"threshold": threshold})).config
        return Plan(iteration, decoder, {"name": cache}, params.take("gen_length"))

    return plan


def _block_diffusion(prompts: list[list[int]], params: Fields, *, cache: str) -> Plan:
    """dInfer's BlockDiffusion. The variant without keys stops at EOS whatever early_stop says."""
    params.take("maximum_unroll", None)
    params.take("expected_tpf", None)
    early_stop = params.take("early_stop", True) or cache == "none"
    if len(prompts) > 1 and not early_stop:
        raise Skip("dInfer: rows of a batch share the end without early_stop")
    decoder = _decoder(params.fields("decoder"))
    plan = aligned(prompts, params, decoder, cache)
    plan.iteration["stop"] = "block" if early_stop else "off"
    return replace(plan, keep_masks=not early_stop, drop_eos=True)


def _llada2(prompts: list[list[int]], params: Fields) -> Plan:
    """LLaDA2's own. It stops behind a block with EOS in any case; `eos_early_stop` only leaves that block earlier."""
    params.take("eos_early_stop")
    steps, new_tokens = params.take("steps"), params.take("gen_length")
    decoder = _quota(min(steps, new_tokens // params.take("minimal_topk")), params.take("threshold"))
    return replace(aligned(prompts, params, decoder, "none"), answer=new_tokens)


def _llada21(prompts: list[list[int]], params: Fields) -> Plan:
    """LLaDA2.1's own, which edits. It stops as LLaDA2's, and its `steps` are not used."""
    params.take("eos_early_stop")
    params.take("steps")
    names = {
        "threshold": "threshold", "editing_threshold": "edit_threshold", "max_post_steps": "post_edits",
        "num_to_transfer": "least",
    }  # fmt: skip
    decoder = {"name": "joint_threshold", **{ours: params.take(theirs) for theirs, ours in names.items()}}
    new_tokens = params.take("gen_length")
    return replace(aligned(prompts, params, decoder, "none"), answer=new_tokens)


def _sdar(prompts: list[list[int]], params: Fields) -> Plan:
    """SDAR's own, its sampler replaced by the most likely token."""
    strategy, threshold = params.take("remasking_strategy"), params.take("confidence_threshold", 1.0)
    if strategy not in ("low_confidence_dynamic", "low_confidence_static", "sequential"):
        raise Skip(f"SDAR: remasking strategy {strategy!r} is not there yet")
    confidence = params.take("confidence")
    if strategy == "sequential":  # looks at no confidence
        greedy = confidence.startswith("argmax token") or params.take("top_k", None) == 1
    else:
        greedy = confidence == "argmax token, full softmax probability"
    if not greedy:
        raise Skip(f"SDAR: sampling is not there yet ({confidence})")
    decoder = _quota(params.take("denoising_steps"), threshold if strategy == "low_confidence_dynamic" else 1.0)
    if strategy == "sequential":
        decoder["score"] = strategy
    plan = aligned(prompts, params, decoder, "block")
    plan.iteration["stop"] = "block" if params.take("stop_on_eos") else "off"
    return replace(plan, keep_masks=True)


def _quota(steps: int, threshold: float) -> dict[str, Any]:
    """The decoder of LLaDA2 and SDAR: all above the threshold, or the best of a quota that splits the block."""
    return {"name": "fixed", "steps": steps, "split": "block", "threshold": threshold, "precision": "float32"}


# Algorithm of the goldens -> plan. Whoever adds an iteration or a cache adds an entry here.
ALGORITHMS: Algorithms = {
    "BlockWise": _blockwise,
    "VicinityCache": partial(_blockwise, vicinity=True),
    "IterSmooth": partial(_blockwise, smooth=True),
    "IterSmoothWithVicinityCache": partial(_blockwise, smooth=True, vicinity=True),
    "official_low_confidence": _official,
    "fastdllm_nocache": _fastdllm("none"),
    "fastdllm_prefix": _fastdllm("prefix"),
    "fastdllm_dual": _fastdllm("dual"),
    "BlockDiffusion": partial(_block_diffusion, cache="block"),
    "BlockDiffusionAttnmask": partial(_block_diffusion, cache="none"),
    "llada2_block_diffusion": _llada2,
    "llada21_block_diffusion_with_editing": _llada21,
    "sdar_block_diffusion": _sdar,
    "dream_diffusion_generate": _dream,
    **FURTHER,
}


def cases(golden: Golden) -> Iterator[Case]:
    """One case for each JSON file below generation/."""
    for path in sorted((golden.root / "generation").rglob("*.json")):
        name = path.relative_to(golden.root).with_suffix("").as_posix()
        try:
            doc = Fields(f"{name}.json", read_json(path))
            yield Case(name, partial(run, golden, doc))
        except GoldenError as error:
            yield broken(name, error)


def run(golden: Golden, doc: Fields) -> str:
    """Generates as the reference did; compares the tokens of every row, and the forwards of the longest."""
    with TemporaryDirectory() as folder:
        return generate(golden, doc, Path(folder))


def generate(golden: Golden, doc: Fields, scratch: Path) -> str:
    """What `run` does, with a folder for files that components read."""
    folder, family = doc.text("model"), doc.text("family")
    golden.family(folder, family)
    if "random_canvas" in doc:
        return uniform.run_generation(golden, doc)
    if "log_likelihood" in doc:
        return likelihood.run(golden.network(folder, family), doc)
    prompts, mask_id, eos_id = doc.rows("prompt_ids", int), doc.take("mask_id"), doc.take("eos_id")
    if doc.fields("params").text("algorithm") in multi_block.PLANS:
        return multi_block.run(golden, doc)
    plan = _plan(prompts, doc.fields("params"))
    if any(mask_id in prompt for prompt in prompts):
        raise Skip("prompts that hold mask tokens are not there yet")

    network = copy.copy(golden.network(folder, family))  # shares the weights
    network.spec = replace(network.spec, mask_id=mask_id, eos_id=eos_id, stop_ids=(eos_id,), **plan.spec)
    if not all(0 <= token < network.spec.vocab for prompt in prompts for token in prompt):
        raise GoldenError(f"{doc.where}: prompt_ids must be tokens of the model's vocabulary of {network.spec.vocab}")
    computed: list[list[int]] = []
    if plan.wraps is not None:
        network.forward = plan.wraps(network)
    if plan.computed:
        network.forward = heard(network.forward, computed)
    pads_B = plan.pads_B or [0] * len(prompts)
    bare = [prompt[pad:] for prompt, pad in zip(prompts, pads_B, strict=True)]
    options = dict(plan.decoder)
    if "token_counts" in doc:
        (scratch / "token_counts.json").write_text(json.dumps(doc.take("token_counts")))
        options["frequencies"] = str(scratch / "token_counts.json")
    decoder = build(DECODERS, options) if plan.drawn is None else plan.drawn(options, doc, bare, plan.new_tokens)
    iteration = build(ITERATIONS, plan.iteration, **plan.sweep)
    recipe = compose(network, iteration=iteration, decoder=decoder, cache=build(CACHES, plan.cache))
    requests = [
        plan.request(prompt, mask_id, recipe.resolve(plan.options | {"seed": row})) for row, prompt in enumerate(bare)
    ]
    engine = Engine(recipe, Runtime(rows=len(requests)))
    rows: list[list[int]] = [[] for _ in requests]
    forwards = [0] * len(requests)
    trail: list[list[list[int]]] = [[] for _ in requests]
    for update in engine.run(requests, snapshots=plan.keep_masks or plan.every_step):
        if plan.every_step:
            trail[update.index].append(prompts[update.index][: pads_B[update.index]] + (update.tokens or []))
        if update.completion is not None:
            canvas = update.tokens if plan.keep_masks else update.completion.canvas
            rows[update.index] = prompts[update.index][: pads_B[update.index]] + (canvas or [])
            forwards[update.index] = update.completion.counts.forwards

    if plan.computed:
        everything = [*range(len(prompts[0]) + plan.new_tokens)]
        want = [everything if step["computed"] is None else step["computed"] for step in doc.take("steps")]
        same("positions of each forward", want, computed)
    if plan.every_step:
        for row, got in enumerate(trail):
            found = snapshots(doc, row, prompts[row] + [mask_id] * plan.new_tokens)
            if plan.grows:  # until the length is fixed, no step changes what exists
                got, found = got[1 - len(found) :], found[1:]
                beyond = {token for ours, want in zip(got, found, strict=True) for token in ours[len(want) :]}
                same(f"tokens behind the end of row {row}", [eos_id] * len(beyond), [*beyond])
                same(f"steps of row {row}", found, [ours[: len(want)] for ours, want in zip(got, found, strict=True)])
                rows[row] = rows[row][: len(found[-1])]
                continue
            changes, ours = (
                [now for last, now in pairwise(canvases) if now != last] for canvases in (found, [found[0], *got])
            )
            same(f"steps of row {row}", changes, ours)
    if plan.answer is not None:
        rows = [answer(row, len(prompt), plan.answer, eos_id) for row, prompt in zip(rows, prompts, strict=True)]
    if doc.take("final_array", None) is not None:
        same("final_array", doc.take("final_array"), rows)
    if plan.answer is not None or plan.response:
        rows = [row[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)]
    if plan.drop_eos and len(rows) == 1:
        rows = [[token for token in rows[0] if token != eos_id]]
    same("output_ids", doc.take("output_ids"), rows)
    at_most("num_forwards", doc.take("num_forwards"), max(forwards))
    return f"{max(forwards)} forwards, reference {doc.take('num_forwards')}"


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


def _plan(prompts: list[list[int]], params: Fields) -> Plan:
    algorithm = params.text("algorithm")
    if algorithm not in ALGORITHMS:
        raise Skip(f"algorithm {algorithm!r} has no translation yet")
    params.where = f"algorithm {algorithm!r}"
    plan = ALGORITHMS[algorithm](prompts, params)
    params.finish()
    for registry, config in ((ITERATIONS, plan.iteration), (DECODERS, plan.decoder), (CACHES, plan.cache)):
        need(registry, config["name"])
    return plan
