"""Plans for runs of the later sets: insertion and deletion, length, attention-driven caches."""

from dataclasses import replace
from functools import partial
from typing import Any

from tests.parity import s2d2
from tests.parity.decoders import insert_delete
from tests.parity.golden import Fields, Skip
from tests.parity.plan import NEVER, Algorithms, Plan, aligned, fixed_blocks


def _d2cache(prompts: list[list[int]], params: Fields) -> Plan:
    """The loop of d2Cache's repository: the best positions of a block by a score; each forward is a step."""
    if params.take("gamma") is not None or params.take("temperature"):
        raise Skip("d2Cache: gamma and temperature are not there yet")
    factor, policy = params.take("factor"), params.take("cache")
    score = {"maskgit_plus": "low_confidence", "topk_margin": "margin"}[params.take("alg")]
    threshold, clip, until_eos = params.take("threshold"), params.take("clip_alpha"), params.take("stop_until_eos")
    decoder = {"name": "calibrated", "score": score, "sigma": params.take("sigma") or 0.0}
    decoder |= {"least": params.take("num_transfer_tokens"), "threshold": NEVER if threshold is None else threshold}
    if params.take("debias"):
        decoder |= {"clip": 10.0 if clip is None else clip}
    if factor is not None:
        if decoder != decoder | {"sigma": 0.0, "least": 1, "score": "low_confidence"}:
            raise Skip("d2Cache: factor with a certainty prior or several tokens is not there yet")
        decoder = {"name": "factor", "reference": "d2cache", "factor": factor}
    cache: dict[str, Any] = {"name": "none"}
    if policy is not None:
        given = Fields("cache", policy)
        names = {"name": "name", "rollout_p": "mass", "current_k": "masks", "sigma": "sigma", "inflate_w": "bridge"}
        cache = {ours: given.take(theirs) for theirs, ours in names.items()} | {"score": score, "share": None}
        given.finish()
    iteration = {"name": "blockwise", "block": params.take("block_length"), "stop": "cut" if until_eos else "off"}
    plan = Plan(iteration, decoder, cache, params.take("gen_length"), every_step=True, response=True)
    return replace(plan, keep_masks=until_eos, computed=policy is not None)


def _indel(prompts: list[list[int]], params: Fields) -> Plan:
    """LLaDA2.2's own as SGLang has it. A prefill is not counted there, but the pass that stores a finished block is."""
    new_tokens, moving = params.take("gen_length"), ("delete", "split")
    plan = aligned(prompts, params, insert_delete(params), "block")
    plan.spec.update({f"{name}_id": params.take(f"{name}_token_id") for name in moving})
    return replace(plan, answer=new_tokens, every_step=True)


def _prophet(prompts: list[list[int]], params: Fields) -> Plan:
    """LLaDA's own sampler with an early commit, over the whole generation as one block."""
    if params.take("temperature"):
        raise Skip("the random numbers of the reference are not ours (temperature > 0)")
    decoder = {"name": "prophet", "steps": params.take("steps"), "sub_block": params.take("block_length")}
    decoder |= {"answer": params.take("answer_start"), **params.take("early_exit_thresholds")}
    plan = Plan({"name": "full"}, decoder, {"name": "none"}, params.take("gen_length"), every_step=True, response=True)
    given = {int(place): token for place, token in (params.take("constraints") or {}).items()}
    return replace(plan, constraints=given, options={"guidance": params.take("cfg_scale")})


def _streaming(prompts: list[list[int]], params: Fields) -> Plan:
    """Streaming-dLLM. Behind the block it keeps a window and the last position, all of them masks."""
    if params.take("temperature"):
        raise Skip("the random numbers of the reference are not ours (temperature > 0)")
    window, alpha = params.take("window_size"), params.take("confidence_alpha")
    factor, threshold = params.take("factor"), params.take("threshold")
    new_tokens = params.take("gen_length")
    iteration, decoder = fixed_blocks(params, "float64")
    if factor is not None:
        decoder = {"name": "factor", "reference": "fastdllm", "factor": factor}
    elif threshold is not None:
        decoder = {"name": "threshold", "threshold": threshold, "relax": alpha, "horizon": window + 1}
        decoder["precision"] = "float64"
    iteration["stop"] = "block"
    cache = {"name": "prefix", "suffix": window}
    return Plan(iteration, decoder, cache, new_tokens, every_step=True, response=True)


def _daedal(prompts: list[list[int]], params: Fields) -> Plan:
    """DAEDAL. The canvas has its full length from the beginning, and what does not exist yet is EOS."""
    if params.take("temperature"):
        raise Skip("the random numbers of the reference are not ours (temperature > 0)")
    names = {
        "initial_gen_length": "initial", "block_length": "window", "high_conf_threshold": "threshold",
        "low_conf_threshold": "low_threshold", "expansion_factor": "expansion",
        "eos_confidence_threshold": "eos_threshold", "expand_eos_confidence_threshold": "growth_threshold",
        "eos_check_tokens": "eos_tokens",
    }  # fmt: skip
    decoder = {"name": "daedal"} | {ours: params.take(theirs) for theirs, ours in names.items()}
    most, options = params.take("max_gen_length"), {"guidance": params.take("cfg_scale")}
    plan = Plan({"name": "full"}, decoder, {"name": "none"}, most, every_step=True, response=True, grows=True)
    return replace(plan, options=options)


def _s2d2(prompts: list[list[int]], params: Fields) -> Plan:
    """S2D2 on SDAR, with the recorded numbers that acceptance takes."""
    if params.take("temperature") or params.take("acceptance_draws") != "recorded":
        raise Skip("S2D2: only greedy cases with recorded draws are known")
    params.take("residual")  # the largest, as ours
    plan = aligned(prompts, params, s2d2.options(params), "block")
    plan.iteration["stop"] = "block"
    draft, stored = params.take("draft_ver", False), params.take("cache_ver", False)
    wraps = partial(s2d2.causal, draft=draft, stored=stored) if draft or stored else None
    return replace(plan, drawn=s2d2.recorded, wraps=wraps, answer=plan.new_tokens, drop_eos=True, every_step=True)


# Algorithm of the goldens -> plan.
FURTHER: Algorithms = {
    "d2cache_vanilla": _d2cache,
    "sglang_joint_threshold_indel": _indel,
    "prophet": _prophet,
    "daedal": _daedal,
    "streaming_dllm": _streaming,
    "s2d2": _s2d2,
}
