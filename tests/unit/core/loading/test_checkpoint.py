"""Loading is strict: what a checkpoint lacks, adds or does otherwise is listed, and nothing is guessed."""

from __future__ import annotations

import json
from fnmatch import fnmatch
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from huggingface_hub.errors import HFValidationError
from safetensors.torch import load_file, save_file
from support.models import CONFIG, MASK, tiny_model

import dinfer.core.loading.files as files
import dinfer.families.hub as hub
from dinfer.core.loading.checkpoint import load_network, read_config, read_spec
from dinfer.core.loading.files import CheckpointError, locate
from dinfer.core.models.llada import Llada
from dinfer.core.pipeline import load
from dinfer.core.registry import MODELS
from dinfer.formats.saving import save_network

CPU = torch.device("cpu")
ROOT = "model.transformer"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_network(tiny_model(dtype=torch.float32), Llada(), tmp_path, CONFIG)
    return tmp_path


def reading(folder: Path, dtype: torch.dtype | None = None) -> Any:
    return load_network(folder, Llada(), dtype=dtype, device=CPU)


def rewrite(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def reconfigure(folder: Path, **fields: Any) -> None:
    config = {k: v for k, v in (CONFIG | fields).items() if v is not ...}
    (folder / "config.json").write_text(json.dumps(config))


def test_round_trip(folder: Path) -> None:
    want = dict(tiny_model(dtype=torch.float32).named_parameters())
    network = reading(folder)
    assert all(torch.equal(p, want[name]) for name, p in network.named_parameters())
    assert not any(p.requires_grad for p in network.parameters()) and not network.training
    ids = torch.arange(12)[None]
    assert torch.equal(network.score(ids), tiny_model(dtype=torch.float32).score(ids))


def test_the_file_has_the_names_of_the_hub(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    block = {"attn_norm", "q_proj", "k_proj", "v_proj", "attn_out", "ff_norm", "ff_proj", "up_proj", "ff_out"}
    want = {f"{ROOT}.{name}.weight" for name in ("wte", "ln_f", "ff_out")}
    want |= {f"{ROOT}.blocks.{i}.{name}.weight" for i in range(CONFIG["n_layers"]) for name in block}
    assert set(tensors) == want
    assert tensors[f"{ROOT}.blocks.0.k_proj.weight"].shape == (16, 32)


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wanted", [None, torch.float64, torch.bfloat16])
def test_any_float_dtype(folder: Path, stored: torch.dtype, wanted: torch.dtype | None) -> None:
    before = load_file(folder / "model.safetensors")
    rewrite(folder, lambda tensors: tensors.update({name: t.to(stored) for name, t in tensors.items()}))
    network = reading(folder, wanted)
    assert network.dtype == (wanted or stored)
    want = before[f"{ROOT}.wte.weight"].to(stored).to(wanted or stored)
    assert torch.equal(network.embedding.weight, want)


def test_a_tied_head_has_no_tensor_of_its_own(tmp_path: Path) -> None:
    config = CONFIG | {"weight_tying": True}
    save_network(tiny_model("shifted"), Llada(), tmp_path, config)
    assert f"{ROOT}.ff_out.weight" not in load_file(tmp_path / "model.safetensors")
    assert reading(tmp_path).head is None


def shard(folder: Path) -> dict[str, str]:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    where = {name: f"model-{1 + i % 3:05}-of-00003.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(where.values()):
        save_file({name: tensors[name] for name in tensors if where[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return where


def test_shards(folder: Path) -> None:
    want = reading(folder).state_dict()
    shard(folder)
    assert all(torch.equal(t, want[name]) for name, t in reading(folder).state_dict().items())


def test_a_shard_that_is_not_there_is_named(folder: Path) -> None:
    shard(folder)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"names files that are not there: model-00002-of-00003\.safetensors$"):
        reading(folder)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": []}'])
def test_an_index_that_is_none(folder: Path, text: str) -> None:
    shard(folder)
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        reading(folder)


def test_every_difference_is_listed_at_once(folder: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[f"{ROOT}.blocks.1.up_proj.weight"]
        tensors[f"{ROOT}.blocks.0.q_proj.bias"] = torch.zeros(32)
        tensors[f"{ROOT}.ln_f.weight"] = torch.zeros(31)
        tensors[f"{ROOT}.wte.weight"] = tensors[f"{ROOT}.wte.weight"].to(torch.int8)

    rewrite(folder, change)
    with pytest.raises(CheckpointError) as error:
        reading(folder)
    text = str(error.value)
    assert str(folder) in text
    for line in (
        f"missing: {ROOT}.blocks.1.up_proj.weight",
        f"unexpected: {ROOT}.blocks.0.q_proj.bias",
        f"shape of {ROOT}.ln_f.weight: (31,), must be (32,)",
        f"dtype of {ROOT}.wte.weight: I8, must be one of F64, F32, F16, BF16",
    ):
        assert line in text


def test_a_long_list_of_differences_is_cut(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({f"extra.{i:02}": torch.zeros(1) for i in range(30)}))
    with pytest.raises(CheckpointError, match="and 10 more") as error:
        reading(folder)
    assert str(error.value).count("unexpected") == 20


@pytest.mark.parametrize(
    ("renamed", "told"),
    [("module.{}", "names begin with 'module.'"), ("_orig_mod.{}", "names begin with '_orig_mod.'"),
     ("{}", "names do not begin with 'model.'")],
)  # fmt: skip
def test_names_of_a_wrapper_or_of_a_part_are_told_in_a_sentence(folder: Path, renamed: str, told: str) -> None:
    """As DistributedDataParallel, torch.compile and the state of `model.model` leave them."""
    tensors = load_file(folder / "model.safetensors")
    names = {name: name.removeprefix("model.") if renamed == "{}" else renamed.format(name) for name in tensors}
    save_file({names[name]: tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=told) as error:
        reading(folder)
    assert "missing" not in str(error.value) and "unexpected" not in str(error.value)


def test_a_config_that_windows_wrote(folder: Path) -> None:
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    assert read_config(folder) == json.loads(text)


def test_a_tensor_that_two_shards_have_is_the_one_that_the_index_names(folder: Path) -> None:
    shard(folder)
    want = reading(folder).state_dict()
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    first = next(name for name, file in index.items() if "00001" in file)
    last = folder / "model-00003-of-00003.safetensors"
    tensors = load_file(last)
    save_file(tensors | {first: load_file(folder / index[first])[first] + 1}, last)
    assert all(torch.equal(t, want[name]) for name, t in reading(folder).state_dict().items())


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_what_git_lfs_left_is_named(folder: Path, name: str) -> None:
    (folder / name).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(CheckpointError, match=rf"{name} is a pointer .* `git lfs pull`"):
        load(str(folder))


def test_a_file_that_is_cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated, .* bytes .*Get it once more"):
        reading(folder)


def test_shards_without_their_index(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    with pytest.raises(CheckpointError, match=r"put the index beside model-00001-of-00001\.safetensors"):
        reading(folder)
    (folder / "model-00001-of-00001.safetensors").unlink()
    with pytest.raises(CheckpointError, match="its weights are not there"):
        reading(folder)


def test_pickles_are_not_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor .* \(pytorch_model\.bin\) are not read"):
        reading(folder)


@pytest.mark.parametrize("text", ["{", "", "[1, 2]", '"llada"', "null"])
def test_a_config_that_is_none(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load(str(folder))


def test_a_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        locate(str(tmp_path))
    (tmp_path / "a.gguf").touch()
    with pytest.raises(CheckpointError, match=r"give one of its GGUF files, such as .*a\.gguf$"):
        locate(str(tmp_path))


@pytest.mark.parametrize(
    "name",
    ["d_model", "n_heads", "n_layers", "vocab_size", "mask_token_id", "eos_token_id", "max_sequence_length",
     "rope_theta", "rms_norm_eps", "weight_tying", "rope", "block_type"],
)  # fmt: skip
def test_a_config_field_that_is_missing_is_named(folder: Path, name: str) -> None:
    gone = {name: ...} | ({"embedding_size": ...} if name == "vocab_size" else {})
    reconfigure(folder, **gone)
    with pytest.raises(ValueError, match=rf"config\.json.*{name}"):
        reading(folder)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block_type": "sequential"}, "block_type='sequential' is not supported; only 'llama' is"),
        ({"layer_norm_type": "default"}, "layer_norm_type='default'"),
        ({"activation_type": "gelu"}, "activation_type='gelu'"),
        ({"rope": False}, "rope=False"),
        ({"alibi": True}, "alibi=True"),
        ({"include_bias": True}, "include_bias=True"),
        ({"include_qkv_bias": True}, "include_qkv_bias=True"),
        ({"attention_layer_norm": True}, "attention_layer_norm=True"),
        ({"scale_logits": True}, "scale_logits=True"),
        ({"input_emb_norm": True}, "input_emb_norm=True"),
        ({"clip_qkv": 8.0}, "clip_qkv=8.0"),
        ({"n_heads": 5}, "n_heads=5 must be a divisor of d_model=32"),
        ({"n_kv_heads": 3}, "n_kv_heads=3 must be a divisor of n_heads=4"),
        ({"n_heads": 32, "n_kv_heads": 32}, "head_dim=1 even"),
        (
            {"mask_token_id": None},
            r"no mask_token_id.* \[126336\], is outside the vocabulary of 40. Give model\.",
        ),
        ({"mask_token_id": 40}, r"config\.json: mask_token_id=40 is outside the vocabulary of 40"),
        ({"mask_token_id": 38}, r"config\.json: mask_token_id=38 is a stop token as well: eos_token_id=\[38, 28\]"),
        ({"eos_token_id": None}, r"no eos_token_id.* \[126081\], is outside the vocabulary of 40. Give model.stop_ids"),
        ({"n_heads": 0}, "n_heads=0"),
        ({"n_layers": 0}, "n_layers=0 must be an integer, at least 1"),
        ({"d_model": "abc"}, r"config\.json: d_model='abc' must be an integer"),
        (
            {"vocab_size": 900, "embedding_size": 800},
            "vocab_size=900 must be at most embedding_size=800",
        ),
        ({"mlp_hidden_size": 48.5}, "mlp_hidden_size=48.5 must be an integer"),
    ],
)
def test_config_values_that_are_not_supported(folder: Path, fields: dict[str, Any], message: str) -> None:
    reconfigure(folder, **fields)
    with pytest.raises(ValueError, match=message):
        read_spec(Llada(), read_config(folder))


def test_a_model_of_another_family() -> None:
    with pytest.raises(CheckpointError, match="is of the family 'dream', not of Llada: give model=dream"):
        read_spec(Llada(), {"model_type": "Dream", "architectures": ["DreamModel"]})


def test_fields_are_read_not_assumed() -> None:
    spec = Llada(stop_ids=(7,)).spec(CONFIG | {"mask_token_id": 3, "eos_token_id": [5, 6], "embedding_size": 48})
    assert (spec.mask_id, spec.eos_id, spec.stop_ids, spec.vocab) == (3, 5, (5, 6, 7), 48)
    assert Llada().spec(CONFIG | {"mlp_hidden_size": None, "mlp_ratio": 3}).mlp == 96
    assert Llada().spec(CONFIG | {"embedding_size": None}).vocab == 40
    assert Llada().spec(CONFIG | {"n_kv_heads": None, "multi_query_attention": True}).kv_heads == 1
    assert Llada().spec(CONFIG | {"n_kv_heads": None}).kv_heads == 4
    assert Llada().spec(CONFIG).mask_id == MASK


@pytest.mark.parametrize("config", [{"model_type": "bert"}, {}, {"model_type": None, "architectures": ["X"]}])
def test_an_unknown_family_lists_the_known(folder: Path, config: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=f"no family that dinfer knows. Known: .*{MODELS.names()[0]}"):
        load(str(folder))


def test_an_moe_is_not_loaded_as_a_dense_model(folder: Path) -> None:
    """Both have the model_type "llada"."""
    reconfigure(folder, num_experts=64, architectures=["LLaDAMoEModelLM"])
    with pytest.raises(CheckpointError):
        reading(folder)


@pytest.mark.parametrize("stop_ids", [(-1,), (1.5,), (True,), ("a",)])
def test_stop_ids_are_token_ids(stop_ids: tuple) -> None:
    with pytest.raises(ValueError, match="stop_ids"):
        Llada(stop_ids=stop_ids)


def test_a_hub_name_downloads_data_and_never_code(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    asked: dict[str, Any] = {}

    def snapshot_download(name: str, **given: Any) -> str:
        asked.update(given, name=name)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    monkeypatch.setattr(hub, "reachable", lambda url: True)
    monkeypatch.chdir(folder)  # where there is no folder of that name
    assert locate("GSAI-ML/LLaDA-8B-Base", "abc") == folder
    assert (asked["name"], asked["revision"]) == ("GSAI-ML/LLaDA-8B-Base", "abc")
    allowed = asked["allow_patterns"]

    def fetched(file: str) -> bool:
        return any(fnmatch(file, pattern) for pattern in allowed)

    data = ["config.json", "model-00001-of-00006.safetensors", "tokenizer.json", "chat_template.jinja"]
    code = ["modeling_llada.py", "pytorch_model.bin", "x.pt", "x.pkl", "x.ckpt", "x.pth", "run.sh"]
    assert all(map(fetched, data)) and not any(map(fetched, code))


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "http://no-such-host.invalid"])
def test_without_network_the_error_names_the_model_and_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, url: str
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub, "getproxies", dict)
    message = rf"GSAI-ML/LLaDA-1\.5 is not in .*, and {url} cannot be reached: .*hf download .*model\.checkpoint=FOL"
    with pytest.raises(CheckpointError, match=message):
        locate("GSAI-ML/LLaDA-1.5")


def test_what_the_hub_refuses_is_an_error_of_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(name: str, **given: Any) -> str:
        raise HFValidationError("Repository\n\nNot Found.")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    monkeypatch.setattr(hub, "reachable", lambda url: True)
    with pytest.raises(CheckpointError, match=r"a/b cannot be read: Repository Not Found\. Check the name"):
        locate("a/b")


def test_a_network_that_swallows_everything_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would wait for ever is left behind."""
    monkeypatch.setattr(hub, "getproxies", dict)
    monkeypatch.setattr(hub, "PATIENCE", 0.01)
    monkeypatch.setattr(hub.socket, "create_connection", lambda *args, **kwargs: Event().wait())
    assert not hub.reachable("https://huggingface.co")


def test_what_is_in_the_cache_loads_without_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (tmp_path / "models--a--b" / "refs").mkdir()
    (tmp_path / "models--a--b" / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub, "reachable", lambda url: False)
    assert locate("a/b") == snapshot
    cached = tmp_path / "models--a--b"
    assert locate(str(cached)) == snapshot, "a folder of the cache stands for its branch main"
    (cached / "snapshots" / ("1" * 40)).mkdir()
    assert locate(str(cached)) == snapshot
    (cached / "refs" / "main").unlink()
    with pytest.raises(CheckpointError, match="has 2 snapshots: give one of them"):
        locate(str(cached))


def test_a_name_that_is_nothing_gets_a_suggestion(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(files, "boxed", lambda needed: ["tiny"] if needed == "config.json" else [])
    with pytest.raises(CheckpointError, match=r"Did you mean 'tiny'\? Known: tiny\. A folder, a GGUF file or a hub"):
        locate("tny")
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match="is a file: give the folder of a checkpoint"):
        locate("model.safetensors")
    for name in ("./no/where", "/no/where", "a/b/c", "~/no"):
        with pytest.raises(CheckpointError, match="unknown checkpoint"):
            locate(name)


def test_a_boxed_name_is_inside_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "boxed", lambda needed: ["tiny"] if needed == "config.json" else [])
    assert locate("tiny").parts[-3:] == ("demo", "checkpoints", "tiny")


def test_a_revision_of_what_is_not_on_the_hub_is_refused(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="revision"):
        locate(str(folder), "main")
