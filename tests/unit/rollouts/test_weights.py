"""Updates of the weights under a running engine: afterwards everything is as after a fresh load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.families import CONFIGS, family_for
from support.kernels import CUDA
from support.models import CONFIG, GEMMA
from support.ranks import MODELS as DIVIDED

from dinfer import Pipeline, Runtime, compose
from dinfer.core.loading.checkpoint import load_network
from dinfer.core.recipe import presets
from dinfer.families.models.diffusion_gemma import DiffusionGemma
from dinfer.formats.saving import save_network
from dinfer.lab.random_network import random_network
from dinfer.rollouts import sleeping, writing
from dinfer.rollouts.abilities.versions import MadeWith
from dinfer.rollouts.weights import Aborted, WeightsIncomplete
from dinfer.rollouts.writing import largest

CPU = torch.device("cpu")
CAUSAL = {"cache": "block", "iteration": {"name": "block_diffusion", "block": 8}}
PLAIN = {"cache": "dual", "iteration": {"name": "blockwise", "block": 8}}
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    **{name: (family_for(config), config) for name, config in CONFIGS.items()},
    "diffusion_gemma": (DiffusionGemma(), GEMMA),
    "tied": (family_for(CONFIG), CONFIG | {"weight_tying": True}),
    "wide": DIVIDED["llada, wide"],
    "wide experts": DIVIDED["llada2, wide"],
}
PROMPTS = [[1, 5, 9, 2, 7, 3, 8, 4, 6, 1, 2, 9], [4, 4, 8]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """By model and letter, a folder with other random weights."""
    root = tmp_path_factory.mktemp("checkpoints")

    def folder(model: str, letter: str, experts: str = "separate") -> Path:
        path = root / f"{model} {letter} {experts}"
        if not path.exists():
            family, config = MODELS[model]
            with torch.random.fork_rng():
                torch.manual_seed(ord(letter))
                network = random_network(family, family.spec(config), dtype=torch.float32, device=CPU)
                for parameter in network.parameters():
                    parameter.add_(0.2 * torch.randn_like(parameter))
                network.norm.weight.mul_(4)
            save_network(network, family, path, config, experts)
        return path

    return folder


def parts_of(model: str) -> dict[str, Any]:
    if model == "diffusion_gemma":
        return {
            "cache": "none", "iteration": {"name": "self_conditioned", "block": 8},
            "decoder": {"name": "renoise", "steps": 4},
        }  # fmt: skip
    if model in ("idlm", "nemotron", "wedlm"):
        return presets.chosen("", model).parts() | {"sampling": "standard"}  # nothing is drawn
    causal = MODELS[model][0].spec(MODELS[model][1]).causal_block
    return {"decoder": "threshold"} | (CAUSAL if causal else PLAIN)


def pipeline(folder: Path, model: str, quantize: str | None = None, parts: Any = None, **runtime: Any) -> Pipeline:
    family = MODELS[model][0]
    network = load_network(folder, family, dtype=torch.float32, device=CPU, quantize=quantize)
    recipe = compose(network, **(parts_of(model) | (parts or {})))
    return Pipeline(recipe, None, Runtime(page=4, **runtime), (family, folder))


def answers(pipe: Pipeline, prompts: Any = PROMPTS) -> list[list[int]]:
    return [result.canvas for result in pipe.generate_ids(prompts, max_new_tokens=16)]


def held(pipe: Pipeline) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in (*pipe.model.named_parameters(), *pipe.model.named_buffers())}


def same_as_loaded(pipe: Pipeline, fresh: Pipeline) -> None:
    """Bits, checksums and answers."""
    own, other = held(pipe), held(fresh)
    assert own.keys() == other.keys()
    assert [name for name in own if not torch.equal(own[name], other[name])] == []
    assert pipe.weights.checksums() == fresh.weights.checksums()
    assert answers(pipe) == answers(fresh)


@pytest.mark.rest(but=8)
@pytest.mark.parametrize(
    ("model", "quantize", "experts"),
    [
        *((name, None, "separate") for name in MODELS),
        *(("wide", kind, "separate") for kind in ("fp8", "int8", "int4")),
        *(("wide experts", kind, "separate") for kind in ("fp8", "int8", "int4")),
        *((name, None, how) for name in ("llada2", "sdar_moe") for how in ("merged", "fused")),
        ("wide experts", "int8", "merged"),
    ],
)
def test_an_update_is_a_fresh_load(model: str, quantize: str | None, experts: str, folders: Any) -> None:
    """Nothing moves in memory, so captured graphs would stay."""
    pipe = pipeline(folders(model, "A"), model, quantize)
    before = answers(pipe)
    places = [tensor.data_ptr() for tensor in held_places(pipe)]
    new = load_file(folders(model, "B", experts) / "model.safetensors")
    with pipe.updating(5) as into:
        for name in reversed([*new]):
            into.load(name, new[name])
    assert [tensor.data_ptr() for tensor in held_places(pipe)] == places
    assert pipe.weights.version == 5
    fresh = pipeline(folders(model, "B"), model, quantize)
    same_as_loaded(pipe, fresh)
    assert answers(fresh) != before
    with pipe.updating() as into:
        into.from_folder(folders(model, "A"))
    assert pipe.weights.version == 6 and answers(pipe) == before


def held_places(pipe: Pipeline) -> list[torch.Tensor]:
    return [*pipe.model.parameters(), *pipe.model.buffers()]


def new_weights(folders: Any, model: str, letter: str = "B") -> dict[str, torch.Tensor]:
    return load_file(folders(model, letter) / "model.safetensors")


@pytest.mark.parametrize("runtime", [{"share": True}, {"speculate": 3}, {"share": True, "rows": 1}], ids=str)
def test_nothing_of_the_old_weights_is_used_again(runtime: dict[str, Any], folders: Any) -> None:
    """Pages that prompts share, drafts, and keys of the answer before, which the next turn of a conversation shares."""
    pipe = pipeline(folders("sdar", "A"), "sdar", **runtime)
    turns = [*PROMPTS, answers(pipe, PROMPTS[:1])[0] + [3, 3]]
    answers(pipe, turns)
    batch = pipe.engine.loop.batch
    with pipe.updating() as into:
        into.load_all(new_weights(folders, "sdar"))
    assert answers(pipe, turns) == answers(pipeline(folders("sdar", "B"), "sdar"), turns)
    assert pipe.engine.loop.batch is batch  # neither memory nor graphs were made anew


def test_autograd_sees_an_update(folders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward pass that needs the old weights fails, whichever kernel wrote the new ones."""
    monkeypatch.setattr("dinfer.kernels.cpu.linear.ALL_AT_ONCE", 0)
    pipe = pipeline(folders("sdar", "A"), "sdar")
    losses = [(one.requires_grad_() ** 2).sum() for one in pipe.model.parameters()]
    with pipe.updating() as into:
        into.load_all(new_weights(folders, "sdar"))
    for loss in losses:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.skipif(CUDA, reason="interprets the kernel, on a CPU")
