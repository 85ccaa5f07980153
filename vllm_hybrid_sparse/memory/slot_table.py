"""Which page lies in which slot, and which slots may not be taken (`csrc/slot_table.cpp`); a call takes many pages."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_hybrid_sparse import _native
from vllm_hybrid_sparse.errors import CapacityError
from vllm_hybrid_sparse.memory.page_keys import LAYER_SHIFT

NO_SLOT = -1


class Taken(NamedTuple):
    """Slots of the pages of some parts. The pages are pinned."""

    slots: NDArray[np.int32]  # [parts, pages], NO_SLOT if there is no page or the part got no slots
    fresh: NDArray[np.bool_]  # [parts, pages], slots that do not hold their page yet; a page named twice is fresh once
    refused: dict[int, CapacityError]  # by part: those that do not fit next to the pinned pages


class SlotTable:
    """The pages of some slots. A page has at most one slot; a pinned one keeps it until it is unpinned."""

    def __init__(self, *, shares: int, every: int, eviction: str) -> None:
        """All slots are free.

        shares     1: all layers share the slots; otherwise each layer has its own share and cannot use another's slots
        every      slots per share
        eviction   one of DEVICE_EVICTIONS of the settings; `csrc/slot_table.h` explains them
        """
        self._every = every
        order = getattr(_native.SlotTable.Order, eviction)
        self._native = _native.SlotTable(shares=shares, every=every, order=order, layer_shift=LAYER_SHIFT)

    def take(self, pages: NDArray[np.int64], wanted: NDArray[np.bool_]) -> Taken:
        """Give slots to the pages that have none, and pin each page once for every time it is named.

        A part that is not wanted, or does not fit next to the pinned pages, neither gets nor loses anything.

        pages    [parts, pages]   numbers of pages of one layer, padded with NO_PAGE
        wanted   [parts]
        """
        parts, width = pages.shape
        listed, asked = np.ascontiguousarray(pages), np.ascontiguousarray(wanted)
        slots, fresh = np.empty(pages.shape, np.int32), np.empty(pages.shape, np.bool_)
        refused = self._native.take(_address(listed), _address(asked), parts, width, _address(slots), _address(fresh))
        errors = {
            part.part: CapacityError(
                f"device_pool_pages={self._every}: {part.wanted} pages do not fit beside {part.pinned} in use"
            )
            for part in refused
        }
        return Taken(slots, fresh, errors)

    def unpin(self, pages: NDArray[np.int64]) -> None:
        """Undo one pin of each page; it keeps its slot until another page needs it. ValueError if one has no pin."""
        listed = np.ascontiguousarray(pages)
        self._native.unpin(_address(listed), listed.size)

    def drop(self, pages: NDArray[np.int64]) -> int:
        """Free slots that no longer hold these pages' content, with all pins. Returns how many pages had a slot."""
        listed = np.ascontiguousarray(pages)
        return self._native.drop(_address(listed), listed.size)

    def slots_of(self, pages: NDArray[np.int64]) -> NDArray[np.int32]:
        """Slots of pages, in the same shape, NO_SLOT if a page has none. Does not change the order of eviction."""
        listed, slots = np.ascontiguousarray(pages), np.empty(pages.shape, np.int32)
        self._native.slots_of(_address(listed), listed.size, _address(slots))
        return slots

    def set_aside(self, firsts: NDArray[np.int32], length: int) -> NDArray[np.bool_]:
        """Take runs of slots out of use until they are given back. The pages that lie there are evicted.

        firsts    [runs]   the first slot of each run of `length`; IndexError if there are no such slots
        returns   [runs]   whether the run was taken; a run with a slot that is pinned or out of use stays as it was
        """
        listed, taken = np.ascontiguousarray(firsts), np.empty(len(firsts), np.bool_)
        self._native.set_aside(_address(listed), len(listed), length, _address(taken))
        return taken

    def give_back(self, firsts: NDArray[np.int32], length: int) -> None:
        """Put runs of slots that were set aside back into use. ValueError if one was not set aside."""
        listed = np.ascontiguousarray(firsts)
        self._native.give_back(_address(listed), len(listed), length)

    def pages(self) -> NDArray[np.int64]:
        """The pages that have a slot, in no particular order."""
        return np.array(self._native.pages(), dtype=np.int64)

    @property
    def evictions(self) -> int:
        """Pages that made room for others, since the table was made."""
        return self._native.evictions

    @property
    def pinned(self) -> int:
        """Pages that may not be evicted."""
        return self._native.pinned

    def __len__(self) -> int:
        return self._native.resident

    def check_integrity(self) -> None:
        """AssertionError if a slot is lost or held twice, or if pins or the order name a page without a slot."""
        contradiction = self._native.contradiction()
        assert not contradiction, contradiction


def _address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])
