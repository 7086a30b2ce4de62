"""The table of the adapters in the box, for docs/results.md: several open blocks against one, and the areas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dinfer.analysis.pareto import aup, front

Row = dict[str, Any]
NAMES = {"tiny-d2f": "multi-block-tiny-d2f-h200", "tiny-llada2-multi-block": "multi-block-tiny-llada2-multi-block-h200"}
SHOWN = {
    "fixed": ("steps=32",),
    "threshold": ("threshold=0.95", "threshold=0.9", "threshold=0.8"),
    "hierarchical": ("threshold=0.9 low_threshold=0.45",),
    "factor": ("factor=1.0",),
    "joint_threshold": (
        "threshold=0.9 edit_threshold=0.5", "threshold=0.7 edit_threshold=0.5", "threshold=0.5 edit_threshold=0.0",
    ),
    "dmax": ("threshold=0.5", "threshold=0.3"),
}  # fmt: skip


def reports(results: Path) -> dict[str, dict[str, Any]]:
    """What was measured of each adapter, by its name."""
    return {name: json.loads((results / f"{file}.json").read_text()) for name, file in NAMES.items()}


def several(results: Path) -> str:
    """A table for each adapter: a line a recipe, on the problems that recipes are chosen by and the held-out ones."""
    parts = []
    for name, report in reports(results).items():
        lines = [
            f"### `{name}`",
            "",
            f"{report['rows'][0]['problems']} problems of each set, `max_new_tokens={report['setting']['new']}`, "
            f"float32, {report['hardware']}, torch {report['torch']}, commit {report['commit']}.",
            "",
            "| iteration | decoder | training split | held out | NFE |",
            "| --- |" + " --- |" * 4,
        ]
        for chosen, row in zip(report["validation"], report["rows"], strict=True):
            if "add_at" in row["iteration_options"] or row["options"] not in SHOWN.get(row["decoder"], ()):
                continue
            cells = [f"{one['accuracy']:.1f}%, {one['tpf']:.2f}" for one in (chosen, row)]
            lines.append(
                f"| `{row['iteration']}` | `{row['decoder']}` {row['options']} | {cells[0]} | {cells[1]} "
                f"| {row['nfe']:.1f} |"
            )
        parts.append("\n".join(lines))
    return "\n\n".join([*parts, areas(results)])


def areas(results: Path) -> str:
    """The area under accuracy and parallelism of each way to decode the first model, by its front."""
    one = json.loads((results / "tiny-everything-h200.json").read_text())["rows"]
    adapter = reports(results)["tiny-d2f"]["rows"]
    sets = {
        "`tiny`, `threshold`": [row for row in one if (row["iteration"], row["decoder"]) == ("blockwise", "threshold")],
        "`tiny`, every recipe": one,
        "`tiny-d2f`, one block, `threshold`": [
            row for row in adapter if (row["iteration"], row["decoder"]) == ("blockwise", "threshold")
        ],
        "`tiny-d2f`, up to four blocks, `threshold`": [
            row for row in adapter if (row["iteration"], row["decoder"]) == ("multi_block", "threshold")
        ],
        "`tiny-d2f`, up to four blocks, every decoder": [row for row in adapter if row["iteration"] == "multi_block"],
    }
    best = max(row["accuracy"] for rows in sets.values() for row in rows)
    lines = ["| held-out problems | AUP |", "| --- | --- |"]
    for name, rows in sets.items():
        area = aup([(row["tpf"], row["accuracy"]) for row in front(rows)], best=best)
        lines.append(f"| {name} | {area:.0f} |")
    return "\n".join(lines)
