"""Hooks of MkDocs: links to files outside docs/ become plain text, formulas become MathML, units stay.

Readers of the repository can follow such links, but the site does not have the files. A browser shows MathML without a
script and without a font from elsewhere.
"""

from __future__ import annotations

import re
from html import unescape
from posixpath import dirname, join, normpath
from typing import Any

LINK = re.compile(r"\[([^\]]*)\]\((\.\./[^)]*)\)")
FORMULA = re.compile(r'class="arithmatex">\\(?P<kind>[(\[])(?P<tex>.*?)\\[)\]]<', re.DOTALL)
UNIT = re.compile(r"(<td[^>]*>[\d.,]+) (\w+</td>)")  # a number and its unit stay in one line


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    folder = dirname(page.file.src_uri)

    def inside(link: re.Match[str]) -> str:
        return link[1] if normpath(join(folder, link[2])).startswith("../") else link[0]

    return LINK.sub(inside, markdown)


def on_page_content(html: str, **_: Any) -> str:
    from latex2mathml.converter import convert  # of the extra `docs`, which the tests do without

    def typeset(formula: re.Match[str]) -> str:
        display = "block" if formula["kind"] == "[" else "inline"
        return f'class="arithmatex">{convert(unescape(formula["tex"]).strip(), display=display)}<'

    return UNIT.sub(r"\1&nbsp;\2", FORMULA.sub(typeset, html))
