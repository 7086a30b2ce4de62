"""I-DLM, Nemotron-Labs-Diffusion and WeDLM: drafts change no token, adapters act on drafts alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.families import CONFIGS, SDAR, family_for, random_model
from support.matrix import completions, engine_for
from support.models import tiny_model

from dinfer.core.engine.request import Request
from dinfer.core.loading.checkpoint import family_of, load_network, read_config, read_spec
from dinfer.core.loading.files import CheckpointError
from dinfer.core.recipe.recipe import IncompatibleRecipe, compose
from dinfer.core.registry import MODELS
from dinfer.core.step.ability import Step
from dinfer.core.step.work import Forward
from dinfer.families.abilities.drafting import Drafting
from dinfer.families.decoders import isd as decoders
from dinfer.families.decoders.isd import paths_of
from dinfer.formats.saving import save_network

ISD = {"name": "sliding", "block": 7}, "isd"
SPEC = {"name": "seeded_drafts", "block": 6}, "linear_spec"


def answers(model: Any, iteration: Any, decoder: Any, cache: str = "block", **options: float) -> list[list[int]]:
    recipe = compose(model, iteration=iteration, decoder=decoder, cache=cache)
    prompts = ([1, 2, 3, 4, 5], [7] * 9, [30])
    requests = [Request.behind(prompt, 14, recipe.resolve(options)) for prompt in prompts]
    return [done.output for done in completions(engine_for(recipe), requests)]


@pytest.mark.parametrize("cache", ["none", "block", "block_at_once"])
@pytest.mark.parametrize(("variant", "parts"), [("drafts", ISD), ("two_modes", SPEC)])
def test_drafts_change_no_token(variant: str, parts: Any, cache: str) -> None:
    """Token by token in a causal model, and by verified drafts: the same, with any cache."""
    one_by_one = answers(tiny_model(variant), {"name": "block_diffusion", "block": 1}, "threshold")
    assert answers(tiny_model(variant), *parts, cache) == one_by_one


@pytest.mark.parametrize("cache", ["none", "block"])
def test_masks_that_nobody_reads_are_not_computed(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a correction a row reads as many logits as a step has tokens at most."""
    recipe = compose(tiny_model("drafts"), iteration=ISD[0] | {"stop": "off"}, decoder=ISD[1], cache=cache)
    request, ran = Request.behind([3, 7], 30, recipe.resolve({})), Drafting.ran

    def outcome() -> tuple[list[int], list[int]]:
        """The answer, and how far behind the first open position each forward computes."""
        behind = list[int]()

        def looked(self: Drafting, step: Step, run: Forward) -> None:
            behind.append(int((run.pos_BW[0] - step.lanes.start_B[0]).max()))
            ran(self, step, run)

        monkeypatch.setattr(Drafting, "ran", looked)
        return completions(engine_for(recipe, rows=1), [request])[0].output, behind

    answer, behind = outcome()
    monkeypatch.setattr(decoders.ISD, "looks", None)
    wanted, whole = outcome()
    fewer = [one for one, other in zip(behind, whole, strict=True) if one != other]
    assert answer == wanted and fewer and set(fewer) == {recipe.decoder.stride - 2}


def test_a_tree_of_drafts_changes_no_token_and_takes_fewer_forwards() -> None:
    """One request and several, which share the lanes of a step; what they take is drafted behind each path."""
    model, found = tiny_model("drafts"), []
    for rejected in ("cold", "branches"):
        decoder = {"name": "isd", "rejected": rejected}
        recipe = compose(model, iteration=ISD[0] | {"stop": "off"}, decoder=decoder, cache="block")
        requests = [Request.behind([3 + i, 7], 30, recipe.resolve({})) for i in range(6)]
        done = [*completions(engine_for(recipe, rows=1), requests[:3]), *completions(engine_for(recipe), requests[3:])]
        found.append(([one.output for one in done], sum(one.counts.forwards for one in done)))
    assert found[1][0] == found[0][0] and found[1][1] < found[0][1]


def test_paths_come_from_the_likeliest_drafts_of_each_place() -> None:
    worth_RDK = torch.tensor([[-0.1, -3, -4, -5], [-0.5, -1, -9, -9]]).log_softmax(-1)[None]
    worth_RP, path_RPD = paths_of(worth_RDK, torch.arange(8).view(1, 2, 4))
    paths = [tuple(path) for path in path_RPD[0, worth_RP[0].topk(4).indices].tolist()]
    assert paths == [(0, -1), (0, 4), (0, 5), (1, -1)]  # none without those that begin it


def test_sampled_drafts_have_the_distribution_of_decoding_one_by_one() -> None:
    """The first two tokens of 400 draws: a draft that the draw does not give is not accepted."""
    model, seen = tiny_model("drafts", sharpness=1.5), []
    for parts in (ISD, ({"name": "block_diffusion", "block": 1}, "threshold")):
        recipe = compose(model, iteration=parts[0], decoder=parts[1], cache="block")
        options = [recipe.resolve({"temperature": 1.0, "seed": seed}) for seed in range(400)]
        requests = [Request.behind([1, 2, 3], 3, own) for own in options]
        drawn = [done.canvas[5] for done in completions(engine_for(recipe, rows=100), requests)]
        seen.append(torch.bincount(torch.tensor(drawn), minlength=40) / 400)
    assert (seen[0] - seen[1]).abs().sum() / 2 < 0.25  # two samples of 400 from one distribution differ by 0.15