def test_a_plan_serves_what_it_was_made_for_alone(folders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one update finds out is used again for tensors of the same names, shapes and types."""
    copies, made = pytest.importorskip("dinfer.kernels.triton.copies"), list[int]()

    class Seen(copies.Copies):  # type: ignore[misc, name-defined]
        def __init__(self, parts: Any) -> None:
            made.append(len(parts))
            super().__init__(parts)

    monkeypatch.setattr(copies, "Copies", Seen)
    monkeypatch.setattr(writing, "use_triton", lambda *given: True)
    pipe = pipeline(folders("llada", "A"), "llada")
    new, old = (
        {name: one.clone() for name, one in new_weights(folders, "llada", letter).items()}  # files have them anywhere
        for letter in "BA"
    )
    name = max(new, key=lambda one: new[one].dim())

    def check(tensors: Any) -> None:
        own = pipe.weights.tensors()
        assert all(torch.equal(own[one], tensor.to(own[one])) for one, tensor in tensors.items())

    def update(tensors: Any) -> int:
        made.clear()
        with pipe.updating() as into:
            into.load_all(tensors)
        check(tensors)
        return len(made)

    assert update(new_weights(folders, "llada")) == update(old) - 1 == 0 and made == [len(old)]
    assert update(new) == 0
    assert update(old) == update(new) == 0
    assert update({one: tensor.half() for one, tensor in new.items()}) == 1
    assert update(old) == 1 and update(dict(reversed(new.items()))) == 1 and update({name: old[name]}) == 1
    assert update({one: tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor for one, tensor in old.items()}) == 1
    assert made[0] < len(old) and update(new) == 0
    for parameter in pipe.model.parameters():
        parameter.data = parameter.data.clone()
    assert update(old) == 1 and update(new) == 0
    for wrong, told in ((new[name][:-1], "has the shape"), (new[name].to(torch.int8), "must be one of")):
        with pytest.raises(ValueError, match=told), pipe.updating() as into:
            into.load_all(old | {name: wrong})
        check(new)
    norm, pipe.model.norm = pipe.model.norm, torch.nn.Sequential(pipe.model.norm)
    with pytest.raises(ValueError, match="something is around"), pipe.updating() as into:
        into.load_all(old)
    pipe.model.norm = norm
    with pytest.raises(ValueError, match=f"{name} has values that are not finite"), pipe.updating() as into:
        into.load_all(old | {name: torch.full_like(old[name], torch.nan)})
    with pytest.raises(WeightsIncomplete, match=f"an update failed: {name}"):
        answers(pipe)
    assert update(new) == 0


@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
def test_some_tensors_alone(quantize: str | None, folders: Any, tmp_path: Path) -> None:
    """A part of a fused matrix, of one expert, a norm: the others stay as they were."""
    pipe = pipeline(folders("wide experts", "A"), "wide experts", quantize)
    some = {
        name: tensor
        for name, tensor in new_weights(folders, "wide experts").items()
        if "up_proj" in name or "query_key_value" in name or name.endswith("1.input_layernorm.weight")
    }
    assert some
    with pipe.updating() as into:
        into.load_all(some.items())
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    old = new_weights(folders, "wide experts", "A")
    save_file(old | some, mixed / "model.safetensors")
    (mixed / "config.json").write_text((folders("wide experts", "A") / "config.json").read_text())
    same_as_loaded(pipe, pipeline(mixed, "wide experts", quantize))


BAD: dict[str, tuple[Any, str]] = {
    "name": (lambda new, name: {"nothing.weight": new[name]}, "nothing.weight is no tensor of this model"),
    "shape": (lambda new, name: {name: new[name][:-1]}, r"has the shape .* and must have"),
    "dtype": (lambda new, name: {name: new[name].to(torch.int8)}, "is of torch.int8, and must be one of"),
    "array": (
        lambda new, name: {name: new[name].numpy()},
        "must be a dense tensor of torch that has values, not a ndarray",
    ),
    "sparse": (lambda new, name: {name: new[name].to_sparse()}, "not a Tensor on cpu in torch.sparse_coo"),
    "NaN": (lambda new, name: {name: new[name].where(new[name] != new[name].max(), torch.nan)}, "not finite"),
    "infinite": (lambda new, name: {name: new[name].where(new[name] != new[name].max(), torch.inf)}, "not finite"),
}


@pytest.mark.rest(but=5)
@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("fault", BAD)
def test_a_refusal_never_leaves_a_mixture(fault: str, staged: bool, folders: Any) -> None:
    """The old weights, or a pause that says so and ends with an update that writes what was left."""
    pipe, new = pipeline(folders("llada", "A"), "llada"), new_weights(folders, "llada")
    before, (first, *_, last) = answers(pipe), sorted(new)
    spoil, told = BAD[fault]
    with pytest.raises(ValueError, match=told), pipe.updating(staged=staged) as into:
        into.load_all(spoil(new, last))
    if fault not in ("NaN", "infinite") or staged:
        assert answers(pipe) == before
    with pytest.raises(ValueError, match="this update has ended: begin another"):
        into.load(last, new[last])
    with pytest.raises(ValueError, match=told), pipe.updating(7, staged=staged) as into:
        into.load_all(iter({first: new[first]}.items()))
        into.load_all(spoil(new, last).items())
    assert pipe.weights.version == 0
    if staged:
        assert answers(pipe) == before
        return
    with pytest.raises(WeightsIncomplete, match=f"an update failed: .*{first}"):
        answers(pipe)
    with pytest.raises(WeightsIncomplete, match="must be written"), pipe.updating() as into:
        into.load(last, new[last])
    with pipe.updating() as into:
        into.load_all(new)
    assert answers(pipe) == answers(pipeline(folders("llada", "B"), "llada"))


def test_what_cannot_be_meant_is_refused(folders: Any) -> None:
    pipe, new = pipeline(folders("tied", "A"), "tied"), new_weights(folders, "tied")
    ((head, table),) = pipe.origin[0].copies(pipe.model.spec).items()
    with pytest.raises(ValueError, match="pending='later' is not known; use one of"), pipe.updating(pending="later"):
        pass
    with pytest.raises(ValueError, match="version=-1 must be an integer, 0 or more"), pipe.updating(-1):
        pass
    with pytest.raises(ValueError, match="must be an integer, 0 or more, of 64 bits"), pipe.updating(2**63):
        pass
    for work, message in (
        (lambda into: into.load(3, new[table]), "3 is no name of a tensor"),
        (lambda into: into.from_folder("/nope"), "/nope has no config.json"),
        (lambda into: into.lora("/nope"), "/nope has no adapter_config.json"),
        (lambda into: into.open([{"name": table}]), "a handle has no shape"),
        (lambda into: into.open([{"name": table, "shape": 3, "dtype": 3}]), "dtype=3 is not known"),
    ):
        with pytest.raises(ValueError, match=message), pipe.updating() as into:
            work(into)
    with pipe.updating(), pytest.raises(RuntimeError, match="leave the block before you ask"):
        answers(pipe)
    with pipe.updating(), pytest.raises(ValueError, match="another update of these weights is under way"):
        pipe.updating().__enter__()
    with pipe.updating() as into:
        into.load_all({head: new[table], table: new[table]})
    with pytest.raises(ValueError, match=r"differs from .*, and the model has one tensor"), pipe.updating() as into:
        into.load_all({table: new[table], head: new[table] + 1})
    with pytest.raises(ValueError, match="nobody knows the names"), Pipeline(pipe.recipe, None, Runtime()).updating():
        pass


def test_keys_that_are_computed_anew_are_exact(folders: Any) -> None:
    """In the middle of requests a cache that is exact gives what there is without one."""
    found = {}
    for cache, pending in (("none", "recompute"), ("block", "recompute"), ("block", "keep")):
        pipe = pipeline(folders("sdar", "A"), "sdar", parts={"cache": cache, "decoder": {"name": "fixed", "steps": 4}})
        for request in pipe.requests([[*range(1, 30)], PROMPTS[0]], 24, None):
            pipe.engine.add(request)
        done: dict[int, list[int]] = {}
        while len(done) < 2:
            running = pipe.engine.loop.running
            if running and {row.cursors.steps for row in running} == {6} and pipe.weights.version == 0:
                with pipe.updating(pending=pending) as into:
                    into.load_all(new_weights(folders, "sdar"))
            done |= {one.index: one.completion.canvas for one in pipe.engine.step() if one.completion is not None}
        assert pipe.weights.version == 1
        found[cache, pending] = done
    assert found["block", "recompute"] == found["none", "recompute"] != found["block", "keep"]


@pytest.mark.rest(but=4)
@pytest.mark.parametrize("cache", ["none", "dual", "block"])
@pytest.mark.parametrize("pending", ["finish", "abort", "keep", "recompute"])
def test_requests_on_the_way(pending: Any, cache: str, folders: Any) -> None:
    model = "sdar" if cache == "block" else "llada"
    parts = {"cache": cache, "decoder": {"name": "fixed", "steps": 8}}
    pipe, fresh = (pipeline(folders(model, letter), model, parts=parts) for letter in "AB")
    old = answers(pipe)
    engine, requests = pipe.engine, pipe.requests(PROMPTS, 16, None)
    for request in requests:
        engine.add(request)
    updates = [update for _ in range(4) for update in engine.step()]
    canvases = {row.index % 2: row for row in engine.loop.running}
    assert len(canvases) == 2
    with pipe.updating(3, pending=pending) as into:
        into.load_all(new_weights(folders, model))
    steps = [canvases[i].cursors.steps for i in (0, 1)]
    done = {}
    while engine.busy:
        for update in [*updates, *engine.step()]:
            assert update.error is None
            if update.completion is not None:
                done[update.index % 2] = update.completion
        updates = []
    ended = [done[i] for i in (0, 1)]
    made = [told.versions for one in ended if (told := one.counts.tells(MadeWith)) is not None]
    if pending == "finish":
        assert [one.canvas for one in ended] == old and made in ([], [((0, 0),)] * 2)
    elif pending == "abort":
        assert all(one.counts.tells(Aborted) for one in ended) and not all(all(one.decoded[-8:]) for one in ended)
    else:
        assert made == [((0, 0), (3, step)) for step in steps]
        if cache == "none":
            assert [one.canvas for one in ended] != old
    assert answers(pipe) == answers(fresh)


def test_sleep_gives_memory_back_and_wakes_in_stages(folders: Any) -> None:
    """Level 2 forgets the weights: nothing runs before an update has written all of them."""
    pipe, new = pipeline(folders("llada", "A"), "llada"), new_weights(folders, "llada")
    before, weights = answers(pipe), pipe.weights
    for _ in range(3):
        weights.sleep(1)
        with pytest.raises(WeightsIncomplete, match=r"sleeps .*: call wake first"):
            answers(pipe)
        weights.wake()
        assert answers(pipe) == before
    weights.sleep(2)
    assert pipe.engine.loop.batch is None
    assert sum(tensor.nbytes for tensor in held_places(pipe)) == 0
    with pytest.raises(ValueError, match="the weights sleep: wake them first"), pipe.updating():
        pass
    with pytest.raises(ValueError, match="keys and weights sleep already"):
        weights.sleep(1)
    weights.wake(["weights"])
    (first, *rest) = sorted(new)
    with pytest.raises(WeightsIncomplete, match=f"sleep forgot them.*1 tensors .* {first}"), pipe.updating() as into:
        into.load_all({name: new[name] for name in rest})
    with pipe.updating() as into:
        into.load(first, new[first])
    with pytest.raises(WeightsIncomplete, match=r"sleeps .keys."):
        answers(pipe)
    weights.wake(["keys"])
    assert answers(pipe) == answers(pipeline(folders("llada", "B"), "llada"))
    for wrong, told in ((lambda: weights.sleep(3), "level=3 must be"), (lambda: weights.wake(["x"]), "tags='x'")):
        with pytest.raises(ValueError, match=told):
            wrong()


def test_sleep_without_memory_for_the_copies_leaves_the_weights(folders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, made = pipeline(folders("sdar", "A"), "sdar"), list[int]()
    before, plain = answers(pipe), torch.empty_like

    def short(*given: Any, **how: Any) -> torch.Tensor:
        made.append(1)
        if len(made) == 3:
            raise RuntimeError("no memory of the host is left")
        return plain(*given, **how)

    monkeypatch.setattr(torch, "empty_like", short)
    with pytest.raises(RuntimeError, match="no memory of the host"):
        sleeping.forget(pipe.model, True)
    monkeypatch.undo()
    assert answers(pipe) == before
    monkeypatch.setattr(sleeping, "forget", lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        pipe.weights.sleep(2, ["weights", "keys"])
    with pytest.raises(WeightsIncomplete, match=r"sleeps \(keys, weights\): call wake first"):
        answers(pipe)
    pipe.weights.wake()
    assert answers(pipe) == before


def test_memory_is_really_given_back() -> None:
    """So that a trainer in another process has it."""
    family, config = family_for(CONFIG), CONFIG | {"d_model": 512, "mlp_hidden_size": 4096}
    network = random_network(family, family.spec(config), dtype=torch.float32, device=CPU)
    pipe = Pipeline(compose(network, **parts_of("llada")), None, Runtime(page=4), (family, Path()))
    size = sum(tensor.nbytes for tensor in held_places(pipe))
    found = pipe.weights.sleep(2)
    assert size > 50e6 and found["before"] - found["after"] > 0.9 * size


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_largest_value_tells_whether_all_are_finite(dtype: torch.dtype) -> None:
    """As a card looks at them: in one pass, without an overflow of what is finite."""
    values = torch.full((3, 50), -torch.finfo(dtype).max, dtype=dtype)
    assert largest(values).isfinite()
    for bad in (torch.nan, torch.inf, -torch.inf):
        assert not largest(values.index_fill(1, torch.tensor([7]), bad)).isfinite()
