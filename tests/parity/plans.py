"""How dinfer repeats a recorded run: a plan for each algorithm of the goldens, and what is compared."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from dinfer.core.engine.request import Request, Resolved
from dinfer.core.step.contracts import Decoder
from tests.parity import look_ahead, s2d2
from tests.parity.draws import recorded
from tests.parity.golden import Fields, GoldenError, Skip
from tests.parity.kinds.decoders import insert_delete, translate

Drawn = Callable[[dict[str, Any], Fields, list[list[int]], int], Decoder]  # of options, run, prompts, new tokens
NEVER = 1e9  # a threshold that no confidence reaches


@dataclass(frozen=True, slots=True)
class Plan:
    """The components and settings that repeat a run of the goldens."""

    iteration: dict[str, Any]  # of components, see `tests.parity.references.build`
    decoder: dict[str, Any]
    cache: dict[str, Any]
    new_tokens: int
    sweep: dict[str, Any] = field(default_factory=dict)  # options that only the reference's iteration has
    spec: dict[str, Any] = field(default_factory=dict)  # what differs from the model's own `ModelSpec`
    pads_B: Sequence[int] | None = None  # padding in front of each prompt
    options: dict[str, Any] = field(default_factory=dict)  # of every request
    drawn: Drawn | None = None  # makes the decoder, with recorded random numbers; row b is the request of seed b
    sampled: Callable[[Fields], Any] | None = None  # makes the sampling, with recorded random numbers
    speculate: int = 0  # drafts that forwards evaluate too
    further: bool = False  # the reference drafts in later blocks too: forwards are to be no more than without drafts
    swept: Callable[[dict[str, Any], Fields], Any] | None = None  # makes the iteration, with recorded random numbers
    wraps: Callable[[Any], Any] | None = None  # what the reference changes of the model's forward
    every_step: bool = False  # compare the canvas after each step too, but for those that change nothing
    keep_masks: bool = False  # the reference returns what an early stop left undecoded as masks, not as EOS
    drop_eos: bool = False  # the reference returns a single row without its EOS tokens
    response: bool = False  # the reference returns what it generated, without the prompt
    answer: int | None = None  # the reference returns so many new tokens at most, up to the first EOS, and no prompt
    spare: int = 0  # forwards more: the reference needs none for a single candidate, ours one if nothing follows it
    padding: int = 0  # positions behind those that the reference is asked for, see `Pads`
    adapted: bool = False  # drafts take the adapter in the model's folder
    cut: bool = False  # the reference returns the prompt and the answer, up to the first EOS
    computed: bool = False  # compare the positions that each forward computes, too; of a single row
    filled: bool = False  # the reference fills rows of a batch up with EOS
    padded_with: int | None = None  # the reference fills rows of a batch up with this token
    left: bool = False  # the reference pads on the left to whole blocks, and ends behind the last block that it decoded
    grows: bool = False  # the canvas of the reference ends where ours holds EOS; nothing counts there
    constraints: dict[int, int] = field(default_factory=dict)  # tokens that are given, by place behind the prompt

    def request(self, prompt: list[int], mask_id: int, options: Resolved) -> Request:
        """The run of one row."""
        if not self.constraints:
            return Request.behind(prompt, self.new_tokens, options, padding=self.padding)
        places = range(self.new_tokens)
        tokens = [self.constraints.get(place, mask_id) for place in places]
        gaps = [False] * len(prompt) + [place not in self.constraints for place in places]
        return Request(prompt + tokens, gaps, options)


def aligned(prompts: list[list[int]], params: Fields, decoder: dict[str, Any], cache: str) -> Plan:
    """Blocks from a multiple of their length on, the last one complete; attention to the own block and those before."""
    block, length = params.take("block_length"), max(len(prompt) for prompt in prompts) + params.take("gen_length")
    if len({len(prompt) for prompt in prompts}) > 1:
        raise Skip("block diffusion: prompts of several lengths in a batch share their blocks in the references")
    new_tokens = -(-length // block) * block - len(prompts[0])
    iteration = {"name": "block_diffusion", "block": block}
    return Plan(iteration, decoder, {"name": cache}, new_tokens, spec={"causal_block": block})


def fixed_blocks(params: Fields, precision: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Blocks from the end of the prompt on, and as many of the `steps` for each."""
    steps, length, block = params.take("steps"), params.take("gen_length"), params.take("block_length")
    if length % block or steps % (length // block):
        raise GoldenError(f"steps={steps} and gen_length={length} do not divide into blocks of {block}")
    iteration = {"name": "blockwise", "block": block, "stop": "off"}
    return iteration, {"name": "fixed", "steps": steps // (length // block), "precision": precision}


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
    decoder = quota(min(steps, new_tokens // params.take("minimal_topk")), params.take("threshold"))
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
    decoder = quota(params.take("denoising_steps"), threshold if strategy == "low_confidence_dynamic" else 1.0)
    if strategy == "sequential":
        decoder["score"] = strategy
    plan = aligned(prompts, params, decoder, "block")
    plan.iteration["stop"] = "block" if params.take("stop_on_eos") else "off"
    return replace(plan, keep_masks=True)


def quota(steps: int, threshold: float) -> dict[str, Any]:
    """The decoder of LLaDA2 and SDAR: all above the threshold, or the best of a quota that splits the block."""
    return {"name": "fixed", "steps": steps, "split": "block", "threshold": threshold, "precision": "float32"}


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


def _dsb(prompts: list[list[int]], params: Fields) -> Plan:
    """DSB without keys: the constant window alone, which is iteration=sliding."""
    new_tokens, block = params.take("gen_length"), params.take("block_length")
    if params.take("max_block_length") != block or params.take("threshold") is None:
        raise Skip("DSB: windows that grow, and quotas, are not there")
    if params.take("factor") is not None:
        raise Skip("DSB: the rule of Fast-dLLM's factor is not there in a window that moves")
    params.take("steps")
    decoder = {"name": "threshold", "threshold": params.take("threshold"), "precision": "float64"}
    iteration = {"name": "sliding", "block": block, "stop": "off"}
    return Plan(iteration, decoder, {"name": "none"}, new_tokens, every_step=True)


def _freedave(prompts: list[list[int]], params: Fields) -> Plan:
    """FreeDave, whose drafts change forwards and no tokens: runtime.speculate with the same number of drafts."""
    drafts, threshold = params.take("draft_steps"), params.take("confidence_threshold")
    params.take("draft_mode")  # how a forward evaluates several states
    score = "sequential" if params.take("alg_temp") == -1 else "low_confidence"
    decoder = quota(params.take("block_length"), 1.0 if threshold is None else threshold) | {"score": score}
    plan = aligned(prompts, params, decoder, "block")
    plan.iteration["stop"] = "block" if params.take("early_exit") else "off"
    return replace(plan, speculate=drafts, further=params.take("eager"))


def _a2d(prompts: list[list[int]], params: Fields, *, blocks: bool) -> Plan:
    """A2D's samplers. BD3LM counts its blocks from the prompt's end."""
    new_tokens, block = params.take("max_new_tokens"), params.take("block_size")
    steps = params.take("steps_per_block", None) or -(-params.take("steps") // -(-new_tokens // block))
    params.take("steps")
    if params.take("temperature") or params.take("remasking") != "low_confidence":
        raise Skip("the random numbers of the reference are not ours")
    counted = {"causal_block": block, "prompt_block": True, "prompt_whole": False} if blocks else {"causal_block": None}
    return Plan(
        {"name": "blockwise", "block": block, "stop": "block" if blocks and len(prompts) == 1 else "off"},
        {"name": "fixed", "reference": "a2d", "steps": steps, "precision": "float32"},
        {"name": "block" if blocks else "none"},
        new_tokens,
        options={"guidance": params.take("cfg_scale", 0.0)},
        spec=counted | {"shift": int(params.take("right_shift_logits", False))},
        every_step=not blocks and len(prompts) == 1,
        filled=not blocks,
        left=blocks,
    )


def dawn(doc: Fields, prompts: list[list[int]], params: Fields, *, low: str = "tau_low") -> Plan:
    """DAWN. It counts no steps, and Dream takes another precision."""
    if doc.take("prompt_overwritten"):
        raise Skip("DAWN: it writes to the first prompt token, a defect")
    names = {"tau_sink": "sink", "tau_edge": "edge", "tau_induce": "induced", low: "low_threshold"}
    decoder = {"name": "dawn", "layers": params.take("attention_layers")}
    decoder |= {ours: params.take(theirs) for theirs, ours in names.items()}
    params.take("steps", None)
    iteration = {"name": "blockwise", "block": params.take("block_length"), "stop": "off"}
    decoder |= {"precision": "float64" if low == "tau_low" else "float32"}
    return Plan(iteration, decoder, {"name": "none"}, params.take("gen_length"), every_step=True)


def info_gain(doc: Fields, prompts: list[list[int]], params: Fields) -> Plan:
    """Information-Gain-Sampler. Its blocks have a number of steps each, and what they leave stays masked, a defect."""
    new_tokens, block, steps = (params.take(name) for name in ("max_new_tokens", "block_size", "steps"))
    last = max(steps // max(new_tokens // block, 1), 1)
    iteration = {"name": "look_ahead", "block": block, "stop": "off", "branches": params.take("candidate_number")}
    iteration |= {"heat": params.take("position_temperature"), "own_entropy": params.take("variant") == "info_gain"}
    decoder = {"name": "when_sure", "threshold": params.take("threshold"), "all": True}
    made: dict[str, Any] = {"swept": partial(look_ahead.recorded, last=last)}
    made["drawn"] = partial(look_ahead.ending, last=last)
    left = doc.take("masks_left") > 0
    return Plan(iteration, decoder, {"name": "none"}, new_tokens, keep_masks=left, spare=int(left), **made)


def info_gain_dllm(doc: Fields, prompts: list[list[int]], params: Fields) -> Plan:
    """Its form for dllm: each step of a block has a share of the masks, and EOS fills what is behind it."""
    last = -(-params.take("steps") // -(-params.take("max_new_tokens") // params.take("block_size")))
    eos_id, threshold = doc.take("eos_id"), params.take("threshold")
    plan = info_gain(doc, prompts, params)
    plan.iteration["stop"] = "off" if eos_id is None else "fill"
    return replace(
        plan,
        decoder={"name": "when_sure", "threshold": 1.0 if threshold is None else threshold, "steps": last},
        spec={"shift": int(params.take("right_shift_logits"))},
        swept=partial(look_ahead.recorded, last=last),
        drawn=partial(look_ahead.ending, last=last),
        wraps=look_ahead.fewer_ends(eos_id, doc.take("pad_id")),
    )


# Algorithm of the goldens -> plan, of prompts and parameters. Whoever adds an iteration or a cache adds an entry here.
ALGORITHMS: dict[str, Callable[[list[list[int]], Fields], Plan]] = {
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
    "d2cache_vanilla": _d2cache,
    "sglang_joint_threshold_indel": _indel,
    "prophet": _prophet,
    "daedal": _daedal,
    "streaming_dllm": _streaming,
    "s2d2": _s2d2,
    "dsb": _dsb,
    "freedave": _freedave,
    "a2d_mdlm": partial(_a2d, blocks=False),
    "a2d_bd3lm": partial(_a2d, blocks=True),
}
# The same of the whole run, prompts and parameters.
FURTHER: dict[str, Callable[[Fields, list[list[int]], Fields], Plan]] = {
    "dawn": dawn,
    "dawn_dream": partial(dawn, low="conf_threshold"),
    "info_gain": info_gain,
    "info_gain_dllm": info_gain_dllm,
}
