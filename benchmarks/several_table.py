"""The tables of benchmarks/results/several_blocks.md: several open blocks against one, and the areas."""

from __future__ import annotations

import json
from itertools import zip_longest
from pathlib import Path
from typing import Any

from dinfer.analysis.plots import aup, front

Row = dict[str, Any]
FILES = {
    "tiny": ("multi-block-tiny-h200", "multi-block-tiny-cpu", "multi-block-tiny-more-cpu", "lopa-tiny-h200"),
    "tiny-d2f": ("multi-block-tiny-d2f-h200", "lopa-tiny-d2f-h200"),
    "tiny-llada2": ("multi-block-tiny-llada2-h200", "multi-block-tiny-llada2-cpu"),
    "tiny-llada2-multi-block": ("multi-block-tiny-llada2-multi-block-h200",),
    "tiny-llada2-insert-delete": (
        "multi-block-tiny-llada2-insert-delete-h200", "multi-block-tiny-llada2-insert-delete-cpu",
    ),
}  # fmt: skip
SECOND = {  # the presets' recipes on other problems
    "tiny-d2f": "multi-block-tiny-d2f-second-cpu",
    "tiny-llada2-multi-block": "multi-block-tiny-llada2-multi-block-second-cpu",
}
RECIPE = ("iteration", "iteration_options", "decoder", "options")
SHOWN = {
    "fixed": ("steps=32",),
    "threshold": ("threshold=0.95", "threshold=0.9", "threshold=0.8"),
    "hierarchical": ("threshold=0.9 low_threshold=0.45",),
    "factor": ("factor=1.0",),
    "joint_threshold": (
        "threshold=0.9 edit_threshold=0.5", "threshold=0.7 edit_threshold=0.5", "threshold=0.6 edit_threshold=0.0",
        "threshold=0.5 edit_threshold=0.0", "threshold=0.4 edit_threshold=0.0",
    ),
    "entropy_bound": ("bound=0.1", "bound=0.4"),
    "insert_delete": (
        "threshold=0.9 edit_threshold=0.5", "threshold=0.7 edit_threshold=0.5", "threshold=0.6 edit_threshold=0.0",
        "threshold=0.5 edit_threshold=0.0", "threshold=0.4 edit_threshold=0.0",
    ),
    "dmax": ("threshold=0.5", "threshold=0.3"),
}  # fmt: skip


def reports(results: Path, name: str) -> list[dict[str, Any]]:
    """The reports of a model or an adapter in the box."""
    return [json.loads((results / f"{file}.json").read_text()) for file in FILES[name]]


def rows_of(results: Path, name: str) -> list[Row]:
    """Its rows of held-out problems."""
    return [row for report in reports(results, name) for row in report["rows"]]


def several(results: Path) -> str:
    """A table for each model, with a line for each recipe: on problems of the training split and held-out problems."""
    every = [report for name in FILES for report in reports(results, name)]
    made = " or ".join(dict.fromkeys(f"{report['hardware']}, torch {report['torch']}" for report in every))
    count, new = every[0]["rows"][0]["problems"], every[0]["setting"]["new"]
    parts = [
        f"{count} problems of each set, `max_new_tokens={new}`, float32, {made}; `blocks=4`, else the defaults of "
        "the iterations. Each cell: accuracy, and tokens per forward, whatever the hardware. -: not measured.",
    ]
    for name in FILES:
        lines = [
            f"### `{name}`",
            "",
            "| iteration | decoder | training split | held out | NFE |",
            "| --- |" + " --- |" * 4,
        ]
        pairs = {  # a recipe that two files have counts once
            tuple(pair[1][name] for name in RECIPE): pair
            for report in reports(results, name) for pair in zip_longest(report["validation"], report["rows"])
        }  # fmt: skip
        for chosen, row in sorted(pairs.values(), key=lambda pair: order(pair[1])):
            if "add_at" in row["iteration_options"] or row["options"] not in SHOWN.get(row["decoder"], ()):
                continue
            cells = [cell(one) for one in (chosen, row)]
            lines.append(
                f"| `{row['iteration']}` | `{row['decoder']}` {row['options']} | {cells[0]} | {cells[1]} "
                f"| {row['nfe']:.1f} |"
            )
        parts.append("\n".join(lines))
    return "\n\n".join([*parts, again(results), areas(results)])


def cell(row: Row | None) -> str:
    """Accuracy and tokens per forward. None: not measured."""
    return "-" if row is None else f"{row['accuracy']:.1f}%, {row['tpf']:.2f}"


