"""Which pages of the key/value pool belong to whom: a free list with reference counts. Host side."""

from __future__ import annotations

from dinfer.kv import RESERVED


class PageAllocator:
    """Hands out pages; a page may have several owners and is free again when the last one lets go."""

    def __init__(self, pages: int) -> None:
        self._free = list(range(RESERVED + pages - 1, RESERVED - 1, -1))
        self._owners: dict[int, int] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        if count > len(self._free):
            raise MemoryError(f"{count} pages of keys and values are needed, {len(self._free)} are free")
        pages = [self._free.pop() for _ in range(count)]
        self._owners.update(dict.fromkeys(pages, 1))
        return pages

    def share(self, pages: list[int]) -> list[int]:
        """Adds an owner to each of the pages."""
        for page in pages:
            self._owners[page] += 1
        return pages

    def release(self, pages: list[int]) -> None:
        for page in pages:
            self._owners[page] -= 1
            if self._owners[page] == 0:
                del self._owners[page]
                self._free.append(page)
