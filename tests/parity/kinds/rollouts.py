"""Recorded rollouts: tokens, step maps, log-probabilities and events must be those of the published loops.

What replays a run, and what new weights give, is compared too.
"""

import copy
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from dinfer.core.engine.runtime import Runtime
from dinfer.core.pipeline.pipeline import Pipeline
from dinfer.core.recipe.recipe import Recipe
from dinfer.core.registry import CACHES, DECODERS, ITERATIONS
from dinfer.lab.likelihood import combine, logps, passes
from dinfer.rollouts.rollouts import Rollouts
from tests.parity.compare import same
from tests.parity.golden import Case, Fields, Golden
from tests.parity.kinds.likelihoods import LOGP, RESULT
from tests.parity.plans import ALGORITHMS, quota
from tests.parity.references import build

FILES = "*/*_[0-9][0-9]_*.json"
FROM_ONE = ("weight_update_02_sdar", "weight_update_03_llada2_moe", "weight_update_04_sdar")  # whose maps count from 1


def takes(doc: Fields) -> bool:
    return doc.take("estimator", None) in RUNS


def cases(golden: Golden, path: Path, doc: Fields) -> Iterator[Case]:
    yield Case(golden.name(path), partial(RUNS[doc.text("estimator")], golden, doc, golden.name(path)))


def trajectory(golden: Golden, doc: Fields, name: str) -> str:
    """Tokens, the step map in three dialects, log-probabilities, and the same of a replay."""
    (sequence,), expected, params = doc.items("sequences"), doc.fields("expected"), doc.fields("params")
    network = network_of(golden, doc, params.take("stop_id", None))
    made = rolled(network, sequence.take("prompt"), params)
    answer = sequence.take("answer")
    same("answer", answer, made.answer_ids[0, : int(made.lengths[0])].tolist())
    if "returned" in doc:
        same("returned", doc.take("returned"), int(made.stops[0]))
    same("step_map", expected.take("step_map"), made.step_map("dllm-rl")[0])
    same("block_step_map", expected.take("block_step_map"), made.block_steps(0).tolist())
    same("one_based", expected.take("one_based")[: int(made.stops[0])], made.step_map("jetengine")[0])
    want = torch.tensor(expected.take("commit_logps"), dtype=torch.float64)
    assert made.logps is not None and made.exact, made.inexact
    golden.close("commit_logps", want, made.logps[0, : len(answer)], atol=LOGP, rtol=LOGP)
    drawn = passes("trajectory", network.spec, made.samples())
    replayed = combine(drawn, logps(network, drawn, grad=False))
    golden.close("replay", want, replayed.per_token[0, 0, : len(answer)], atol=LOGP, rtol=LOGP)
    total = torch.tensor([expected.take("sequence")], dtype=torch.float64)
    golden.close("sequence", total, replayed.sequence, atol=RESULT, rtol=RESULT)
    expected.finish()
    return f"{len(answer)} tokens in {int(made.forwards[0])} forwards"


def edits(golden: Golden, doc: Fields, name: str) -> str:
    """Every change of the canvas, in order."""
    (sequence,), expected, params = doc.items("sequences"), doc.fields("expected"), doc.fields("params")
    prompt, answer = sequence.take("prompt"), sequence.take("answer")
    plan = ALGORITHMS[params.text("algorithm")]([prompt], params)
    iteration = plan.iteration | {"stop": "off"}
    network = network_of(golden, doc, None, **plan.spec)
    made = rollout(pipeline(network, iteration, plan.decoder, plan.cache), prompt, plan.new_tokens)
    same("answer", answer, made.answer_ids[0, : len(answer)].tolist())
    assert made.events is not None and made.event_logps is not None and made.logps is not None
    assert made.steps is not None and made.first_steps is not None
    # The last forward's changes behind the answer are not recorded: the published loop has cut them off.
    last, event_E4 = int(made.forwards[0]) - 1, made.events[0]
    kept_E = (event_E4[:, 1] < len(answer)) | (event_E4[:, 0] < last)
    ours, said_E = event_E4[kept_E].tolist(), made.event_logps[0][kept_E]
    want, mask_id = expected.items("events"), doc.take("mask_id")
    kinds = ["mask" if new < 0 else "write" if old < 0 else "edit" for *_, old, new in ours]
    same("kinds", [one.take("kind") for one in want], kinds)
    found = [[step, pos, *(mask_id if token < 0 else token for token in pair)] for step, pos, *pair in ours]
    same("events", [[one.take(key) for key in ("step", "position", "from", "to")] for one in want], found)
    logps_E = [0.0 if kind == "mask" else one.take("logp") for one, kind in zip(want, kinds, strict=True)]
    masks_E = torch.tensor([kind == "mask" for kind in kinds])
    golden.close("logp", torch.tensor(logps_E).double(), said_E.masked_fill(masks_E, 0), atol=LOGP, rtol=LOGP)
    same("first_step", expected.take("first_step"), made.first_steps[0, : len(answer)].tolist())
    same("last_step", expected.take("last_step"), made.steps[0, : len(answer)].tolist())
    edited = [pos for (_, pos, *_), kind in zip(ours, kinds, strict=True) if kind == "edit"]
    same("edits", expected.take("edits"), [edited.count(place) for place in range(len(answer))])
    final = torch.tensor(expected.take("commit_logps"), dtype=torch.float64)
    golden.close("commit_logps", final, made.logps[0, : len(answer)], atol=LOGP, rtol=LOGP)
    expected.finish()
    return f"{len(want)} events"