def order(row: Row) -> tuple[int, int]:
    """The sorting key of a row: by iteration, then by decoder."""
    iterations = ("multi_block", "lopa", "dmax", "blockwise", "block_diffusion")
    return iterations.index(row["iteration"]), [*SHOWN, row["decoder"]].index(row["decoder"])


def again(results: Path) -> str:
    """The recipes of the presets on problems of two seeds."""
    lines = [
        "The recipes of two presets on held-out problems of another seed:",
        "",
        "| model | iteration | decoder | seed 0 | seed 1 |",
        "| --- |" + " --- |" * 4,
    ]
    for name, file in SECOND.items():
        first = {tuple(row[n] for n in RECIPE): row for row in rows_of(results, name)}
        for row in json.loads((results / f"{file}.json").read_text())["rows"]:
            cells = [cell(one) for one in (first[tuple(row[n] for n in RECIPE)], row)]
            lines.append(
                f"| `{name}` | `{row['iteration']}` | `{row['decoder']}` {row['options']} | " + " | ".join(cells) + " |"
            )
    return "\n".join(lines)


def areas(results: Path) -> str:
    """The area under accuracy and parallelism of each way to decode the models in the box."""
    one = json.loads((results / "tiny-everything-h200.json").read_text())["rows"]
    adapter, more = rows_of(results, "tiny-d2f"), rows_of(results, "tiny")
    second = json.loads((results / "tiny-llada2-quality.json").read_text())["rows"]
    edits = rows_of(results, "tiny-llada2-multi-block")
    sets = {
        "`tiny`, `threshold`": [row for row in one if (row["iteration"], row["decoder"]) == ("blockwise", "threshold")],
        "`tiny`, one block, every recipe": one,
        "`tiny`, up to four blocks, `threshold`": [
            row for row in more if (row["iteration"], row["decoder"]) == ("multi_block", "threshold")
        ],
        "`tiny-d2f`, one block, `threshold`": [
            row for row in adapter if (row["iteration"], row["decoder"]) == ("blockwise", "threshold")
        ],
        "`tiny-d2f`, up to four blocks, `threshold`": [
            row for row in adapter if (row["iteration"], row["decoder"]) == ("multi_block", "threshold")
        ],
        "`tiny-d2f`, up to four blocks, every decoder": [row for row in adapter if row["iteration"] == "multi_block"],
        "`tiny`, up to four blocks and their versions": [row for row in more if row["iteration"] == "lopa"],
        "`tiny-d2f`, up to four blocks and their versions": [row for row in adapter if row["iteration"] == "lopa"],
        "`tiny-llada2`, one block, `threshold`": [row for row in second if row["decoder"] == "threshold"],
        "`tiny-llada2`, one block, every decoder": second,
        "`tiny-llada2`, up to four blocks, every decoder": rows_of(results, "tiny-llada2"),
        "`tiny-llada2-multi-block`, up to four blocks, `threshold`": [
            row for row in edits if (row["iteration"], row["decoder"]) == ("multi_block", "threshold")
        ],
        "`tiny-llada2-multi-block`, up to four blocks, every decoder": edits,
    }
    best = max(row["accuracy"] for rows in sets.values() for row in rows)
    lines = ["| held-out problems | AUP |", "| --- | --- |"]
    for name, rows in sets.items():
        area = aup([(row["tpf"], row["accuracy"]) for row in front(rows)], best=best)
        lines.append(f"| {name} | {area:.0f} |")
    return "\n".join(lines)


def repair(results: Path) -> str:
    """The share of spoilt drafts that each setting repairs, sorted by tokens per forward."""
    report = json.loads((results / "repair-tiny-llada2-h200.json").read_text())
    lines = [
        f"{report['drafts']} drafts, of which {report['right']:.1f}% are right as they are; float32, "
        f"{report['hardware']}, torch {report['torch']}, commit {report['commit']}.",
        "",
        "| trained to | decoder | edit_threshold | post_edits | repaired | NFE | TPF |",
        "| --- |" + " --- |" * 6,
    ]
    for row in sorted(report["rows"], key=lambda row: (row["adapter"] == report["setting"]["beside"], row["tpf"])):
        trained = "edit" if row["adapter"] == report["setting"]["beside"] else "edit, delete and split"
        lines.append(
            f"| {trained} | `{row['decoder']}` | {row['edit_threshold']} | {row.get('post_edits', 16)} "
            f"| {row['accuracy']:.1f}% | {row['nfe']:.1f} | {row['tpf']:.2f} |"
        )
    return "\n".join(lines)
