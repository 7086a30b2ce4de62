"""Names of tasks, read from files without lm-eval: importing it and reading its index take ten seconds."""

import difflib
import re
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path

TASKS = Path(__file__).parent / "tasks"
_NAME = re.compile(rb"^[ \t-]*['\"]?(?:task|group|tag)['\"]?[ \t]*:[ \t]*['\"]?([\w.:+-]+)", re.MULTILINE)


def check_names(tasks: Sequence[str], include: Sequence[str] = ()) -> None:
    """Raises ValueError for a task that stands in no file of tasks: ours, those of the folders `include`, lm-eval's.

    lm-eval joins some names from parts. So a name counts as known wherever its text stands in such a file.
    """
    for folder in include:
        if not Path(folder).is_dir():
            raise ValueError(f"include={folder!r}: there is no such folder")
    spec = find_spec("lm_eval")
    theirs = [Path(folder) / "tasks" for folder in spec.submodule_search_locations or ()] if spec else []
    text = b""
    for folders in ([TASKS, *map(Path, include)], theirs):
        text += b"\n".join(path.read_bytes() for folder in folders for path in folder.rglob("*yaml*") if path.is_file())
        unknown = [name for name in tasks if not _pattern(name) and name.encode() not in text]
        if not unknown:
            return
    raise unknown_task(unknown[0], {name.decode() for name in _NAME.findall(text)})


def unknown_task(name: str, known: Iterable[str]) -> ValueError:
    """The error for a task that there is not."""
    close = difflib.get_close_matches(name, known, 3, cutoff=0.5)
    hint = f" Did you mean {', '.join(close)}?" if close else ""
    return ValueError(f"unknown task {name!r}.{hint} `lm_eval ls tasks` lists lm-eval's, {TASKS} holds ours.")


def _pattern(name: str) -> bool:
    """Whether this names a file, or many tasks."""
    return name.endswith(".yaml") or bool(set("*?[") & set(name))
