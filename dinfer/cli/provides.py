"""What core gets from this layer, see `dinfer.core.provided`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def answers_bar(total: int) -> Iterator[Callable[[], None]]:
    """A bar on stderr of how many answers there are."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = "answers", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("answers", total=total)
        yield lambda: bar.advance(task)
