"""Writes the tables of README.md and docs from the files in benchmarks/results, so that nobody types a figure by hand.

python -m benchmarks.report
"""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.tables import RESULTS, SECTIONS

ROOT = Path(__file__).parents[1]
SECTION = re.compile(r"(<!-- ([\w-]+): begin[^\n]*-->\n).*?(<!-- \2: end -->)", re.DOTALL)


def documents() -> list[Path]:
    """README.md, the pages of docs, and the reports beside the results."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted(RESULTS.glob("*.md"))]


def pages() -> dict[Path, str]:
    """The pages that have generated sections, with these written anew.

    A pair of markers in a document names its section, so a section moves with its markers.
    """
    found = {path: path.read_text() for path in documents()}
    return {
        path: SECTION.sub(lambda section: f"{section[1]}{SECTIONS[section[2]]()}\n{section[3]}", text)
        for path, text in found.items()
        if SECTION.search(text)
    }


def main() -> None:
    for path, text in pages().items():
        path.write_text(text)


if __name__ == "__main__":
    main()
