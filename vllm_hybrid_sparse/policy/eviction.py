"""Which page makes room for another: orders of eviction over page keys, behind one small protocol."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import islice
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


class Turns:
    """How many turns each layer has had, the one under way included; of all orders of a pool together."""

    def __init__(self) -> None:
        self.layer = -1  # whose turn it is
        self._of: dict[int, int] = {}

    def take(self, layer: int) -> int:
        """Return the number of the turn that a use by this layer is in."""
        if layer != self.layer:
            self.layer = layer
            self._of[layer] = self._of.get(layer, 0) + 1
        return self._of[layer]

    def of(self, layer: int) -> int:
        """Return the number of the layer's latest turn."""
        return self._of[layer]


class Cyclic:
    """Pages that their layer had no use for in its last turn go first, then the page that was used last.

    Layers take turns, and each wants much the same pages in every step. Where the pages of one step do not fit, LRU
    evicts those of the layer whose turn comes next, and nothing is ever found. The page whose next use is furthest away
    is one that the layer under way has just used; so of a step's pages as many stay as there are slots.

    turns   the same for all orders of a pool whose layers have an order each; None: this one is alone
    """

    def __init__(self, turns: Turns | None = None) -> None:
        self._turn_of: OrderedDict[PageKey, int] = OrderedDict()  # its layer's turn at its last use, oldest use first
        self._turns = turns or Turns()

    def add(self, key: PageKey) -> None:
        """Used in the turn under way."""
        self._turn_of[key] = self._turns.take(key.layer)

    def touch(self, key: PageKey) -> None:
        """Used in the turn under way."""
        self._turn_of[key] = self._turns.take(key.layer)
        self._turn_of.move_to_end(key)

    def remove(self, key: PageKey) -> None:
        """Out of the order."""
        del self._turn_of[key]

    def _had_no_use(self, key: PageKey, turn: int) -> bool:
        """Whether the page was left out in its layer's last turn, of which one that is under way does not count."""
        return self._turns.of(key.layer) - turn > (key.layer == self._turns.layer)

    def __iter__(self) -> Iterator[PageKey]:
        unused = 0
        for key, turn in self._turn_of.items():
            if not self._had_no_use(key, turn):
                break
            unused += 1
            yield key
        yield from islice(reversed(self._turn_of), len(self._turn_of) - unused)

    def __len__(self) -> int:
        return len(self._turn_of)


EVICTIONS: dict[str, Callable[..., Eviction]] = {
    "cyclic": Cyclic,
    "lru": lambda _turns=None: LRU(),
    "fifo": lambda _turns=None: FIFO(),
}
"""Orders by name; each may be given the turns of its pool."""
