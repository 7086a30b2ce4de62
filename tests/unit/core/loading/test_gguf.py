"""GGUF files: the same network, tokenizer and chat as the checkpoint that one was made of; bad files named."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from support.files import lies_in
from support.gguf_files import GOLDENS, LLADA, rewritten

import dinfer
from dinfer.core.loading.checkpoint import family_of, load_network, read_config
from dinfer.core.loading.files import CheckpointError, locate
from dinfer.core.ranks.split import Rank
from dinfer.core.registry import MODELS
from dinfer.formats.gguf_file import BLOCKS, TYPES
from dinfer.lab.inspect import inspect

CPU = torch.device("cpu")
Q = "blk.1.attn_q.weight"


def network(path: Path, **options: Any) -> Any:
    family = MODELS.build({"name": family_of(read_config(path))})
    return load_network(path, family, **{"dtype": None, "device": CPU} | options)


@pytest.fixture(scope="module")
def golden() -> Any:
    return network(GOLDENS / "models" / "llada")


def test_what_llama_cpp_converts_is_the_same_network(golden: Any) -> None:
    """Its converter permutes the rows of q and k; the golden logits of this model are those of tests/parity."""
    found = network(LLADA, dtype=torch.float32)
    assert found.spec == golden.spec
    for (name, want), got in zip(golden.named_parameters(), found.parameters(), strict=True):
        assert torch.equal(got, want if want.dim() == 1 else want.half().float()), name
    assert network(LLADA).dtype == torch.float16


def test_files_that_do_not_permute(golden: Any, tmp_path: Path) -> None:
    """diffuse-cpp's architecture has llama.cpp's names, and the rows of q and k as on the hub."""
    own = {f"diffuse.{key}": value for key, value in (("model_type", "llada"), ("mask_token_id", 300))}
    reader = gguf.GGUFReader(LLADA)
    own |= {f.replace("llada.", "diffuse."): v.contents() for f, v in reader.fields.items() if f.startswith("llada.")}
    parameters = dict(golden.named_parameters())
    rows = {
        f"blk.{i}.attn_{part}.weight": (
            parameters[f"blocks.{i}.qkv.weight"][row * 64 : row * 64 + 64].numpy(),
            Kind.F32,
        )
        for i in range(3)
        for row, part in enumerate("qk")
    }
    found = network(rewritten(tmp_path / "a.gguf", own | {"general.architecture": "diffuse"}, rows))
    assert torch.equal(found.blocks[2].qkv.weight[:128], parameters["blocks.2.qkv.weight"][:128].half())


def test_ranks_read_their_share() -> None:
    whole, share = network(LLADA), network(LLADA, rank=Rank(1, 2))
    assert torch.equal(share.blocks[0].qkv.weight[32:64], whole.blocks[0].qkv.weight[96:128])


@pytest.mark.parametrize("name", [name for name in TYPES if name not in ("F32", "F16")])
def test_every_type_is_read_as_the_gguf_package_does(name: str, tmp_path: Path) -> None:
    """Small bytes make finite scales. A model of 256 channels, as the largest blocks have that many values."""
    kind, rng = Kind[name], np.random.default_rng(0)
    wide = {"embedding_length": 256, "feed_forward_length": 256, "block_count": 1, "rope.dimension_count": 64}
    tensors: dict[str, Any] = {one.name: None for one in gguf.GGUFReader(LLADA).tensors}
    for own in ("token_embd", "output", *(f"blk.0.{x}" for x in ("ffn_gate", "ffn_up", "ffn_down", "attn_output"))):
        rows = 320 if "." not in own else 256
        tensors[f"{own}.weight"] = (
            rng.integers(0, 48, gguf.quant_shape_to_byte_shape((rows, 256), kind), np.uint8),
            kind,
        )
    tensors |= {f"blk.0.attn_{x}.weight": tensors["blk.0.ffn_up.weight"] for x in "qkv"}
    for own in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        tensors[f"{own}.weight"] = np.ones(256, np.float32), Kind.F32
    path = rewritten(tmp_path / "a.gguf", {f"llada.{key}": value for key, value in wide.items()}, tensors)
    found = network(path, dtype=torch.float32)
    values = {own: torch.from_numpy(gguf.dequantize(*blocks)) for own, blocks in tensors.items() if blocks is not None}
    qkv, down, table = (
        one.formats["weight"].widened(one.weight_of("weight"))
        for one in (found.blocks[0].qkv, found.blocks[0].mlp.down, found.embedding)
    )
    assert torch.equal(table, values["token_embd.weight"])
    assert torch.equal(found.embedding(torch.tensor([[7, 9]]))[0, 1], table[9])
    assert torch.equal(down, values["blk.0.ffn_down.weight"])
    assert torch.equal(qkv[512:], values["blk.0.attn_v.weight"])
    if name in BLOCKS and Path("/proc/self/maps").is_file():
        before = path.read_bytes()
        assert lies_in(path, found.embedding.weight), "rows that nobody looks up take no memory"
        found.embedding.weight.fill_(7)
        assert path.read_bytes() == before, "the mapping is private"
    assert network(path).dtype == torch.bfloat16
    seen = inspect(path, {"checkpoint": str(path)})
    assert seen.types == {name: 9, "F32": 3}
    held = sum(one.nbytes for one in (*found.parameters(), *found.buffers()))
    assert seen.memory.get("blocks", held) == held and ("blocks" in seen.memory) == (name in BLOCKS)


def test_norms_in_blocks_are_widened(tmp_path: Path) -> None:
    blocks = gguf.quantize(np.arange(64, dtype=np.float32), Kind.Q8_0)
    found = network(rewritten(tmp_path / "a.gguf", tensors={"output_norm.weight": (blocks, Kind.Q8_0)}))
    assert torch.equal(found.norm.weight, torch.from_numpy(gguf.dequantize(blocks, Kind.Q8_0)).half())


def test_shards_are_one_model(golden: Any, tmp_path: Path) -> None:
    """As llama-gguf-split writes them: the metadata is in the first."""
    every = [one.name for one in gguf.GGUFReader(LLADA).tensors]
    split = {"split.count": 2, "split.tensors.count": len(every)}
    first, second = (tmp_path / f"m-0000{n}-of-00002.gguf" for n in (1, 2))
    rewritten(first, split | {"split.no": 0}, dict.fromkeys(every[:9]))
    with pytest.raises(CheckpointError, match=r"shards are not there:\n  m-00002-of-00002\.gguf"):
        network(first)
    rewritten(second, split | {"split.no": 1}, dict.fromkeys(every[9:]))
    assert torch.equal(network(first).head.weight, golden.head.weight.half())
    with pytest.raises(CheckpointError, match="give the first"):
        network(second)
    rewritten(second, split | {"split.no": 1}, dict.fromkeys(every[8:]))
    with pytest.raises(CheckpointError, match=r"split\.tensors\.count=30, but the shards hold 29"):
        network(first)


def test_text_and_chat() -> None:
    """Byte-level words, BOS in front as the metadata wants it, and the chat template of the metadata."""
    pipe = dinfer.load(str(LLADA), cache="none")
    assert pipe.decode(pipe.encode("the in 12345!", chat=False)) == "the in 12345!"
    assert pipe.encode("the", chat=False)[0] == 299 and len(pipe.encode("the", chat=False)) == 2
    ids = pipe.encode("the")
    assert pipe.tokenizer is not None and pipe.tokenizer.decode(ids) == "user: the\nassistant:" and 299 not in ids
    assert len(pipe.generate("the", max_new_tokens=8).ids) <= 8


def test_merges_that_make_no_token(tmp_path: Path) -> None:
    """llama.cpp passes over them."""
    merges = [*gguf.GGUFReader(LLADA).fields["tokenizer.ggml.merges"].contents(), "! !"]
    pipe = dinfer.load(str(rewritten(tmp_path / "a.gguf", {"tokenizer.ggml.merges": merges})), cache="none")
    assert pipe.encode("the in!!") == dinfer.load(str(LLADA), cache="none").encode("the in!!")


def test_what_a_file_says_of_itself() -> None:
    found = inspect(LLADA, {"checkpoint": str(LLADA)})
    assert not found.problems and (found.stored, found.expected) == (30, 30) and found.types == {"F16": 23, "F32": 7}
    assert found.chat is not None and found.chat.endswith("assistant:")
    tokens = {(one.role, one.id, one.text, one.source) for one in found.tokens}
    assert ("mask", 300, "<|mdm_mask|>", "metadata of the GGUF file") in tokens


def of_type(path: Path, number: int) -> None:
    """The file with another number for the type of its first tensor."""
    whole, name = LLADA.read_bytes(), gguf.GGUFReader(LLADA).tensors[0].name.encode()
    at = whole.index(struct.pack("<Q", len(name)) + name) + 8 + len(name)
    at += 4 + 8 * struct.unpack_from("<I", whole, at)[0]
    path.write_bytes(whole[:at] + struct.pack("<I", number) + whole[at + 4 :])


def empty(path: Path, order: gguf.GGUFEndian) -> None:
    """A file without tensors, in an order of bytes."""
    writer = gguf.GGUFWriter(path, "llada", endianess=order)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no bytes": (lambda path: path.write_bytes(b""), "truncated, damaged or no GGUF"),
    "another file": (lambda path: path.write_bytes(b"\x80PK" * 99), "truncated, damaged or no GGUF"),
    "half its header": (lambda path: path.write_bytes(LLADA.read_bytes()[:3000]), "truncated"),
    "half its tensors": (lambda path: path.write_bytes(LLADA.read_bytes()[:200_000]), "truncated"),
    "an architecture": (lambda path: rewritten(path, {"general.architecture": "gpt9"}), "'gpt9' is not supported"),
    "no architecture": (
        lambda path: path.write_bytes(LLADA.read_bytes().replace(b"general.architecture", b"general.archaeology_")),
        "general.architecture='absent' is not supported",
    ),
    "a pointer": (
        lambda path: path.write_bytes(b"version https://git-lfs.github.com/spec/v1\n"), "a pointer .* `git lfs pull`"
    ),
    "a type of the future": (lambda path: of_type(path, 99), "type 99, which the gguf package does not know; F32"),
    "a part that turns": (
        lambda path: rewritten(path, {"llada.rope.dimension_count": 4}), "rope.dimension_count=4, must be 16"
    ),
    "values of another length": (
        lambda path: rewritten(path, {"llada.attention.value_length": 8}), "attention.value_length=8, must be 16"
    ),
    "heads of each layer": (
        lambda path: rewritten(path, {"llada.attention.head_count": [4, 4, 4]}), r"head_count=\[4, 4, 4\] must be one"
    ),
    "heads that do not share the width": (
        lambda path: rewritten(path, {"llada.attention.head_count": 3}),
        r"a\.gguf: llada\.attention\.head_count=3 must be a divisor of llada\.embedding_length=64",
    ),
    "half a layer": (
        lambda path: rewritten(path, {"llada.block_count": 2.5}), r"a\.gguf: llada\.block_count=2\.5 must be an integer"
    ),
    "a text for a number": (lambda path: rewritten(path, {"llada.block_count": "3"}), "block_count='3' must be one"),
    "a text for a token": (
        lambda path: rewritten(path, {"tokenizer.ggml.mask_token_id": "x"}), "mask_token_id='x' must be a token id"
    ),
    "a number for merges": (lambda path: rewritten(path, {"tokenizer.ggml.merges": 5}), "merges=5 must be a list of"),
    "a key too few": (lambda path: rewritten(path, {"llada.block_count": None}), "no llada.block_count"),
    "a small vocabulary": (
        lambda path: rewritten(path, {"tokenizer.ggml.tokens": ["a", "b"]}), r"320 rows.*\n  tokenizer.ggml.tokens: 2"
    ),
    "a mask outside": (
        lambda path: rewritten(path, {"tokenizer.ggml.mask_token_id": 999}), "mask_token_id=999 is outside"
    ),
    "causal attention": (lambda path: rewritten(path, {"llada.attention.causal": True}), "llada.attention.causal=True"),
    "shifted logits": (lambda path: rewritten(path, {"diffusion.shift_logits": True}), "diffusion.shift_logits=True"),
    "a tokenizer": (lambda path: rewritten(path, {"tokenizer.ggml.pre": "klingon"}), "pre='klingon' is not supported"),
    "a tensor too few": (lambda path: rewritten(path, tensors={Q: None}), "missing: model.transformer.blocks.1.q_proj"),
    "a tensor too many": (
        lambda path: rewritten(path, tensors={"blk.0.x.weight": (np.ones(4, np.float32), Kind.F32)}),
        "unexpected: blk.0.x.weight",
    ),
    "another shape": (
        lambda path: rewritten(path, tensors={Q: (np.ones((64, 60), np.float32), Kind.F32)}), r"shape of .*\(64, 60\)"
    ),
    "a text for shards": (lambda path: rewritten(path, {"split.count": "2"}), "split.count='2' must be an integer"),
    "a version of the future": (
        lambda path: path.write_bytes(LLADA.read_bytes()[:4] + struct.pack("<I", 9) + LLADA.read_bytes()[8:]),
        "version 9 of GGUF; 2 and 3 load",
    ),
    "the other order of bytes": (lambda path: empty(path, gguf.GGUFEndian.BIG), "is big-endian"),
    "an adapter": (lambda path: rewritten(path, {"general.type": "adapter"}), "general.type='adapter' is no model"),
    "half of diffuse-cpp's names": (
        lambda path: rewritten(path, {"general.architecture": "diffuse"}), "diffuse.model_type='absent' is not supp"
    ),
    "positions that are scaled": (
        lambda path: rewritten(path, {"llada.rope.scaling.factor": 4.0}), "rope.scaling.factor=4.0, must be 1"
    ),
    "logits that are capped": (
        lambda path: rewritten(path, {"llada.final_logit_softcapping": 30.0}), "softcapping=30.0, must be absent"
    ),
    "experts in a dense model": (
        lambda path: rewritten(path, {"llada.expert_count": 8}), "llada.expert_count=8, must be 0"
    ),
    "older blocks": (
        lambda path: rewritten(path, {"general.quantization_version": 1}), "quantization_version=1, must be 2"
    ),
    "a type": (
        lambda path: rewritten(path, tensors={Q: (np.zeros((64, 64), np.int32), Kind.I32)}), f"{Q}: I32"
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_bad_files_are_named(what: str, tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    make, message = BAD[what]
    make(path)
    with pytest.raises(CheckpointError, match=message) as raised:
        network(path)
    problems = inspect(path, {"checkpoint": str(path)}).problems
    assert problems and "config.json" not in "".join([str(raised.value), *problems]), "it has none"


def test_where_a_file_is(tmp_path: Path) -> None:
    assert locate(str(LLADA)) == LLADA
    with pytest.raises(CheckpointError, match="no file"):
        locate(str(tmp_path / "a.gguf"))
    with pytest.raises(CheckpointError, match="revision='main' is for checkpoints on the hub"):
        locate(str(LLADA), "main")


def test_a_whole_tokenizer_in_the_metadata(tmp_path: Path) -> None:
    """`tokenizer.huggingface.json` holds what the other fields cannot say."""
    source = Path(dinfer.__file__).parent / "demo" / "checkpoints" / "tiny" / "tokenizer.json"
    whole = json.dumps(json.loads(source.read_text()))
    path = rewritten(tmp_path / "a.gguf", {"tokenizer.huggingface.json": whole, "tokenizer.ggml.pre": "own"})
    ids = dinfer.load(str(path), cache="none").encode("What is 12?", chat=False)
    assert ids == dinfer.load("tiny").encode("What is 12?", chat=False)
