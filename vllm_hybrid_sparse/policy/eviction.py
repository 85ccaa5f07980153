"""Which page makes room for another: orders of eviction over page keys, behind one small protocol."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Protocol

from vllm_hybrid_sparse.values import PageKey


class Eviction(Protocol):
    """An order over the pages that hold a slot; each is in it once."""

    def add(self, key: PageKey) -> None:
        """A page that was not in the order has been given a slot."""

    def touch(self, key: PageKey) -> None:
        """A page of the order is used again."""

    def remove(self, key: PageKey) -> None:
        """A page has lost its slot, to another or because its content changed."""

    def __iter__(self) -> Iterator[PageKey]:
        """The pages, the one to evict first before the others."""

    def __len__(self) -> int:
        """How many pages hold a slot."""


class FIFO:
    """The page that was loaded first goes first, however often it is used."""

    def __init__(self) -> None:
        self._order: OrderedDict[PageKey, None] = OrderedDict()

    def add(self, key: PageKey) -> None:
        """Last in the order."""
        self._order[key] = None

    def touch(self, key: PageKey) -> None:
        """Changes nothing."""

    def remove(self, key: PageKey) -> None:
        """Out of the order."""
        del self._order[key]

    def __iter__(self) -> Iterator[PageKey]:
        return iter(self._order)

    def __len__(self) -> int:
        return len(self._order)


class LRU(FIFO):
    """The page that was used longest ago goes first (PSA, section 3.4): queries of consecutive tokens are alike."""

    def touch(self, key: PageKey) -> None:
        """Last in the order, as if it had just been loaded."""
        self._order.move_to_end(key)


EVICTIONS: dict[str, Callable[[], Eviction]] = {"lru": LRU, "fifo": FIFO}
