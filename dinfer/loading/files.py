"""The JSON files of a checkpoint, and the error for a wrong checkpoint. Imports neither torch nor safetensors."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

POINTER = "version https://git-lfs"
FETCH = "is a pointer that git-lfs left in place of the file: run `git lfs pull` in its folder"


class CheckpointError(ValueError):
    """The checkpoint is damaged, not supported, or does not fit its family. The message says where."""


class SmallFile(Protocol):
    """A file that describes a checkpoint: a `Path`, or a part of a GGUF file's metadata."""

    def is_file(self) -> bool: ...

    def read_text(self, encoding: str | None = None) -> str: ...


class Folder(Protocol):
    """The small files of a checkpoint: a `Path`, or a GGUF file."""

    def __truediv__(self, name: str, /) -> SmallFile: ...


def read_object(path: SmallFile) -> dict[str, Any]:
    """The JSON object in a file. Raises CheckpointError, OSError."""
    try:
        pointer = (text := path.read_text()).startswith(POINTER)
        found = None if pointer else json.loads(text)
    except ValueError as error:  # not JSON, or not even text
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if pointer:
        raise CheckpointError(f"{path} {FETCH}")
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {found!r:.80}")
    return found


def damaged(path: Path, kind: str, error: Exception) -> CheckpointError:
    """The error for a file of weights that is not of its `kind`. `error`: its reader's."""
    with path.open("rb") as file:
        pointer = file.read(len(POINTER)) == POINTER.encode()
    size = f"{path.stat().st_size:,} bytes"
    what = FETCH if pointer else f"is truncated, damaged or no {kind} file: it has {size} ({error}). Get it once more"
    return CheckpointError(f"{path} {what}")


def refuse(problems: Sequence[str], what: str) -> None:
    """Raises a CheckpointError with `what` and the first twenty problems, if there are any."""
    if problems:
        shown = "\n  ".join(sorted(problems)[:20])
        more = f"\n  and {len(problems) - 20} more" if len(problems) > 20 else ""
        raise CheckpointError(f"{what}:\n  {shown}{more}")
