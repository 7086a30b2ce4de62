"""A hook of MkDocs: links to files outside docs/ become plain text.

Readers of the repository can follow these links, but the site does not have the files.
"""

from __future__ import annotations

import re
from posixpath import dirname, join, normpath
from typing import Any

LINK = re.compile(r"\[([^\]]*)\]\((\.\./[^)]*)\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    folder = dirname(page.file.src_uri)

    def inside(link: re.Match[str]) -> str:
        return link[1] if normpath(join(folder, link[2])).startswith("../") else link[0]

    return LINK.sub(inside, markdown)