def adapter(folder: Path, network: Any, family: Any) -> None:
    """Random low-rank parts of all output projections."""
    placements = family.weights(network.spec)
    names = [name.removesuffix(".weight") for name in placements if "o_proj" in name]
    tensors = {}
    for name in names:
        out, inputs = placements[f"{name}.weight"].shape
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(2, inputs)
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(out, 2)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "bias": "none", "target_modules": ["o_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")


@pytest.mark.parametrize(("name", "parts"), [("idlm", ISD), ("nemotron", SPEC)])
def test_an_adapter_of_drafts_changes_drafts_and_no_token(name: str, parts: Any, tmp_path: Path) -> None:
    network, family = random_model(name, torch.float32), family_for(CONFIGS[name])
    save_network(network, family, tmp_path, CONFIGS[name])
    adapter(tmp_path, network, family)
    found = [
        load_network(tmp_path, replace(family, **given), dtype=None, device=torch.device("cpu"))
        for given in ({}, {"draft_adapter": str(tmp_path)})
    ]
    assert answers(found[0], *parts) == answers(found[1], *parts)
    ids_BT = torch.arange(12).view(1, 12) % 36
    plain_BTV = found[0].score(ids_BT, attention="causal")
    assert torch.equal(found[1].score(ids_BT, attention="causal"), plain_BTV)
    with found[1].gate.on(torch.arange(12).view(1, 12) > 6):
        apart_BT = (found[1].score(ids_BT, attention="causal") - plain_BTV).abs().amax(-1) > 1e-4
    assert not apart_BT[:, :7].any() and apart_BT[:, 7:].all()


def test_idlm_is_not_sdar_and_each_family_refuses_the_others_configs() -> None:
    """I-DLM's config is SDAR's with one field more, and was read as SDAR's: its answers were wrong."""
    assert family_of(SDAR) == "sdar" and family_of(SDAR | {"use_regular_causal": True}) == "idlm"
    assert family_of(SDAR | {"_name_or_path": "yifanyu/I-DLM-8B"}) == "idlm"
    for name in ("idlm", "nemotron", "wedlm", "sdar"):
        for other, config in CONFIGS.items():
            if family_of(config) != name:
                with pytest.raises(CheckpointError, match=f"not of .*: give model={family_of(config)}"):
                    read_spec(MODELS.build({"name": name, "checkpoint": other}), config)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("nemotron", {"rope_parameters": None}, "rope_type=None must be 'yarn'"),
        ("nemotron", {"rope_parameters": {"rope_type": "yarn"}}, "factor=None must be a number above 0"),
        ("nemotron", {"dlm_paradigm": "autoregressive"}, "dlm_paradigm='autoregressive' is not supported"),
        ("wedlm", {"attention_bias": True}, "attention_bias=True and qk_norm=True must be true and false"),
        ("idlm", {"rope_scaling": {"type": "yarn"}}, "rope_scaling=.* is not supported"),
    ],
)  # fmt: skip
def test_configs_of_other_networks_are_refused(name: str, fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name] | fields))
    with pytest.raises(CheckpointError, match=message):
        read_spec(MODELS.build({"name": name}), read_config(tmp_path))


def test_blocks_of_masks_that_nobody_taught_a_model_are_refused() -> None:
    with pytest.raises(IncompatibleRecipe, match="behind a token of its causal pass"):
        answers(tiny_model("two_modes"), {"name": "blockwise", "block": 8}, "threshold")
    with pytest.raises(IncompatibleRecipe, match="needs a model that reads blocks of masks bidirectionally"):
        answers(tiny_model("block_causal"), {"name": "seeded", "block": 8}, "threshold")
    with pytest.raises(IncompatibleRecipe, match="candidates of one order alone"):
        recipe = compose(tiny_model("fed_order"), iteration="sliding", decoder="near_entropy", cache="block")
        engine_for(recipe, speculate=2)


@pytest.mark.parametrize(
    ("variant", "iteration", "decoder"),
    [("drafts", *ISD), ("two_modes", *SPEC), ("two_modes", {"name": "seeded", "block": 8}, "threshold"),
     ("fed_order", {"name": "blockwise", "block": 8}, "threshold")],
)  # fmt: skip
def test_keys_that_a_pass_leaves_for_good_are_not_left_out(variant: str, iteration: Any, decoder: str) -> None:
    """With a narrow window, tokens of `seeded` depended on the rows beside them, and drafts changed tokens."""
    with pytest.raises(IncompatibleRecipe, match="cache=narrow_block may keep them"):
        answers(tiny_model(variant), iteration, decoder, "narrow_block")


@pytest.mark.parametrize(
    ("variant", "iteration", "decoder"), [("fed_order", ISD[0], "near_entropy"), ("two_modes", *SPEC)]
)
def test_a_row_whose_positions_depend_on_each_other_takes_one_lane(variant: str, iteration: Any, decoder: str) -> None:
    recipe = compose(tiny_model(variant), iteration=iteration, decoder=decoder, cache="block")
    extras = recipe.extras(Request.behind([1, 2, 3], 14, recipe.resolve({})))
    assert not all(extra.divides for extra in extras)
