"""Tables of figures on a terminal."""

from collections.abc import Mapping, Sequence

from rich.table import Table


def table(rows: Sequence[Mapping[str, str]], caption: str = "") -> Table:
    """A line for each row, under the names of its cells. The first cell of a row is text, the others are figures."""
    found = Table(
        box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0), caption=caption or None,
        caption_justify="left",
    )  # fmt: skip
    first, *figures = rows[0]
    found.add_column(first, overflow="fold")
    for name in figures:
        found.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        found.add_row(*row.values())
    return found
