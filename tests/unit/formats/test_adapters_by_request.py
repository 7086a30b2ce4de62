"""Several LoRA adapters over one network: each request has the tokens of the model into which its own is merged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.adapters import WEIGHTS, save_adapter
from support.families import CONFIGS, family_for, random_model
from support.models import GEMMA, tiny_gemma

import dinfer
from dinfer.core.engine.errors import RequestAborted
from dinfer.core.engine.request import Completion
from dinfer.core.loading.files import CheckpointError
from dinfer.core.pipeline import Pipeline
from dinfer.formats.adapters import AdaptedPipeline, load_adapter, unload_adapter
from dinfer.formats.saving import save_network

PROMPT = [*range(1, 13)]  # the same for all, so that their first pages would be shared


@pytest.fixture
def model(tmp_path: Path) -> Callable[..., tuple[Pipeline, list[Path]]]:
    """A model of a family and two adapters of it; with `adapter`, one that is merged."""

    def made(name: str, adapter: Path | None = None, runtime: dict[str, Any] | None = None, **parts: Any) -> Any:
        config = CONFIGS.get(name, GEMMA)
        family = family_for(config)
        if not (tmp_path / "base").exists():
            network: Any = tiny_gemma() if config is GEMMA else random_model(name)
            save_network(network, family, tmp_path / "base", config)
            for rank in (3, 5):
                save_adapter(tmp_path / f"rank{rank}", family, network.spec, rank)
        family = replace(family, checkpoint=str(tmp_path / "base"), adapter=adapter and str(adapter))
        given = {"name": dinfer.MODELS.name_of(family)} | {
            field: value for field in ("checkpoint", "adapter", "mask_id", "stop_ids", "block")
            if (value := getattr(family, field, None))
        }  # fmt: skip
        given |= {"block": 4} if name.startswith("sdar") else {}
        run = dinfer.Runtime(**{"rows": 8, "page": 4} | (runtime or {}))
        pipe = dinfer.load(given, device="cpu", dtype="float64", runtime=run, **parts)
        return pipe, [tmp_path / f"rank{rank}" for rank in (3, 5)]

    return made


def answers(pipes: list[Pipeline], length: int = 8, **options: Any) -> list[list[int]]:
    """All at once, on one engine."""
    requests = [pipe.requests([PROMPT], length, options, stops=False)[0] for pipe in pipes]
    found: dict[int, Completion] = {
        update.index: update.completion for update in pipes[0].engine.run(requests) if update.completion is not None
    }
    return [found[index].canvas for index in range(len(pipes))]


def check(model: Any, name: str, options: dict[str, Any], **how: Any) -> None:
    pipe, folders = model(name, **how)
    alone = [answers([one], **options)[0] for one in (pipe, *(model(name, folder, **how)[0] for folder in folders))]
    first, second = (load_adapter(pipe, folder.name, str(folder)) for folder in folders)
    together = answers([pipe, first, second, first, pipe], **options)
    assert together == [alone[0], alone[1], alone[2], alone[1], alone[0]]
    assert alone[0] != alone[1] != alone[2]
    assert answers([pipe], **options) == [alone[0]]


FAMILIES = [name for name in (*CONFIGS, "diffusion_gemma") if name not in ("llada", "sdar")]


@pytest.mark.parametrize("name", ["llada", "sdar", *(pytest.param(n, marks=pytest.mark.rest) for n in FAMILIES)])
def test_each_row_has_the_tokens_of_its_own_merged_model(name: str, model: Any) -> None:
    check(model, name, {"temperature": 0}, runtime={"share": True})


@pytest.mark.parametrize(
    ("options", "how"),
    [
        ({"guidance": 1.0}, {}),
        ({}, {"runtime": {"speculate": 3}, "cache": "none"}),
        ({}, {"iteration": {"name": "lopa", "block": 4}, "cache": "none"}),
        pytest.param({}, {"cache": "dual", "runtime": {"favour": "throughput"}}, marks=pytest.mark.rest),
        pytest.param({"temperature": 1.0, "seed": 3}, {"runtime": {"positions": 8}}, marks=pytest.mark.rest),
    ],
)
def test_adapters_go_with_branches_and_versions(options: dict[str, Any], how: dict[str, Any], model: Any) -> None:
    check(model, "llada", options, **how)


def test_columns_are_used_anew_and_names_too(model: Any, tmp_path: Path) -> None:
    pipe, (one, other) = model("llada")
    want = answers([load_adapter(pipe, "a", str(one))])
    unload_adapter(pipe, "a")
    base = answers([pipe])
    assert answers([pipe, load_adapter(pipe, "b", str(other))])[0] == base[0]  # stale columns are nobody's
    narrow = save_adapter(tmp_path / "narrow", pipe.origin[0], pipe.model.spec, 2, "q_proj")
    load_adapter(pipe, "a", str(narrow))
    unload_adapter(pipe, "b")
    load_adapter(pipe, "b", str(one))
    assert answers([AdaptedPipeline(pipe, "b")]) == want


def test_the_network_of_an_adapter_scores(model: Any) -> None:
    pipe, (one, _) = model("llada")
    ids = torch.tensor([PROMPT, PROMPT[::-1]])
    torch.testing.assert_close(
        load_adapter(pipe, "a", str(one)).model.score(ids), model("llada", one)[0].model.score(ids)
    )


def test_an_adapter_that_requests_use_stays(model: Any) -> None:
    pipe, (one, _) = model("llada")
    adapted, engine = load_adapter(pipe, "a", str(one)), pipe.engine
    waiting, late = (adapted.requests([PROMPT], 4, None)[0] for _ in range(2))
    number = engine.add(waiting)
    with pytest.raises(ValueError, match="adapter='a' is used by 1 requests: wait for their end"):
        unload_adapter(pipe, "a")
    engine.cancel(number)
    unload_adapter(pipe, "a")
    with pytest.raises(RequestAborted, match="adapter='a' was unloaded before the request began"):  # checked before
        list(engine.run([late]))
    with pytest.raises(ValueError, match="adapter='a' was unloaded"):
        adapted.requests([PROMPT], 4, None)
    load_adapter(pipe, "a", str(one))
    with pytest.raises(ValueError, match="adapter='a' was unloaded"):  # another loading
        adapted.requests([PROMPT], 4, None)


def test_what_does_not_fit_is_refused(model: Any, tmp_path: Path) -> None:
    pipe, (one, other) = model("llada")
    load_adapter(pipe, "a", str(one))
    family, spec = pipe.origin[0], pipe.model.spec
    broken = save_adapter(tmp_path / "broken", family, spec, 1)
    save_file({"base_model.model.x.lora_A.weight": torch.ones(1, 2)}, broken / WEIGHTS)
    head = save_adapter(tmp_path / "head", family, spec, 1, "transformer.ff_out")
    nan = save_adapter(tmp_path / "nan", family, spec, 1)
    save_file({n: t * float("nan") for n, t in load_file(nan / WEIGHTS).items()}, nan / WEIGHTS)
    for name, folder, message in (
        ("a", other, r"adapter='a' is loaded from .*rank3: choose another name, or unload it first"),
        ("a:b", other, "adapter='a:b' must be a name of letters"),
        ("b", broken, "does not fit its adapter_config.json and the checkpoint"),
        ("b", head, "changes model.transformer.ff_out.weight, .*: merge it with model.adapter="),
        ("b", nan, "holds NaN or infinite values"),
        ("b", tmp_path / "none", "unknown checkpoint"),
    ):
        with pytest.raises(ValueError, match=message):
            load_adapter(pipe, name, str(folder))
    with pytest.raises(ValueError, match=r"adapter='b' is not loaded \(loaded are a\)"):
        unload_adapter(pipe, "b")
    with pytest.raises(ValueError, match="nobody knows the names of its tensors"):
        load_adapter(Pipeline(pipe.recipe, None, dinfer.Runtime()), "b", str(other))


def test_an_adapter_that_names_another_base_is_refused(model: Any, tmp_path: Path) -> None:
    pipe, _ = model("llada")
    pipe.origin = (replace(pipe.origin[0], checkpoint="GSAI-ML/LLaDA-8B-Instruct"), pipe.origin[1])
    family, spec = pipe.origin[0], pipe.model.spec
    other = save_adapter(tmp_path / "other", family, spec, 1, base_model_name_or_path="GSAI-ML/LLaDA-8B-Base")
    with pytest.raises(CheckpointError, match=r"base_model_name_or_path='GSAI-ML/LLaDA-8B-Base' is another model than"):
        load_adapter(pipe, "a", str(other))
    same = save_adapter(tmp_path / "same", family, spec, 1, base_model_name_or_path="/training/LLaDA-8B-Instruct")
    load_adapter(pipe, "a", str(same))
