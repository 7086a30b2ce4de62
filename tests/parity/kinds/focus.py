"""Cases of FOCUS: every pass of a run, in float64 (`tests.parity.focus`)."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from dinfer.core.loading.checkpoint import load_network
from tests.parity.compare import same
from tests.parity.focus import Focus
from tests.parity.golden import Case, Fields, Golden, Skip

FILES = "generation/**/*.json"
NUMBERS = {"mean": 1e-9, "importance": 1e-5}  # how far they may be from the recorded ones


def takes(doc: Fields) -> bool:
    return "first_layers" in doc


def cases(golden: Golden, path: Path, doc: Fields) -> Iterator[Case]:
    yield Case(golden.name(path), partial(run, golden, doc))


@torch.no_grad()
def run(golden: Golden, doc: Fields) -> str:
    """Decodes as FOCUS does; compares what enters, what is kept and what is committed in each pass."""
    if golden.device.type != "cpu":
        raise Skip("the rule of FOCUS runs in float64 on a CPU alone")
    prompt, params = doc.take("prompt_ids"), doc.fields("params")
    folder = doc.take("model")
    root = golden.root if (golden.root / folder).is_dir() else golden.root.parent / "goldens"
    known = Golden(root).family(folder, doc.take("family"))
    model = load_network(root / folder, known, dtype=torch.float64, device=golden.device)
    block, blocks, mask_id = params.take("block"), params.take("blocks"), params.take("mask_id")
    first = len(prompt) // block * block
    tokens = [*prompt, *[mask_id] * (first + blocks * block - len(prompt))]
    row = Focus(
        model, tokens, mask_id, block, params.take("alpha"), params.take("threshold"), params.take("boundary"),
        whole=params.take("end") == "whole",
    )  # fmt: skip
    params.finish()
    row.prefill(len(prompt))
    first_layers = later_layers = 0
    for i, want in enumerate(doc.items("steps")):
        ended = not row.masks
        got = row.step()
        first_layers, later_layers = first_layers + len(got["places"]), later_layers + len(got["kept"])
        for name, value in got.items():
            where = f"steps[{i}].{name}"
            if name == "offers":
                offers = want.take(name)
                same(where, [offer[:2] for offer in offers], [offer[:2] for offer in value])
                compare(golden, where, [offer[2] for offer in offers], [offer[2] for offer in value], 1e-5)
            elif name in NUMBERS and want.take(name) is not None:
                compare(golden, where, want.take(name), value, NUMBERS[name])
            else:
                same(where, want.take(name), value)
        want.finish()
        if ended:
            row.start += block
            row.enter()
    for name, value in (
        ("output_ids", row.tokens), ("forwards", row.forwards), ("first_layers", first_layers),
        ("later_layers", later_layers),
    ):  # fmt: skip
        same(name, doc.take(name), value)
    doc.take("name")
    doc.finish()
    return f"{row.forwards} passes"


def compare(golden: Golden, where: str, want: object, got: object, bound: float) -> None:
    numbers = (golden.tensor(values, torch.float64) for values in (want, got))
    golden.close(where, *numbers, atol=bound, rtol=0)
