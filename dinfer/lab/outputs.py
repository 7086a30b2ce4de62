"""Files that a command writes: checked before the work, written as a whole, and named by every error."""

import errno
import fcntl
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

PROBE = b"\0" * 65536  # a full disk has room for an empty file


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Gives every OSError the name of `path`: a full disk raises one without a name."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def check_folder(folder: Path, file: Path | None = None) -> None:
    """Makes `folder` unless it exists, and writes a probe into it. Raises OSError; a full disk is one of `file`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder)) from error
    with naming(folder):
        opened = tempfile.NamedTemporaryFile(dir=folder, prefix=".dinfer-")  # noqa: SIM115, it is closed below
    with naming(file or folder), opened as probe:
        probe.write(PROBE)
        probe.flush()


def check_file(path: Path) -> None:
    """Makes sure that `path` can be written; makes its folder. Raises OSError."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.exists():
        path.open("ab").close()
    if not path.exists() or path.is_file():
        check_folder(path.parent, path)


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


def whole_lines(path: Path) -> list[bytes]:
    """The lines of a file, without a last one that a kill cut short or that is being written. Raises OSError.

    They are bytes, since such a last line may end within a character.
    """
    return path.read_bytes().split(b"\n")[:-1]


class JsonLines:
    """A file to which one process appends JSON lines, locked while it is open. Only a kill can cut the last line short.

    A pipe or a device also takes lines, but does not keep them.
    """

    def __init__(self, path: Path, *, overwrite: bool = False) -> None:
        """Raises ValueError if another process writes the file, and OSError."""
        self.path = path
        with naming(path):
            self._file = path.open("ab", buffering=0)
        self.keeps = path.is_file()
        if not self.keeps:
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the lock ends with the process
        except BlockingIOError as error:
            self._file.close()
            raise ValueError(f"another process writes {path}: wait for its end, or choose another output") from error
        if overwrite:
            self._file.truncate(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def mend(self) -> None:
        """Drops a last line that a kill cut short."""
        if self.keeps:
            with self.path.open("rb") as file:
                self._file.truncate(sum(len(line) for line in file if line.endswith(b"\n")))

    def write(self, line: Mapping[str, Any]) -> None:
        """Appends a line, all of it or, with an OSError, none."""
        left = memoryview(json.dumps(line, ensure_ascii=False).encode(errors="backslashreplace") + b"\n")
        size = os.fstat(self._file.fileno()).st_size
        with naming(self.path):
            try:
                while left:
                    left = left[self._file.write(left) :]
            except OSError:  # for example a full disk
                if self.keeps:
                    self._file.truncate(size)
                raise
