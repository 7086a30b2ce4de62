"""The table of decoders, caches and options that are not in the large table, for benchmarks/results/accuracy.md."""

from __future__ import annotations

import json
from pathlib import Path

FILES = {
    "tiny": ("tiny-further-cpu", "tiny-further-more-cpu", "tiny-further-prior-cpu"),
    "tiny-llada2": ("tiny-llada2-further-cpu",),
}


def further(results: Path) -> str:
    """A line for each recipe, for both models in the box."""
    reports = {
        model: [json.loads((results / f"{file}.json").read_text()) for file in files] for model, files in FILES.items()
    }
    some = reports["tiny"][0]
    commits = ", ".join(dict.fromkeys(report["commit"] for runs in reports.values() for report in runs))
    lines = [
        f"{some['rows'][0]['problems']} held-out problems, `max_new_tokens={some['setting']['new']}`, float32, "
        f"{some['hardware']}, torch {some['torch']}, commit {commits}.",
        "",
        "| model | iteration | decoder | cache | accuracy | NFE | TPF |",
        "| --- |" + " --- |" * 6,
    ]
    for model, runs in reports.items():
        for row in (row for report in runs for row in report["rows"]):
            decoder, cache = (name.partition(" ") for name in (f"{row['decoder']} {row['options']}", row["cache"]))
            cells = [" ".join([f"`{name}`", *([options] if options else [])]) for name, _, options in (decoder, cache)]
            lines.append(
                f"| `{model}` | `{row['iteration']}` | {cells[0]} | {cells[1]} | {row['accuracy']:.1f}% "
                f"| {row['nfe']:.1f} | {row['tpf']:.2f} |"
            )
    return "\n".join(lines)
