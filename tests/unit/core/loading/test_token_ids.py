"""Mask and stop tokens are looked up in every file of a checkpoint that may name them, in one order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dinfer.core.loading.files import CheckpointError, token_ids

ADDED = {"7": {"content": "<m>"}, "8": {"content": "<e>"}}
WHOLE = {"model": {"vocab": {"a": 0, "<e>": 4}}, "added_tokens": [{"id": 9, "content": "<m>"}]}


def found(folder: Path, files: dict[str, dict[str, Any]]) -> tuple[Any, list[Any]]:
    """The mask token and the stop tokens, each as its id and source."""
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    ids = token_ids(folder, files.get("config", {}))
    return ids.mask and (ids.mask.id, ids.mask.source), [(stop.id, stop.source) for stop in ids.stops]


@pytest.mark.parametrize(
    ("files", "mask", "stops"),
    [
        ({}, None, []),
        ({"config": {"mask_token_id": None, "eos_token_id": None}}, None, []),
        (
            {"config": {"mask_token_id": 3, "eos_token_id": [1, 2]}, "generation_config": {"eos_token_id": [2, 5]},
             "tokenizer_config": {"eos_token": "<e>", "mask_token": "<m>", "added_tokens_decoder": ADDED}},
            (3, "config.json"), [(1, "config.json"), (2, "config.json"), (5, "generation_config.json")],
        ),
        (
            {"config": {"text_config": {"eos_token_id": 1, "mask_token_id": 6}}},
            (6, "config.json"), [(1, "config.json")],
        ),
        (
            {"generation_config": {"eos_token_id": 5, "mask_token_id": 4}},
            (4, "generation_config.json"), [(5, "generation_config.json")],
        ),
        (
            {"tokenizer_config": {"eos_token": "<e>", "mask_token": {"content": "<m>"}, "added_tokens_decoder": ADDED},
             "tokenizer": WHOLE},
            (7, "tokenizer_config.json"), [(8, "tokenizer_config.json")],
        ),
        (
            {"special_tokens_map": {"eos_token": {"content": "<e>"}, "mask_token": "<m>"}, "tokenizer": WHOLE},
            (9, "tokenizer.json"), [(4, "tokenizer.json")],
        ),
        (
            {"tokenizer_config": {"eos_token": "<e>", "mask_token": "<m>"}, "added_tokens": {"<m>": 1, "<e>": 2}},
            (1, "added_tokens.json"), [(2, "added_tokens.json")],
        ),
        ({"tokenizer_config": {"eos_token": "<e>", "mask_token": None}}, None, []),
    ],
)  # fmt: skip
def test_the_first_file_that_names_a_token_wins(
    tmp_path: Path, files: dict[str, dict[str, Any]], mask: Any, stops: list[Any]
) -> None:
    assert found(tmp_path, files) == (mask, stops)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config", {"eos_token_id": "2"}, r"config\.json: eos_token_id='2'"),
        ("config", {"mask_token_id": [3]}, r"config\.json: mask_token_id=\[3\]"),
        ("config", {"text_config": {"eos_token_id": -1}}, r"config\.json: text_config\.eos_token_id=-1"),
        ("generation_config", {"eos_token_id": [1, None]}, r"generation_config\.json: eos_token_id=\[1, None\]"),
        ("generation_config", {"eos_token_id": []}, r"generation_config\.json: eos_token_id=\[\]"),
        (
            "generation_config",
            {"eos_token_id": [1, 900]},
            r"generation_config\.json: eos_token_id=900 is outside",
        ),
        ("added_tokens", {"<e>": True}, r"added_tokens\.json: id of '<e>'=True"),
    ],
)
def test_what_is_no_token_id_is_refused_by_file_and_field(
    tmp_path: Path, file: str, content: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        found(tmp_path, {"config": {"vocab_size": 900}} | {"tokenizer_config": {"eos_token": "<e>"}, file: content})
