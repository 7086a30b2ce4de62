"""The tokenizer in a GGUF file's metadata, as the tokenizer.json and tokenizer_config.json of a checkpoint.

It is a byte-level BPE: all diffusion models with GGUF files have one. `tokenizer.ggml.pre` names the pattern that cuts
text into words. The patterns are those of the models' own tokenizer.json files.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dinfer.loading.files import CheckpointError

TEXTS = "tokenizer.ggml.tokens"
WHOLE = "tokenizer.huggingface.json"  # the GGUF standard's key for a whole tokenizer.json
TEMPLATE = "tokenizer.chat_template"
ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
LLAMA3 = (ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + REST,)
QWEN2 = (ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + REST,)
BAILING = (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",)
PATTERNS: dict[str, tuple[str, ...]] = {
    "llama-bpe": LLAMA3, "llama3": LLAMA3, "llama-v3": LLAMA3, "llada": LLAMA3, "qwen2": QWEN2, "dream": QWEN2,
    "bailingmoe": BAILING, "bailingmoe2": BAILING, "llada-moe": BAILING, "gpt-2": (GPT2 + r"|\s+",),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
}  # fmt: skip
"""The patterns that cut text into words, by `tokenizer.ggml.pre`. Each cuts the pieces that those before it left."""
SPECIAL, PLAIN = 3, 4  # kinds of token in `tokenizer.ggml.token_type`: control, and added by a user
ROLES = {
    "bos_token": "bos_token_id", "eos_token": "eos_token_id", "pad_token": "padding_token_id",
    "unk_token": "unknown_token_id", "mask_token": "mask_token_id",
}  # fmt: skip

KINDS: dict[str, tuple[type, type | None, str]] = {
    **{f"tokenizer.ggml.{role}": (int, None, "a token id") for role in (*ROLES.values(), "eot_token_id")},
    **{name: (str, None, "a text") for name in ("tokenizer.ggml.model", "tokenizer.ggml.pre", WHOLE, TEMPLATE)},
    **{name: (list, str, "a list of texts") for name in (TEXTS, "tokenizer.ggml.merges")},
    "tokenizer.ggml.token_type": (list, int, "a list of integers"),
    **{f"split.{name}": (int, None, "an integer") for name in ("count", "no", "tensors.count")},
}  # fmt: skip


def check_kinds(path: Path, fields: Mapping[str, Any]) -> None:
    """Raises CheckpointError for a value whose type is not that of the GGUF standard."""
    for name, (kind, inside, must) in KINDS.items():
        found = fields.get(name)
        each = found if isinstance(found, list) else []
        if found is not None and (type(found) is not kind or any(type(one) is not inside for one in each)):
            raise CheckpointError(f"{path}: {name}={found!r:.60} must be {must}")


def tokenizer_files(path: Path, fields: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """tokenizer.json and tokenizer_config.json; empty if the metadata has no tokenizer.

    Raises CheckpointError for a tokenizer that is not supported.
    """
    texts = fields.get(TEXTS)
    if texts is None:
        return {}
    roles = {role: fields.get(f"tokenizer.ggml.{key}") for role, key in ROLES.items()}
    for role, token in roles.items():
        if token is not None and not 0 <= token < len(texts):
            key = f"tokenizer.ggml.{ROLES[role]}"
            raise CheckpointError(f"{path}: {key}={token} is outside the vocabulary of {len(texts)}")
    named = {role: texts[token] for role, token in roles.items() if token is not None}
    if TEMPLATE in fields:
        named["chat_template"] = fields[TEMPLATE]
    if WHOLE in fields:
        try:
            return {"tokenizer.json": json.loads(fields[WHOLE]), "tokenizer_config.json": named}
        except ValueError as error:
            raise CheckpointError(f"{path}: {WHOLE} is not JSON: {error}") from error
    model, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre", "default")
    if model != "gpt2" or pre not in PATTERNS:
        raise CheckpointError(
            f"{path}: tokenizer.ggml.model={model!r} with tokenizer.ggml.pre={pre!r} is not supported; 'gpt2' is, with "
            f"{', '.join(PATTERNS)}. tools.convert writes GGUF files that hold any tokenizer.json"
        )
    kinds = fields.get("tokenizer.ggml.token_type") or [1] * len(texts)
    if len(kinds) != len(texts):
        raise CheckpointError(f"{path}: {len(kinds)} tokenizer.ggml.token_type for {len(texts)} tokens")
    begins = fields.get("tokenizer.ggml.add_bos_token", PATTERNS[pre] is LLAMA3)
    first = roles["bos_token"] if begins else None
    whole = _byte_pairs(texts, kinds, fields.get("tokenizer.ggml.merges") or [], PATTERNS[pre], first)
    return {"tokenizer.json": whole, "tokenizer_config.json": named}


def _byte_pairs(
    texts: Sequence[str], kinds: Sequence[int], merges: Sequence[str], patterns: tuple[str, ...], first: int | None
) -> dict[str, Any]:
    """tokenizer.json of byte pairs. `patterns`: where texts are cut; `first`: the token that every text begins with."""
    added = [
        {
            "id": token, "content": texts[token], "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": kind == SPECIAL,
        }
        for token, kind in enumerate(kinds)
        if kind in (SPECIAL, PLAIN)
    ]  # fmt: skip
    cuts = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in patterns
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    vocab = {text: token for token, text in enumerate(texts)}
    return {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if patterns is QWEN2 else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*cuts, byte_level]},
        "post_processor": None if first is None else _begun(texts[first], first),
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": vocab,
            "merges": [pair for pair in merges if pair.replace(" ", "", 1) in vocab],  # llama.cpp skips others, too
            "ignore_merges": patterns is LLAMA3,
        },
    }


def _begun(text: str, token: int) -> dict[str, Any]:
    """The post-processor that puts a token in front of every text."""
    first, rest = {"SpecialToken": {"id": text, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    other = {"Sequence": {"id": "B", "type_id": 1}}
    return {
        "type": "TemplateProcessing",
        "single": [first, rest],
        "pair": [first, rest, other],
        "special_tokens": {text: {"id": text, "ids": [token], "tokens": [text]}},
    }
