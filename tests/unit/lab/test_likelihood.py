"""Every estimator against plain forwards, recorded runs of published trainers, and what its formula promises."""

from __future__ import annotations

import io
import json
import math
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import tiny_model
from torch import Tensor

from dinfer.core.layers.transformer import WholeAttend
from dinfer.core.terms.spec import ExpertSpec
from dinfer.lab.likelihood import LIKELIHOODS, Likelihood, Mask, Passes, Samples, combine, logps, passes
from tests.parity.check import check
from tests.parity.golden import Golden

RECORDED = Path(__file__).parents[2] / "goldens-rollouts"
SHARED = Path(__file__).parents[4] / "shared" / "goldens-rollouts"
NAMES = [
    "block_masking", "coupled", "diffu_grpo", "ebpo", "elbo", "espo", "gdpo", "left_to_right", "random_pairs",
    "random_ratio", "spg", "tracerl", "tracerl_block", "trajectory", "trajectory_block", "vrpo",
]  # fmt: skip
PAIRS = [([1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11, 12, 13, 14]), ([9, 3], [4, 4, 5, 6, 38, 38, 38])]
STEPS = [[0, 1, 0, 2, 4, 4, 3, 5, 6], [3, 3, 1, 0, 2, 4, 4]]
VARIANTS: dict[str, dict[str, Any]] = {
    "bidirectional": {}, "shifted": {}, "block_causal": {}, "causal": {},
    "block_causal shifted": {"shift": 1}, "block_causal prompt": {"prompt_block": True},
}  # fmt: skip


def model_of(variant: str) -> Any:
    return tiny_model(variant.split()[0], **VARIANTS[variant])


def samples(**given: Any) -> Samples:
    return Samples.of(PAIRS, **{"steps": STEPS, **given})


def plain(model: Any, drawn: Passes) -> tuple[Tensor, int]:
    """What one forward a pass gives, block-causal ones of the clean and the masked text side by side; positions fed."""
    found, fed = [], 0
    for m, n in enumerate(drawn.sequence_M.tolist()):
        length = int(drawn.length_N[n])
        ids_T, place_T = drawn.ids_NT[n, :length], torch.arange(length)
        noisy_T = ids_T.masked_fill(drawn.masked_MT[m, :length], drawn.mask_id)
        own_X = drawn.place_X[drawn.pass_X == m]
        tokens_W, pos_W, seen_WW, read_X = noisy_T, place_T, None, own_X - drawn.shift
        if drawn.block_NT is not None:
            block_T = drawn.block_NT[n, :length]
            tokens_W, pos_W = torch.cat((ids_T, noisy_T)), torch.cat((place_T, place_T))
            block_W, noisy_W = torch.cat((block_T, block_T)), torch.arange(2 * length) >= length
            earlier_WW, same_WW = block_W < block_W[:, None], block_W == block_W[:, None]
            seen_WW = torch.where(noisy_W, same_WW & noisy_W[:, None], earlier_WW | (same_WW & ~noisy_W[:, None]))
            read_X = torch.where(block_T[read_X] < block_T[own_X], read_X, read_X + length)
        attend = WholeAttend(pos_W[None], None if seen_WW is None else seen_WW[None])
        logits_WV = model.logits(model(model.embed(tokens_W[None]), attend))[0]
        guidance = drawn.options.get("guidance", 0)
        if guidance:
            bare_W = tokens_W.masked_fill(pos_W < drawn.prompt_N[n], drawn.mask_id)
            bare_WV = model.logits(model(model.embed(bare_W[None]), attend))[0]
            logits_WV = bare_WV + (guidance + 1) * (logits_WV - bare_WV)
        logp_WV = (logits_WV / drawn.options.get("temperature", 1.0)).log_softmax(-1)
        found.append(logp_WV[read_X, ids_T[own_X]])
        fed += len(tokens_W)
    return torch.cat(found), fed


def test_all_of_the_issue_are_registered() -> None:
    assert LIKELIHOODS.names() == NAMES
    assert all(LIKELIHOODS.describe(name).summary and LIKELIHOODS.get(name).paper for name in NAMES)


