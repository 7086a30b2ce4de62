"""DiffusionGemma against transformers' own implementation, and what its encoder and its noise ask of the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.matrix import completions, engine_for, outcome
from support.models import GEMMA, MASK, VOCAB, tiny_gemma, tiny_model
from transformers.models.diffusion_gemma import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion
from transformers.models.diffusion_gemma import generation_diffusion_gemma as reference

from dinfer.core.engine.request import Request, Wants
from dinfer.core.engine.runtime import Runtime
from dinfer.core.loading.checkpoint import load_network
from dinfer.core.loading.files import CheckpointError
from dinfer.core.memory import RESERVED, KVPool, PoolSize, Seen
from dinfer.core.pipeline import Pipeline
from dinfer.core.recipe.recipe import IncompatibleRecipe, Recipe, compose
from dinfer.core.registry import CACHES, DECODERS
from dinfer.core.step.cursors import Phase
from dinfer.families.abilities.encoder import encoder_intervals, local_interval
from dinfer.families.gemma import Gemma
from dinfer.families.models.diffusion_gemma import DiffusionGemma
from dinfer.formats.saving import save_network
from dinfer.lab.audit import audit
from tests.parity.kinds.uniform import Recorded

CANVAS = 6
SWEEP: dict[str, Any] = {"name": "self_conditioned", "block": CANVAS}
NEED_OTHERS = {"dawn", "renoise", "insert_delete", "daedal", "s2d2", "isd", "linear_spec", "when_sure"}
VISION = {
    "model_type": "gemma4_vision", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
    "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8, "patch_size": 4, "position_embedding_size": 4,
}  # fmt: skip


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def theirs() -> DiffusionGemmaForBlockDiffusion:
    """A random model of the reference; its norms and scalars differ from each other, as in `tiny_gemma`."""
    config = DiffusionGemmaConfig(
        text_config={key: value for key, value in GEMMA["text_config"].items()} | {"pad_token_id": 0},
        vision_config=VISION, canvas_length=CANVAS,
    )  # fmt: skip
    config._attn_implementation = config._experts_implementation = "eager"
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = DiffusionGemmaForBlockDiffusion(config).double().eval()
        with torch.no_grad():
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                if "norm" in name or ("scal" in name and "embed" not in name):
                    tensor.copy_(1 + 0.2 * torch.randn_like(tensor))
                elif tensor.dim() > 1:
                    tensor.normal_(0, 2 * tensor.shape[-1] ** -0.5)
    return model


@pytest.fixture(scope="module")
def ours(theirs: DiffusionGemmaForBlockDiffusion, tmp_path_factory: pytest.TempPathFactory) -> Gemma:
    """The same weights, through a checkpoint that the reference has written."""
    folder = tmp_path_factory.mktemp("gemma")
    theirs.save_pretrained(folder)
    return load_network(folder, DiffusionGemma(), dtype=torch.float64, device=torch.device("cpu"))


@pytest.mark.parametrize("prompt", [1, 5, 6, 7, 8, 19])  # shorter and longer than the window of 7
@torch.inference_mode()
def test_forward_equals_the_reference(prompt: int, theirs: Any, ours: Gemma) -> None:
    """Without a cache, with the reference's cache filled before, and with self-conditioning."""
    ids, canvas = (torch.randint(VOCAB, (2, n), generator=rng(prompt)) for n in (prompt, CANVAS))
    close: dict[str, Any] = {"rtol": 1e-5, "atol": 2e-5, "check_dtype": False}
    first = theirs(input_ids=ids, decoder_input_ids=canvas)
    torch.testing.assert_close(ours.score(ids, canvas), first.logits, **close)
    states = ours.norm(ours.hidden(ids, canvas)[:, :prompt])
    torch.testing.assert_close(states, first.encoder_last_hidden_state, **close)
    told = theirs(
        past_key_values=first.past_key_values, decoder_input_ids=canvas, self_conditioning_logits=first.logits
    )
    torch.testing.assert_close(ours.score(ids, canvas, first.logits), told.logits, **close)
    assert not torch.allclose(told.logits, first.logits, atol=0.1)  # else self-conditioning would show nothing


