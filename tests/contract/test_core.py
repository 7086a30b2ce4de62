"""Core stands alone, and each layer can be left out (`tests/contract/core.py`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from contract.core import CLOSURES, LAYERS, RECIPES, ROOT, ROUNDED, copied, counted, entries, run

MOST = {"denoise_step": 4500, "Recipe": 5000, "Pipeline": 9400}  # lines that are imported for each
KERNELS = RECIPES | ROUNDED


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What copies answer, and what the package imports: of one process, since importing torch takes the longest."""
    folder = tmp_path_factory.mktemp("copies")
    gone: dict[str, Any] = {"none": (), "all": LAYERS, "kernels": ("kernels",)}
    copies = {name: (copied(folder / name, layers), KERNELS if name == "kernels" else RECIPES)
              for name, layers in gone.items()}  # fmt: skip
    asked = copies | {name: (ROOT, module) for name, module in CLOSURES.items()}
    return dict(zip(asked, run(asked.values()), strict=True))


@pytest.mark.parametrize("name", ["all", "kernels"])
def test_the_models_in_the_box_give_the_same_tokens_without(name: str, told: dict[str, Any]) -> None:
    assert told["none"]["tiny"][0] and told["none"]["tiny-llada2"][0]
    assert {model: told[name][model] for model in RECIPES} == {model: told["none"][model] for model in RECIPES}


def test_rounded_weights_need_no_kernels(told: dict[str, Any]) -> None:
    assert len(told["kernels"]["rounded"]) == 2 and all(told["kernels"]["rounded"])


def test_an_answer_imports_nothing_that_it_does_not_need(told: dict[str, Any]) -> None:
    """Torch imports computer algebra when it is asked for a tensor like one without memory, and a text needs nothing
    that reads images. Then every command, and the first text, would come later."""
    assert told["none"]["idle"] == []


@pytest.mark.rest
def test_each_other_layer_can_be_left_out(tmp_path: Path) -> None:
    names = ["none", *sorted({*LAYERS} - {"kernels"})]
    copies = [(copied(tmp_path / name, [name]), RECIPES) for name in names]
    usual, *others = run(copies)
    assert [name for name, other in zip(names[1:], others, strict=True) if other != usual] == []


@pytest.mark.rest
def test_the_server_and_the_commands_start_without_a_layer_that_they_do_not_need(tmp_path: Path) -> None:
    copies = {layer: (copied(tmp_path / layer, [layer]), " ".join(entries([layer]))) for layer in LAYERS}
    found = dict(zip(copies, run(copies.values()), strict=True))
    assert {layer: told for layer, told in found.items() if isinstance(told, str)} == {}


def test_what_is_imported_is_bounded(told: dict[str, Any]) -> None:
    assert {name: told[name] for name in CLOSURES if told[name][1] > MOST[name]} == {}


def test_the_size_of_core_is_bounded(tmp_path: Path) -> None:
    lines, names, _ = counted()
    assert lines <= 12000 and names <= 650
    (tmp_path / "a.py").write_text("A, b = 1, 2\n\n\ndef f():\n    c = 3\n    return c\n")
    assert counted(tmp_path) == (6, 3, 1)
