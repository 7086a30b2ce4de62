"""Which request owns each page of the key/value pool, and which prompt's keys the page holds. Host side."""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile

from dinfer.memory.kv import RESERVED

Key = bytes


def prompt_keys(prompt: Sequence[int], end: int, page: int, block: int) -> list[Key]:
    """A hash for each page of the first `end` positions, which a prefill computes.

    It covers everything that the page's keys and values depend on: the tokens up to the end of the attention block in
    which the page ends. An attention block has `block` positions.
    """
    sha, done, keys = hashlib.sha256(), 0, []
    for stop in range(page, end + 1, page):
        seen = -(-stop // block) * block
        sha.update(array("q", prompt[done:seen]).tobytes())
        done = seen
        own = sha.copy()
        own.update(array("q", [stop]).tobytes())
        keys.append(own.digest())
    return keys


def common(some: Sequence[Key], others: Sequence[Key]) -> int:
    """The length of the common prefix."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(some, others, strict=False)))


class PageAllocator:
    """Allocates pages. A page may have several owners, and is free once the last one has released it.

    A page with the keys of a prompt can be published. Requests whose prompts begin alike may share it, even after its
    last owner has released it, until it is allocated again. The least recently used page is allocated first.
    """

    def __init__(self, pages: int) -> None:
        self._free = list(range(RESERVED + pages - 1, RESERVED - 1, -1))
        self._owners: dict[int, int] = {}
        self._page_of: dict[Key, int] = {}
        self._key_of: dict[int, Key] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # published, without an owner

    @property
    def free(self) -> int:
        """Pages without an owner."""
        return len(self._free) + len(self._idle)

    def allocate(self, count: int) -> list[int]:
        """Pages of one owner, not wiped. Raises MemoryError if too few are free."""
        if count > self.free:
            raise MemoryError(f"{count} pages of keys and values are needed, {self.free} are free")
        pages = [self._free.pop() if self._free else self._forget() for _ in range(count)]
        self._owners.update(dict.fromkeys(pages, 1))
        return pages

    def claim(self, shared: list[int], fresh: int) -> list[int] | None:
        """The shared pages and `fresh` new ones, for one owner. None, without a change, if too few are free."""
        self.share(shared)  # first, so that they are not allocated as fresh ones
        if fresh > self.free:
            self.release(shared)
            return None
        return shared + self.allocate(fresh)

    def publish(self, key: Key, page: int) -> None:
        """Notes that a page holds the keys that `key` stands for."""
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key], self._key_of[page] = page, key

    def published(self, keys: Sequence[Key]) -> list[int]:
        """The pages of the longest published prefix of the keys."""
        return [self._page_of[key] for key in takewhile(self._page_of.__contains__, keys)]

    def share(self, pages: list[int]) -> None:
        """Adds an owner to each of the published pages."""
        for page in pages:
            self._owners[page] = self._owners.get(page, 0) + 1
            self._idle.pop(page, None)

    def release(self, pages: list[int]) -> None:
        """Takes an owner from each page. A prompt's last pages are allocated first, since the fewest can share them."""
        for page in reversed(pages):
            self._owners[page] -= 1
            if self._owners[page] == 0:
                del self._owners[page]
                if page in self._key_of:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def _forget(self) -> int:
        page, _ = self._idle.popitem(last=False)
        del self._page_of[self._key_of.pop(page)]
        return page
