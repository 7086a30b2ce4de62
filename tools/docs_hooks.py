"""A hook of MkDocs: links to files outside docs/ become plain text.

Readers of the repository can follow these links, but the site does not have the files.
"""

from __future__ import annotations

import re
from typing import Any

OUTSIDE = re.compile(r"\[([^\]]*)\]\((?:\.\./)+(?!components/|images/)[^)]*\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    return OUTSIDE.sub(r"\1", markdown)