@pytest.mark.rest(but=3)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_estimator_gives_what_plain_forwards_give(variant: str) -> None:
    """Whatever is batched together, and whatever of a clean text is computed once."""
    model = model_of(variant)
    able = [name for name in NAMES if LIKELIHOODS.get(name)().incompatibility(model.spec) is None]
    assert {"elbo", "vrpo", "trajectory", "left_to_right"} < set(able) and len(able) in (8, 12)
    for name in able:
        options = {"guidance": 0.5} if name in ("elbo", "diffu_grpo") else {}
        options |= {"samples": 4} if name in ("elbo", "vrpo", "ebpo") else {}
        drawn = passes(name, model.spec, samples(), seed=3, **options)
        want_X, _ = plain(model, drawn)
        assert want_X.isfinite().all() and len(want_X) > 0
        for size in (1, 40, 10_000):
            torch.testing.assert_close(logps(model, drawn, batch_tokens=size, grad=False), want_X, msg=f"{name} {size}")


def test_clean_text_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half the positions of doubled sequences, or fewer."""
    model, fed = tiny_model("block_causal"), []
    embed = model.embed
    monkeypatch.setattr(model, "embed", lambda tokens_BW: fed.append(tokens_BW.numel()) or embed(tokens_BW))
    pairs = [([1, 2, 3, 4], [*range(5, 25)])]
    for name, options in (("ebpo", {"samples": 8}), ("elbo", {"samples": 8}), ("trajectory_block", {})):
        given = Samples.of(pairs, steps=[[(i * 7) % 4 + i // 4 * 4 for i in range(20)]])
        drawn = passes(name, model.spec, given, **options)
        want_X, doubled = plain(model, drawn)
        fed.clear()
        torch.testing.assert_close(logps(model, drawn), want_X)
        assert sum(fed) <= doubled / 2 + 24, name  # 24: of the clean text, once
        fed.clear()
        logps(model, drawn, batch_tokens=30)
        assert sum(fed) <= doubled / 2 + 24, name


@pytest.mark.parametrize(("name", "variant"), [("tracerl", "bidirectional"), ("ebpo", "block_causal")])
def test_gradients_are_those_of_differences(name: str, variant: str) -> None:
    model = tiny_model(variant).requires_grad_()
    drawn = passes(name, model.spec, samples())
    combine(drawn, logps(model, drawn)).sequence.sum().backward()
    weight = model.blocks[0].qkv.weight
    direction = torch.sin(torch.arange(weight.numel(), dtype=weight.dtype)).view_as(weight)
    values = []
    for step in (1e-5, -2e-5):
        with torch.no_grad():
            weight.add_(step * direction)
        values.append(float(combine(drawn, logps(model, drawn, grad=False)).sequence.sum()))
    assert float((weight.grad * direction).sum()) == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-4)
    assert not logps(model, drawn, grad=False).requires_grad


@pytest.mark.parametrize("task", [None, "CAUSAL_LM"])
def test_an_adapter_of_peft_trains(task: str | None) -> None:
    peft = pytest.importorskip("peft")
    model = tiny_model(dtype=torch.float32)
    if task is not None:
        model.prepare_inputs_for_generation = None  # as docs/fine_tune.md says
    config = peft.LoraConfig(r=2, target_modules=["qkv", "out"], init_lora_weights=False, task_type=task)
    wrapped = peft.get_peft_model(model, config)
    drawn = passes("diffu_grpo", model.spec, samples())
    combine(drawn, logps(wrapped, drawn)).sequence.sum().backward()
    grads = {n: p.grad for n, p in wrapped.named_parameters() if p.requires_grad}
    assert grads and all(grad is not None and float(grad.abs().sum()) > 0 for grad in grads.values())


@pytest.mark.parametrize(
    ("name", "variant", "options"),
    [
        ("espo", "bidirectional", {"coupled": False, "samples": 600}),
        ("espo", "bidirectional", {"samples": 400}),
        ("gdpo", "bidirectional", {"nodes": 2, "samples": 1200}),  # exact in t for answers of up to four tokens
        ("vrpo", "bidirectional", {"samples": 600}),
        ("ebpo", "block_causal", {"samples": 600}),
    ],
)
def test_bounds_have_one_expectation(name: str, variant: str, options: dict[str, Any]) -> None:
    """That of elbo, in which every subset of masks is enumerated."""
    model, given = tiny_model(variant, sharpness=1.0), Samples.of([([1, 2, 3, 4], [5, 6, 7])])
    chosen = [torch.tensor([bool(n >> i & 1) for i in range(3)]) for n in range(1, 8)]
    masks = [Mask(0, torch.cat((torch.zeros(4, dtype=torch.bool), masked_A)), k) for k, masked_A in enumerate(chosen)]
    drawn = passes("elbo", model.spec, given, masks=masks)
    share_K = torch.tensor([1 / 3 / math.comb(3, int(masked_A.sum())) for masked_A in chosen])
    exact = float((combine(drawn, logps(model, drawn, grad=False)).per_sample[:, 0] * share_K).sum())
    drawn = passes(name, model.spec, given, seed=1, **options)
    found = combine(drawn, logps(model, drawn, grad=False))
    assert abs(float(found.sequence) - exact) < 4 * float(found.error) < abs(exact) / 10


def test_left_to_right_is_the_chain_rule() -> None:
    model, (prompt, answer) = tiny_model(), PAIRS[0]
    want = [
        float(model.score(torch.tensor([[*prompt, *answer[:t], *[model.spec.mask_id] * (len(answer) - t)]]))[
            0, len(prompt) + t
        ].log_softmax(-1)[answer[t]])
        for t in range(len(answer))
    ]  # fmt: skip
    drawn = passes("left_to_right", model.spec, samples())
    found = combine(drawn, logps(model, drawn, grad=False))
    assert found.per_token[0, 0].tolist() == pytest.approx(want)
    assert float(found.sequence[0]) == pytest.approx(sum(want))


@pytest.mark.parametrize("case", ["trajectory_01_llada", "trajectory_08_llada2_moe"])
def test_a_recorded_run_is_replayed(case: str) -> None:
    """The log-probabilities at which a published rollout committed its tokens."""
    doc = json.loads((RECORDED / "trajectory" / f"{case}.json").read_text())
    model = Golden(RECORDED.parent / "goldens").network(f"models/{doc['family']}", doc["family"])
    spec = replace(model.spec, mask_id=doc["mask_id"], eos_id=doc["eos_id"], stop_ids=(doc["eos_id"],))
    one = doc["sequences"][0]
    given = Samples.of([(one["prompt"], one["answer"])], steps=[doc["expected"]["step_map"]],
                       block=doc["params"]["block"])  # fmt: skip
    drawn = passes("trajectory", spec, given)
    found = combine(drawn, logps(model, drawn, grad=False))
    want = torch.tensor(doc["expected"]["commit_logps"], dtype=torch.float64)
    torch.testing.assert_close(found.per_token[0, 0], want, atol=2e-4, rtol=2e-4)
    assert found.counted.all() and float(found.sequence) == pytest.approx(doc["expected"]["sequence"], rel=5e-4)


def test_recorded_estimates_of_published_trainers() -> None:
    folder = SHARED if SHARED.is_dir() else RECORDED
    report = check(folder)
    assert [result for result in report.results if result.outcome == "failed"] == []
    assert report.count("passed") == (83 if SHARED.is_dir() else 16) and not report.skips()
    for path in RECORDED.rglob("*.json") if SHARED.is_dir() else ():
        assert path.read_bytes() == (SHARED / path.relative_to(RECORDED)).read_bytes(), path


@pytest.mark.parametrize(
    ("case", "path", "difference"),
    [
        ("elbo/elbo_04_llada", ("expected", "sequence"), "sequence"),
        ("spg/spg_02_llada", ("expected", "upper", 1), "upper[1]"),
        ("ebpo/ebpo_01_llada2_moe", ("expected", "per_sample", 1, 1), "per_sample[1, 1]"),
        ("tracerl/tracerl_06_dream", ("step_maps", 0, 6), "masks"),
        ("coupled/coupled_04_dream", ("passes", 0, "logps", 2), "passes[0].logps"),
        ("espo/espo_03_llada", ("passes", 0, "tokens", 12), "passes[0].logps"),
    ],
)
def test_a_wrong_number_fails(tmp_path: Path, case: str, path: Any, difference: str) -> None:
    doc = part = json.loads((RECORDED / f"{case}.json").read_text())
    *inner, last = path
    for key in inner:
        part = part[key]
    if (masked := part[last] == doc["mask_id"]) or last == 12:
        part[last] = doc["sequences"][0]["answer"][2] if masked else doc["mask_id"]
    else:
        part[last] += 1
    target = tmp_path / "goldens-rollouts" / f"{case}.json"
    target.parent.mkdir(parents=True)
    target.write_text(json.dumps(doc))
    (tmp_path / "goldens").symlink_to(RECORDED.parent / "goldens")
    (result,) = check(tmp_path / "goldens-rollouts").results
    assert result.outcome == "failed" and difference in result.remark
    shutil.rmtree(tmp_path / "goldens-rollouts")


@pytest.mark.parametrize("name", ["elbo", "spg", "random_pairs", "diffu_grpo", "espo", "gdpo"])
def test_passes_are_a_function_of_the_seed_and_can_be_sent(name: str) -> None:
    model = tiny_model()
    one, again, other = (passes(name, model.spec, samples(), seed=seed) for seed in (7, 7, 8))
    assert one.masked_MT.equal(again.masked_MT) and not (
        one.masked_MT.shape == other.masked_MT.shape and one.masked_MT.equal(other.masked_MT)
    )
    file = io.BytesIO()
    torch.save(one.state(), file)
    sent = Passes.of(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    want = combine(one, logps(model, one, grad=False)).sequence
    torch.testing.assert_close(combine(sent, logps(model, sent, grad=False)).sequence, want)


def test_an_estimator_of_ones_own_is_one_class() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Halves(Likelihood):
        """The first half of the answer, masked."""

        def draw(self, texts: Any, seed: int) -> Any:
            for text in texts:
                yield Mask(text.index, text.masks(torch.arange(text.answer) < text.answer // 2))

    LIKELIHOODS.register("halves")(Halves)
    try:
        model = tiny_model()
        drawn = passes("halves", model.spec, samples())
        found = combine(drawn, logps(model, drawn, grad=False))
        assert found.counted.sum(1).tolist() == [4, 3]
        torch.testing.assert_close(found.per_token[0].sum(1), found.sequence)
    finally:
        LIKELIHOODS.unregister("halves")


@pytest.mark.parametrize(
    ("name", "variant", "given", "options", "message"),
    [
        ("elbow", "bidirectional", {}, {}, "unknown likelihood 'elbow'. Did you mean 'elbo'"),
        ("elbo", "bidirectional", {}, {"sample": 3}, "Did you mean 'samples'"),
        ("elbo", "bidirectional", {}, {"samples": 0}, "likelihood.samples=0 must be at least 1"),
        ("diffu_grpo", "block_causal", {}, {}, "is block-causal. Use one of: block_masking, ebpo, elbo"),
        ("ebpo", "bidirectional", {}, {}, "is bidirectional. Use one of: coupled, diffu_grpo"),
        ("tracerl", "bidirectional", {"steps": None}, {}, "give the samples its `steps`"),
        ("trajectory", "bidirectional", {"steps": [[0] * 9, [0, 1, 2, -2, 3, 4, 5]]}, {}, "sample 1: .* position 3"),
        ("vrpo", "uniform", {}, {}, "uniform noise, not on masks"),
    ],
)
def test_what_cannot_be_had_is_named(name: str, variant: str, given: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        passes(name, tiny_model(variant).spec, samples(**given), **options)


def test_what_does_not_fit_is_named() -> None:
    model = tiny_model()
    drawn = passes("vrpo", model.spec, samples(), samples=1)
    with pytest.raises(ValueError, match="logps must be of shape"):
        combine(drawn, torch.zeros(3))
    with pytest.raises(ValueError, match="these passes are of another family"):
        logps(tiny_model("shifted"), drawn)
    with pytest.raises(ValueError, match="these passes are of a bidirectional model"):
        logps(tiny_model("block_causal"), drawn)
    with pytest.raises(ValueError, match="Sequential hides the methods of the network"):
        logps(torch.nn.Sequential(model), drawn)
    with pytest.raises(ValueError, match="takes no such argument"):
        combine(drawn, logps(model, drawn), positive=[True, True])
    with pytest.raises(ValueError, match="lengths must be 1 numbers from 0 to 2"):
        Samples(prompt_ids=torch.ones(1, 2, dtype=torch.int64), prompt_lengths=torch.tensor([2]),
                answer_ids=torch.ones(1, 2, dtype=torch.int64), lengths=torch.tensor([3]))  # fmt: skip
    spec = replace(model.spec, experts=ExpertSpec(experts=4, chosen=2, width=8, capacity=2))
    with pytest.raises(ValueError, match="expert_capacity"):
        passes("elbo", spec, samples())
