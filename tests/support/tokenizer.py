"""Tokenizers for the tests: one of forty words with a chat template, and stand-ins for published ones."""

from __future__ import annotations

import json
from pathlib import Path

from support.models import EOS, MASK
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} {% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)
# Special tokens of LLaDA2, whose tokenizer_config.json leaves their ids to tokenizer.json.
LLADA2 = {
    "<|startoftext|>": 156891, "<|endoftext|>": 156892, "<|mask|>": 156895, "<role>": 156897, "</role>": 156898,
    "<|role_end|>": 156900,
}  # fmt: skip


def save_tokenizer(folder: Path) -> None:
    """Word wN is token N; 36 and 37 are the template's marks."""
    words = {f"w{i}": i for i in range(36)} | {"<user>": 36, "<bot>": 37, "<eos>": EOS, "<mask>": MASK}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", mask_token="<mask>",
        additional_special_tokens=["<user>", "<bot>"],
    )  # fmt: skip
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


def published_tokenizer(folder: Path) -> None:
    """A tokenizer.json for a published tokenizer_config.json: a token for each byte, special ones at their own ids."""
    added = json.loads((folder / "tokenizer_config.json").read_text()).get("added_tokens_decoder") or {}
    special = {entry["content"]: int(token) for token, entry in added.items()} or LLADA2
    vocab = {letter: i for i, letter in enumerate(bytes_to_unicode().values())} | special
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    whole = {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
        "added_tokens": [{"id": token, "content": text} | flags for text, token in special.items()],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(whole))
