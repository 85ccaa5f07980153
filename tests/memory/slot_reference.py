"""Slots and orders of eviction, written to be read. The native table must do the same, page by page."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple, Protocol

from vllm_hybrid_sparse.errors import CapacityError
from vllm_hybrid_sparse.memory.page_keys import PageKey


class Eviction(Protocol):
    """An order over the pages that hold a slot; each is in it once."""

    def add(self, key: PageKey) -> None:
        """A page that was not in the order has been given a slot."""

    def touch(self, key: PageKey) -> None:
        """A page of the order is used again."""

    def remove(self, key: PageKey) -> None:
        """A page has lost its slot, to another or because its content changed."""

    def __iter__(self) -> Iterator[PageKey]:
        """The pages, in the order in which to evict them."""

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
    """How many turns each layer has had, including the one under way. All orders of a pool share this."""

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
    """Pages that their layer did not use in its last turn go first, then the page that was used last.

    Layers take turns, and each wants much the same pages in every step. If the pages of one step do not fit, LRU evicts
    those of the layer whose turn comes next, and nothing is ever found. The page whose next use is furthest away is one
    that the current layer has just used. If such pages are evicted, as many of a step's pages stay as there are slots.

    turns   the same for all orders of a pool if each layer has its own; None: there is only this one
    """

    def __init__(self, turns: Turns | None = None) -> None:
        self._turn_of: OrderedDict[PageKey, int] = OrderedDict()  # layer's turn at last use, oldest use first
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
        """Whether the layer's last turn left the page out. A turn under way does not count."""
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


class Taken(NamedTuple):
    """Slots of some pages, which are pinned."""

    slots: list[int]  # in the order of the pages
    missing: list[int]  # indices of slots that hold nothing yet; a page that was asked for twice is named once


class SlotTable:
    """The pages of some slots. A page has at most one slot; a pinned one keeps it until it is unpinned."""

    def __init__(self, slots: Sequence[int], order: Eviction) -> None:
        self._capacity = tuple(slots)
        self._free = list(reversed(self._capacity))  # the first given is the first of `slots`
        self._order = order
        self._aside: set[int] = set()
        self._slot_of: dict[PageKey, int] = {}
        self._pins: dict[PageKey, int] = {}
        self.evictions = 0  # pages that made room for others, since the table was made

    def set_aside(self, run: Sequence[int]) -> bool:
        """Take slots out of use, with the pages in them. Nothing changes if one is pinned or already out of use."""
        lying = [key for key, slot in self._slot_of.items() if slot in run]
        if any(key in self._pins for key in lying) or self._aside & set(run):
            return False
        for key in lying:
            self.drop(key)
        self.evictions += len(lying)
        self._aside |= set(run)
        self._free = [slot for slot in self._free if slot not in self._aside]
        return True

    def give_back(self, run: Sequence[int]) -> None:
        """Put slots that were set aside back into use."""
        assert self._aside >= set(run)
        self._aside -= set(run)
        self._free += reversed(run)

    def take(self, keys: Sequence[PageKey]) -> Taken:
        """Give slots to the pages that have none, and pin each once for each time that it is named.

        The slots of missing pages hold what others left there. CapacityError if not all fit in addition to what is
        pinned; then no page has lost or got a slot or a pin.
        """
        needed = len({key for key in keys if key not in self._slot_of}) - len(self._free)
        if needed > 0:
            self._evict(needed, set(keys))
        missing = []
        for index, key in enumerate(keys):
            if key in self._slot_of:
                self._order.touch(key)
            else:
                self._slot_of[key] = self._free.pop()
                self._order.add(key)
                missing.append(index)
            self._pins[key] = self._pins.get(key, 0) + 1
        return Taken([self._slot_of[key] for key in keys], missing)

    def _evict(self, count: int, wanted: set[PageKey]) -> None:
        """Free `count` slots in one pass over the order, which skips pinned and wanted pages."""
        spare = (key for key in self._order if key not in self._pins and key not in wanted)
        victims = list(islice(spare, count))
        if len(victims) < count:
            raise CapacityError(
                f"device_pool_pages={len(self._capacity)}: {len(wanted)} pages do not fit beside {self.pinned} in use"
            )
        for victim in victims:
            self.drop(victim)
        self.evictions += count

    def unpin(self, key: PageKey) -> None:
        """Undo one pin of the page; it keeps its slot until another page needs it."""
        if self._pins[key] == 1:
            del self._pins[key]
        else:
            self._pins[key] -= 1

    def drop(self, key: PageKey) -> bool:
        """Free the page's slot and its pins: what lies there is not the page. Returns whether it had a slot."""
        slot = self._slot_of.pop(key, None)
        if slot is None:
            return False
        self._order.remove(key)
        self._pins.pop(key, None)
        self._free.append(slot)
        return True

    def slot_of(self, key: PageKey) -> int | None:
        """The page's slot, or None. The page's recency stays as it was."""
        return self._slot_of.get(key)

    def is_pinned(self, key: PageKey) -> bool:
        """Whether the page may not be evicted."""
        return key in self._pins

    @property
    def pinned(self) -> int:
        """Pages that may not be evicted."""
        return len(self._pins)

    def __len__(self) -> int:
        return len(self._slot_of)

    def __iter__(self) -> Iterator[PageKey]:
        """The pages that have a slot, in no order."""
        return iter(self._slot_of)
