"""What MkDocs does with a page of docs/ beyond its own: links to files outside docs/ become their plain names.

Readers of the repository follow such links; the site does not hold the files.
"""

from __future__ import annotations

import re
from typing import Any

OUTSIDE = re.compile(r"\[([^\]]*)\]\((?:\.\./)+(?!components/|images/)[^)]*\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    return OUTSIDE.sub(r"\1", markdown)