PARAMS = [
    {"steps": 5, "bound": 0.1, "t_min": 0.4, "t_max": 0.8, "stability": 1, "confidence": 0.005},
    {"steps": 7, "bound": 4.0, "t_min": 0.02, "t_max": 0.3, "stability": 1, "confidence": 1.0},
    {"steps": 6, "bound": 2.0, "t_min": 0.1, "t_max": 0.2, "stability": 2, "confidence": 2.0},
    {"steps": 7, "bound": 9.0, "t_min": 0.05, "t_max": 0.1, "stability": 0, "confidence": 0.3},
]


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_generation_equals_the_reference(
    params: dict[str, Any], theirs: Any, ours: Gemma, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole runs of three canvases on one stream of noise, token for token and step for step; EOS is not special."""
    prompt = torch.randint(VOCAB, (1, 9), generator=rng(4))
    noise = torch.randint(VOCAB, (64, 1, CANVAS), generator=rng(5))
    drawn = iter(noise)
    firsts: list[int] = []  # where in the stream each canvas begins

    class Fed(reference.EntropyBoundSampler):
        def initialize_canvas(self, batch_size: int, device: torch.device) -> torch.Tensor:
            return next(drawn)

    steps: list[int] = []
    forward = theirs.forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        steps.append(kwargs.get("self_conditioning_logits") is None)
        return forward(*args, **kwargs)

    monkeypatch.setattr(theirs, "forward", counted)
    monkeypatch.setattr(reference, "EntropyBoundSampler", Fed)
    monkeypatch.setattr(torch, "multinomial", lambda probs, num_samples: probs.argmax(-1, keepdim=True))
    want = theirs.generate(
        prompt, max_new_tokens=3 * CANVAS, max_denoising_steps=params["steps"], eos_token_id=None,
        sampler_config=reference.EntropyBoundSamplerConfig(params["bound"]), t_min=params["t_min"],
        t_max=params["t_max"], stability_threshold=params["stability"], confidence_threshold=params["confidence"],
    )  # fmt: skip
    monkeypatch.undo()

    for count, begins in enumerate(steps):
        if begins:
            firsts.append(count + len(firsts))
    sampling = Recorded(canvas_XBC=noise, prompt=9, first_K=tuple(firsts))
    recipe = compose(
        ours, iteration=SWEEP | {"stop": "off"}, decoder={"name": "renoise", **params}, cache="block", sampling=sampling
    )
    request = Request.behind(prompt[0].tolist(), 3 * CANVAS, recipe.resolve({}))
    done = completions(engine_for(recipe), [request])[0]
    assert done.canvas == want.sequences[0].tolist()
    assert done.counts.forwards == len(steps) + 1  # the prompt's prefill; the reference spends one on every canvas


def test_the_runs_compared_are_of_every_kind(theirs: Any, ours: Gemma) -> None:
    """Canvases that stop early and that take all their steps, or the comparison would not see the rule of stopping."""
    found = set()
    for params in PARAMS:
        recipe = compose(ours, iteration=SWEEP | {"stop": "off"}, decoder={"name": "renoise", **params}, cache="block")
        request = Request.behind([3, 1, 4], 3 * CANVAS, recipe.resolve({}))
        regions = [u.region for u in engine_for(recipe).run([request]) if u.phase != Phase.PREFILL]
        found |= {regions.count(region) == params["steps"] for region in regions}
    assert found == {True, False}


@pytest.mark.parametrize("page", [1, 4, 64])
@torch.inference_mode()
def test_a_window_over_the_encoders_keys_equals_the_full_forward(page: int) -> None:
    """In float64: a prefill, the canvas alone over its keys, and a canvas encoded while the next one is decoded."""
    model = tiny_gemma()
    spec, prompt, length = model.spec, 9, 9 + 2 * CANVAS
    assert spec.local is not None
    ids = torch.randint(VOCAB, (2, length), generator=rng(0))
    kv = KVPool.alloc(spec, PoolSize(2, length, 2 * length, page), dtype=torch.float64, device="cpu")
    pages = -(-length // page)
    for row in range(2):
        kv.assign({row: [RESERVED + row + 2 * i for i in range(pages)]})

    def hidden(start: int, end: int, first: int, stop: int) -> torch.Tensor:
        """The positions `[first, stop)` while `[start, end)` is decoded."""
        pos_BW = torch.arange(first, stop).expand(2, -1)
        start_B, end_B = torch.tensor([start, start]), torch.tensor([end, end])
        context_BW, interval_BW = encoder_intervals(pos_BW, start_B, end_B)
        near_BW = local_interval(interval_BW, pos_BW, start_B, spec.local.window)
        attend = kv.attend(torch.arange(2), pos_BW, Seen(interval_BW, near_BW, context_BW), pages)
        return model(model.embed(ids[:, first:stop]), attend)

    first, second = (model.hidden(ids[:, :p], ids[:, p : p + CANVAS]) for p in (prompt, prompt + CANVAS))
    close = {"rtol": 1e-10, "atol": 1e-10}
    torch.testing.assert_close(hidden(prompt, prompt + CANVAS, 0, prompt), first[:, :prompt], **close)
    for _ in range(2):  # its own keys are not those of the encoder, and are written anew
        torch.testing.assert_close(hidden(prompt, prompt + CANVAS, prompt, prompt + CANVAS), first[:, prompt:], **close)
    got = hidden(prompt + CANVAS, length, prompt, length)
    torch.testing.assert_close(got, second[:, prompt:], **close)


def recipe_of(cache: str = "block", decoder: Any = "renoise", **more: Any) -> Recipe:
    decoder = {"name": decoder, "bound": 1.0, "confidence": 0.5} if decoder == "renoise" else decoder
    return compose(tiny_gemma(), iteration=SWEEP, decoder=decoder, cache=cache, **more)


@pytest.mark.rest(but=3)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "cache", sorted({*CACHES.names()} - {"none", "adaptive", "d2cache", "narrow_block", "narrow_dual"})
)
def test_every_cache_is_exact(cache: str, temperature: float) -> None:
    """What the encoder has read never changes. (`adaptive` does not compute a finished canvas at once.)"""
    got, want = (
        completions(engine_for(recipe), [
            Request.behind(prompt, 20, recipe.resolve({"temperature": temperature, "seed": 3}))
            for prompt in ([1, 2], [5] * 9)
        ])
        for recipe in (recipe_of(cache), recipe_of("none"))
    )  # fmt: skip
    assert [c.canvas for c in got] == [c.canvas for c in want]
    assert [c.counts.committed for c in got] == [c.counts.committed for c in want]


def test_noise_and_draws_belong_to_the_request() -> None:
    recipe = recipe_of()
    seeds = [recipe.resolve({"seed": seed, "temperature": 1.0}) for seed in (0, 1, 0)]
    rows = [
        outcome(c) for c in completions(engine_for(recipe), [Request.behind([1, 2, 3], 18, seed) for seed in seeds])
    ]
    assert rows[0] == rows[2] != rows[1]
    cold = completions(
        engine_for(recipe), [Request.behind([1, 2, 3], 18, recipe.resolve({"seed": seed})) for seed in (0, 1)]
    )
    assert cold[0].canvas != cold[1].canvas  # the canvas begins as noise of the seed


def test_drafts_are_shown_and_noise_is_renewed() -> None:
    """Until a canvas is committed, drafts stand in it beside noise, and all of it is masked."""
    pipe = Pipeline(recipe_of(), None, Runtime())
    result = pipe.generate_ids([[1, 2, 3]], max_new_tokens=2 * CANVAS, options={"steps": 9}, trace=True)[0]
    own = slice(3, 3 + CANVAS)
    before = [canvas[own] for canvas in result.trace or []]
    assert len({tuple(row) for row in before}) > 3
    recipe = recipe_of(decoder={"name": "renoise", "bound": 0.0, "stability": 9})
    updates = [
        *engine_for(recipe).run(
            [Request.behind([1, 2, 3], CANVAS, recipe.resolve({"steps": 4}))], Wants(snapshots=True)
        )
    ]
    drafts = [u.tokens[own] for u in updates if u.tokens and u.phase != Phase.PREFILL]
    kept = [sum(a == b for a, b in zip(*pair, strict=True)) for pair in zip(drafts, drafts[1:-1], strict=False)]
    assert max(kept) < CANVAS and [sum(u.masked or []) for u in updates] == [CANVAS] * 4 + [0]


def test_the_last_canvas_is_decoded_whole() -> None:
    """The model was trained with whole canvases: fewer tokens are the beginning of more, not a shorter canvas."""
    pipe = Pipeline(recipe_of(), None, Runtime())
    asked, more, room = ([1, 2, 3], CANVAS + 1), ([1, 2, 3], 2 * CANVAS), ([1] * 250, 3)
    short, long, last = (pipe.generate_ids([ids], max_new_tokens=n, trace=True)[0] for ids, n in (asked, more, room))
    assert short.canvas == long.canvas[: 3 + CANVAS + 1] and len(short.canvas) == 3 + CANVAS + 1
    assert short.ids == long.ids[: CANVAS + 1] and short.counts.forwards == long.counts.forwards
    assert {len(canvas) for canvas in short.trace or []} == {len(short.canvas)}
    assert len(last.canvas) == 253 and last.counts.committed == CANVAS  # 256 positions are what there is


def test_a_last_canvas_that_has_no_room_is_shorter() -> None:
    recipe = compose(tiny_gemma(), iteration=SWEEP, decoder="threshold", cache="none")
    pipe = Pipeline(recipe, None, Runtime(max_length=10))
    (request,) = pipe.requests([[1, 2, 3]], 4, None)
    assert request.length == 3 + CANVAS
    (request,) = pipe.requests([[1, 2, 3]], 7, None)
    assert request.length == 10
    pipe.engine.check(request)


@pytest.mark.rest(but=5)
@pytest.mark.parametrize("name", sorted({*DECODERS.names()} - NEED_OTHERS))
def test_other_decoders_commit_over_noise(name: str) -> None:
    """Masked is a status: whatever decides over masks decides over noise, and what it leaves open is noise anew."""
    recipe = recipe_of(cache="dual", decoder=name)
    done = completions(engine_for(recipe), [Request.behind([1, 2, 3], 14, recipe.resolve({}))])[0]
    assert done.counts.committed >= done.counts.tokens > 0


def test_what_does_not_fit_is_refused_with_the_reason() -> None:
    for given, reason in (
        ({"iteration": "smooth"}, "adds what it expects to the mask token, and this model has none"),
        ({"iteration": "block_diffusion"}, "Use iteration=.*blockwise"),
        ({"iteration": SWEEP | {"block": 10**9}}, "block=1000000000 is decoded as a whole, but .* 256 positions"),
        ({"sampling": {"name": "standard", "guidance": 1.0}}, "this model has no mask token. Use sampling.guidance=0"),
        ({"model": tiny_model(), "decoder": "threshold"}, "this one was not trained for that"),
        ({"model": tiny_model(), "iteration": "blockwise"}, "decoder=renoise puts uniform noise"),
    ):
        parts: dict[str, Any] = {"iteration": SWEEP, "decoder": "renoise", "cache": "dual"} | given
        with pytest.raises(IncompatibleRecipe, match=reason):
            compose(parts.pop("model", None) or tiny_gemma(), **parts)
    pipe = Pipeline(recipe_of(), None, Runtime())
    with pytest.raises(IncompatibleRecipe, match="no mask token"):
        pipe.generate_ids([[1]], options={"guidance": 1.0})
    with pytest.raises(ValueError, match="diffusion_gemma has no mask token: it generates behind a prompt"):
        pipe.infill_ids([[1, MASK]])
    for wrong in ({"steps": 256}, {"t_min": 0.0}, {"confidence": -1.0}, {"bound": float("nan")}):
        with pytest.raises(ValueError, match=f"decoder.{next(iter(wrong))}="):
            pipe.recipe.resolve(wrong)


def test_an_audit_finds_nothing() -> None:
    found = audit(Pipeline(recipe_of("block"), None, Runtime()), [[1, 2, 3, 4]], max_new_tokens=14)
    assert found.exact and found.same_tokens == 1.0
    assert max(sample.kl_worst for sample in found.samples) < 1e-12 and len(found.samples) > 3


def changed(**text: Any) -> dict[str, Any]:
    return GEMMA | {"text_config": GEMMA["text_config"] | text}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (changed(hidden_activation="relu"), "hidden_activation='relu' is not supported"),
        (changed(use_bidirectional_attention="all"), "use_bidirectional_attention='all' is not supported"),
        (changed(layer_types=["full_attention", "sliding_attention"]), "full_attention for the last"),
        (changed(layer_types=[["sliding_attention"], "full_attention"]), "must name sliding_attention or"),
        (changed(layer_types=["full_attention"]), "layer_types has 1 entries for num_hidden_layers=2"),
        (changed(sliding_window=0), "sliding_window=0 must be an integer, at least 1"),
    ],
)
def test_a_config_that_means_another_network_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DiffusionGemma().spec(config)


def test_a_config_of_the_first_kind_says_the_same() -> None:
    """Checkpoints may give the heads of full layers as `global_head_dim` instead of layer by layer."""
    text = {key: value for key, value in GEMMA["text_config"].items() if key != "per_layer_config"}
    old = GEMMA | {"text_config": text | {"global_head_dim": 16, "num_global_key_value_heads": 1}}
    assert DiffusionGemma().spec(old) == DiffusionGemma().spec(GEMMA)


def test_loading_takes_the_text_part_and_nothing_else(tmp_path: Path) -> None:
    model, cpu = tiny_gemma(dtype=torch.float32), torch.device("cpu")
    save_network(model, DiffusionGemma(), tmp_path, GEMMA)
    tensors = load_file(tmp_path / "model.safetensors")
    again = load_network(tmp_path, DiffusionGemma(), dtype=None, device=cpu)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    save_file(tensors | {"model.encoder.novel": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"unexpected: model\.encoder\.novel"):
        load_network(tmp_path, DiffusionGemma(), dtype=None, device=cpu)
