"""A disk that is full for large files, and which tensors a file holds."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor


@contextmanager
def small_files(limit: int) -> Iterator[None]:
    """While it lasts, no file of this process grows beyond `limit` bytes: a write that would raises OSError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def lies_in(path: Path, tensor: Tensor) -> bool:
    """Whether the values are read from a mapping of the file. Linux lists the mappings of a process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, end = (int(address, 16) for address in line.split()[0].split("-"))
        if first <= tensor.data_ptr() and tensor.data_ptr() + tensor.nbytes <= end:
            return line.endswith(str(path))
    return False
