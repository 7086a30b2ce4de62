"""Core stands alone, and each layer can be left out (`tests/contract/core.py`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from contract.core import CLOSURES, LAYERS, ROOT, copied, counted, entries, run

WITHOUT = {"none": (), "all": tuple(LAYERS), **{layer: (layer,) for layer in LAYERS}}
MOST = {"denoise_step": 5220, "Recipe": 5310, "Pipeline": 10100}  # lines that are imported for each


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The tokens of the models in the box without these layers."""
    folder = tmp_path_factory.mktemp("copies")
    found = run((copied(folder / name, gone), "") for name, gone in WITHOUT.items())
    return dict(zip(WITHOUT, found, strict=True))


@pytest.mark.parametrize("name", [name for name in WITHOUT if name != "none"])
def test_the_models_in_the_box_give_the_same_tokens_without(name: str, answers: dict[str, Any]) -> None:
    assert answers["none"]["tiny"][0] and answers["none"]["tiny-llada2"][0]
    assert answers[name] == answers["none"]


@pytest.mark.rest
def test_the_server_and_the_commands_start_without_a_layer_that_they_do_not_need(tmp_path: Path) -> None:
    copies = {layer: (copied(tmp_path / layer, [layer]), " ".join(entries([layer]))) for layer in LAYERS}
    found = dict(zip(copies, run(copies.values()), strict=True))
    assert {layer: told for layer, told in found.items() if isinstance(told, str)} == {}


def test_what_is_imported_is_bounded() -> None:
    found = dict(zip(CLOSURES, run((ROOT, module) for module in CLOSURES.values()), strict=True))
    assert {name: lines for name, (_, lines) in found.items() if lines > MOST[name]} == {}


def test_the_size_of_core_is_bounded(tmp_path: Path) -> None:
    lines, names, _ = counted()
    assert lines <= 13010 and names <= 740
    (tmp_path / "a.py").write_text("A, b = 1, 2\n\n\ndef f():\n    c = 3\n    return c\n")
    assert counted(tmp_path) == (6, 3, 1)
