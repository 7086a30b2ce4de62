"""Tokenizers and chat templates come from the checkpoint, and code that comes with it is never run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.families import CONFIGS, family_for, random_model
from support.tokenizer import save_tokenizer
from torch import float32
from transformers.convert_slow_tokenizer import bytes_to_unicode

from dinfer.core.pipeline import load
from dinfer.formats.saving import save_network

NAMED = "SDAR-4B-Chat"  # the name says how long the attention blocks of SDAR are
QWEN = ["dream", "sdar", "sdar_moe", "fast_dllm_v2"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"]
CODE = """
from pathlib import Path
Path(__file__).with_name("was_run").touch()
class Tokenizer: pass
"""


def checkpoint(folder: Path, name: str) -> dict[str, Any]:
    """With the vocabulary as files of bytes and merges and a tokenizer class of its own, as Dream and SDAR have it."""
    letters = {letter: i for i, letter in enumerate(bytes_to_unicode().values())}
    vocab = letters | {"he": 256, "hel": 257}
    special = {str(258 + i): token for i, token in enumerate(SPECIAL)}
    mask, eos = 261, 258
    config = CONFIGS[name] | {"vocab_size": 262, "eos_token_id": eos, "mask_token_id": mask}
    family = family_for(config)
    network = random_model(name, float32, vocab_size=262, eos_token_id=eos, mask_token_id=mask)
    save_network(network, family, folder, config)
    # The mask is known by the tokenizer alone.
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "mask_token_id"}))
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("#version: 0.2\nh e\nhe l\n")
    added = {i: {"content": token, "special": True, "lstrip": False, "rstrip": False} for i, token in special.items()}
    settings = {
        "tokenizer_class": "Tokenizer", "auto_map": {"AutoTokenizer": ["code.Tokenizer", None]},
        "added_tokens_decoder": added, "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>",
        "mask_token": "<|mask|>", "chat_template": TEMPLATE,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "code.py").write_text(CODE)
    return config


@pytest.mark.parametrize("name", QWEN)
def test_a_vocabulary_with_a_class_of_its_own_is_read_without_it(name: str, tmp_path: Path) -> None:
    checkpoint(tmp_path / NAMED, name)
    pipe = load(str(tmp_path / NAMED), device="cpu")
    ids = pipe.encode("hel o")
    tokens = pipe.tokenizer.convert_ids_to_tokens(ids)
    assert tokens[:3] == ["<|im_start|>", "u", "s"] and tokens[6:10] == ["hel", "\u0120", "o", "<|im_end|>"]
    assert pipe.encode("hel", chat=False) == [257]
    assert pipe.model.spec.mask_id == 261
    assert pipe.decode([257, 260, 258]) == "hel"
    assert pipe.generate("hel", max_new_tokens=4).prompt_ids[6:7] == [257]
    assert not (tmp_path / NAMED / "was_run").exists()


@pytest.mark.parametrize("name", ["llada", "llada_moe", "llada2", "stable_diffcoder", *QWEN])
def test_a_whole_tokenizer_is_read_as_it_is(name: str, tmp_path: Path) -> None:
    """Whatever class tokenizer_config.json names."""
    tmp_path = tmp_path / NAMED
    save_network(random_model(name, float32), family_for(CONFIGS[name]), tmp_path, CONFIGS[name])
    save_tokenizer(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings |= {"auto_map": {"AutoTokenizer": ["code.Tokenizer", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "code.py").write_text(CODE)
    assert load(str(tmp_path), device="cpu").encode("w3 w4") == [36, 3, 4, 37]
    assert not (tmp_path / "was_run").exists()


def test_a_tokenizer_that_is_nothing_but_code_is_refused(tmp_path: Path) -> None:
    config = checkpoint(tmp_path, "dream")
    (tmp_path / "vocab.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="Code that comes with a checkpoint is never run"):
        load(str(tmp_path), device="cpu")
    assert not (tmp_path / "was_run").exists()
