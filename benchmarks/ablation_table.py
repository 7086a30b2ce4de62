"""The table of benchmarks.ablation, from its files in benchmarks/results."""

import json
from pathlib import Path
from typing import Any

FILES = ("ablation-h200", "ablation-experts-h200", "ablation-more-h200", "ablation-decoders-h200")


def ablation(results: Path) -> str:
    """What a step loses without each kernel group or optimisation of the host: a line each, a column for each case."""
    files = [results / f"{name}.json" for name in FILES]
    reports = [json.loads(file.read_text()) for file in files if file.is_file()]
    cases: dict[str, dict[str, Any]] = {}
    for report in reports:
        for case, rows in report["cases"].items():
            cases.setdefault(case, {}).update({name: row for name, row in rows.items() if "error" not in row})
    names = dict.fromkeys(name for rows in cases.values() for name in rows if not name.startswith("all on"))
    commits = ", ".join(dict.fromkeys(report["commit"] for report in reports))
    lines = [
        "How much longer a window step takes with one thing off, then, after the slash, the whole run with the host "
        f"(shorter runs vary by some percent). One {reports[0]['hardware']}, torch {reports[0]['torch']}, commits "
        f"{commits}.",
        "",
        "| without | " + " | ".join(cases) + " |",
        "| --- |" + " --- |" * len(cases),
    ]
    for name in names:
        cells = [_cell(rows.get(name)) for rows in cases.values()]
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    return " / ".join(f"{100 * (row[f'{key}_ratio'] - 1):+.1f}%" for key in ("step", "wall"))