def weight_update(golden: Golden, doc: Fields, name: str) -> str:
    """Tokens and step maps of the same request before and after an update of one engine."""
    network, prompt = copy.deepcopy(network_of(golden, doc, None)), doc.take("prompt")
    new, names = load_file(golden.root / doc.text("policy")), doc.take("names")
    pipe, new_tokens = made_for(network, doc.fields("params"))
    root, family = root_of(golden, doc.text("family")), doc.text("family")
    pipe.origin = Golden(root).family(f"models/{family}", family), root / "models" / family
    for when in ("before", "after"):
        if when == "after":
            with pipe.updating() as into:
                into.load_all({tensor: new[tensor] for tensor in names or new})
        want, made = doc.fields(when), rollout(pipe, prompt, new_tokens)
        same(f"{when}.answer", want.take("answer"), made.answer_ids[0].tolist())
        first = int(name.rpartition("/")[2] in FROM_ONE)
        same(f"{when}.step_map", want.take("step_map"), [step + first for step in made.step_map("dllm-rl")[0]])
        want.finish()
    return f"{len(made.answer_ids[0])} tokens"


RUNS = {"trajectory": trajectory, "edits": edits, "weight_update": weight_update}


def network_of(golden: Golden, doc: Fields, stop: int | None, **spec: Any) -> Any:
    """The case's network with its tokens. `stop`: what ends an answer; -1: nothing does; None: EOS."""
    family, mask_id, eos_id = doc.text("family"), doc.take("mask_id"), doc.take("eos_id", 0)
    own = Golden(root_of(golden, family), golden.device, golden.networks)
    network = copy.copy(own.network(f"models/{family}", family))
    eos_id = eos_id if stop is None or stop < 0 else stop
    network.spec = replace(network.spec, mask_id=mask_id, eos_id=eos_id, stop_ids=(eos_id,), **spec)
    return network


def root_of(golden: Golden, family: str) -> Path:
    """The folder whose models are the goldens'."""
    return golden.root if (golden.root / "models" / family).is_dir() else golden.root.parent / "goldens"


def rolled(network: Any, prompt: list[int], params: Fields) -> Rollouts:
    """A greedy run of the published loops."""
    pipe, new_tokens = made_for(network, params)
    return rollout(pipe, prompt, new_tokens)


def made_for(network: Any, params: Fields) -> tuple[Pipeline, int]:
    """LLaDA's published loop, or the block-causal engine's, and the length of its answers."""
    block, steps, bar, new_tokens = (params.take(key) for key in ("block", "steps", "threshold", "new_tokens"))
    rule = params.take("rule", "dynamic")
    params.take("denoise_steps", None)
    ends = "off" if params.take("stop_id", None) == -1 else "block"
    params.finish()
    if network.spec.causal_block is None:
        iteration = {"name": "blockwise", "block": block, "stop": "off"}
        decoder = {"name": "threshold", "threshold": bar} if bar is not None else {
            "name": "fixed", "steps": steps // (new_tokens // block), "precision": "float32"}  # fmt: skip
        return pipeline(network, iteration, decoder, {"name": "none"}), new_tokens
    network.spec = replace(network.spec, causal_block=block)
    iteration = {"name": "block_diffusion", "block": block, "stop": ends}
    decoder = quota(steps, 1.0 if rule.endswith("static") else bar)
    return pipeline(network, iteration, decoder, {"name": "block"}), new_tokens


def pipeline(network: Any, iteration: Any, decoder: Any, cache: Any) -> Pipeline:
    recipe = Recipe(network, build(ITERATIONS, iteration), build(DECODERS, decoder), build(CACHES, cache))
    return Pipeline(recipe, None, Runtime(rows=2))


def rollout(pipe: Pipeline, prompt: list[int], new_tokens: int) -> Rollouts:
    """One sample with all its events."""
    return pipe.rollout([prompt], max_new_tokens=new_tokens, record="events")
