"""Files that a command writes: checked before the work, written as a whole, and named by every error."""

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PROBE = b"\0" * 65536  # a full disk has room for an empty file


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Gives every OSError the name of `path`: a full disk raises one without a name."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def check_folder(folder: Path) -> None:
    """Makes `folder` unless it exists, and writes a probe into it. Raises OSError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder)) from error
    with naming(folder), tempfile.NamedTemporaryFile(dir=folder, prefix=".dinfer-") as probe:
        probe.write(PROBE)
        probe.flush()


def check_file(path: Path) -> None:
    """Makes sure that `path` can be written; makes its folder. Raises OSError."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.exists():
        path.open("ab").close()
    if not path.exists() or path.is_file():
        check_folder(path.parent)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write beside `path`, which it replaces at the end; after an error, `path` is as it was."""
    with naming(path):
        if path.exists() and not path.is_file():  # such as /dev/stdout
            yield path
            return
        target = path.resolve()
        part = target.with_name(f".{os.getpid()}.{target.name}")
        try:
            yield part
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)


def write(path: Path, text: str) -> None:
    """Writes a whole file or none. Raises OSError."""
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8")
