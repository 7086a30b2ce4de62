"""Who owns each page of keys and values, and which pages requests with the same beginning may share. Host side."""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile

from dinfer.core.memory import RESERVED
from dinfer.core.step.request import Ask


def prompt_keys(
    prompt: Sequence[int], end: int, page: int, block: int, epoch: int = 0, asks: Sequence[Ask] = ()
) -> list[bytes]:
    """A hash for each page of the first `end` positions, which a prefill computes.

    It covers everything that the page's keys and values depend on: the tokens up to the end of the attention block in
    which the page ends, and the weights, which are others in each `epoch`. An attention block has `block` positions.
    `asks`: of the request, as keys depend on them (`Ask.keyed`).
    """
    sha, done, keys = hashlib.sha256(epoch.to_bytes(8, "little")), 0, []
    for stop in range(page, end + 1, page):
        seen = -(-stop // block) * block
        sha.update(array("q", prompt[done:seen]).tobytes())
        for first, digest in (one for ask in asks for one in ask.keyed):
            sha.update(digest if done <= first < seen else b"")
        done = seen
        own = sha.copy()
        own.update(array("q", [stop]).tobytes())
        keys.append(own.digest())
    return keys


def common(some: Sequence[bytes], others: Sequence[bytes]) -> int:
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
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # published, without an owner
        self.epoch = 0  # counts the weights that keys were computed with: pages of other epochs are found by nobody

    @property
    def free(self) -> int:
        """Pages without an owner."""
        return len(self._free) + len(self._idle)

    def claim(self, shared: list[int], fresh: int) -> list[int] | None:
        """Published pages and `fresh` new ones, not wiped, for one owner. None, without a change: too few are free."""
        for page in shared:  # first, so that they are not taken as fresh ones
            self._owners[page] = self._owners.get(page, 0) + 1
            self._idle.pop(page, None)
        if fresh > self.free:
            self.release(shared)
            return None
        pages = [self._free.pop() if self._free else self._forget() for _ in range(fresh)]
        self._owners.update(dict.fromkeys(pages, 1))
        return shared + pages

    def publish(self, key: bytes, page: int) -> None:
        """Notes that a page holds the keys that `key` stands for."""
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key], self._key_of[page] = page, key

    def published(self, keys: Sequence[bytes]) -> list[int]:
        """The pages of the longest published prefix of the keys."""
        return [self._page_of[key] for key in takewhile(self._page_of.__contains__, keys)]

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
