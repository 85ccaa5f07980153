"""Which page lies in which slot, and which slots may not be taken: numbers only, the memory is elsewhere."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from vllm_hybrid_sparse.errors import CapacityError
from vllm_hybrid_sparse.policy.eviction import Eviction
from vllm_hybrid_sparse.values import PageKey


class Taken(NamedTuple):
    """Slots of some pages, which are pinned."""

    slots: list[int]  # in the order of the pages
    missing: list[int]  # which of them hold nothing yet, as indices; a page that was asked for twice is named once


class SlotTable:
    """The pages of some slots. A page has at most one slot; a pinned one keeps it until it is unpinned."""

    def __init__(self, slots: Sequence[int], order: Eviction) -> None:
        self._capacity = tuple(slots)
        self._free = list(reversed(self._capacity))  # the first given is the first of `slots`
        self._order = order
        self._slot_of: dict[PageKey, int] = {}
        self._pins: dict[PageKey, int] = {}
        self.evictions = 0  # pages that made room for others, since the table was made

    def take(self, keys: Sequence[PageKey]) -> Taken:
        """Give slots to the pages that have none, and pin each once for each time that it is named.

        The slots of missing pages hold what others left there. CapacityError where not all fit beside what is pinned;
        no page has lost or got a slot or a pin then.
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
        """Free so many slots, passing once over the pages that stay because they are pinned or wanted."""
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
        """Free the page's slot, its pins with it: what lies there is not the page. Whether it had one."""
        slot = self._slot_of.pop(key, None)
        if slot is None:
            return False
        self._order.remove(key)
        self._pins.pop(key, None)
        self._free.append(slot)
        return True

    def slot_of(self, key: PageKey) -> int | None:
        """The page's slot, its recency as it was; None where it has none."""
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

    def check_integrity(self) -> None:
        """AssertionError where a slot is lost or held twice, or pins or the order name a page without one."""
        assert sorted([*self._slot_of.values(), *self._free]) == sorted(self._capacity), "a slot is lost or held twice"
        in_order = list(self._order)
        assert len(in_order) == len(set(in_order)) == len(self._order), "a page stands twice in the order"
        assert set(in_order) == set(self._slot_of), "the order and the slots hold different pages"
        assert set(self._pins) <= set(self._slot_of), "a page is pinned that has no slot"
        assert all(count > 0 for count in self._pins.values()), "a pin count is not above 0"
