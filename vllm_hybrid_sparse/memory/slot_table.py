"""Which page lies in which slot, and which slots may not be taken (`csrc/slot_table.cpp`): many pages a call."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_hybrid_sparse import _native
from vllm_hybrid_sparse.errors import CapacityError
from vllm_hybrid_sparse.memory.page_keys import LAYER_SHIFT

NO_SLOT = -1


class Taken(NamedTuple):
    """Slots of the pages of some parts, which are pinned."""

    slots: NDArray[np.int32]  # [parts, pages], NO_SLOT where there is no page, or the part got none
    fresh: NDArray[np.bool_]  # [parts, pages], those that do not hold the page yet; named twice, a page is fresh once
    refused: dict[int, CapacityError]  # by part: those that do not fit beside what is pinned


class SlotTable:
    """The pages of some slots. A page has at most one slot; a pinned one keeps it until it is unpinned."""

    def __init__(self, *, shares: int, every: int, eviction: str) -> None:
        """All slots free.

        shares     1: all layers share the slots; else each layer has a share to itself, and what it lacks nobody gives
        every      slots of a share
        eviction   one of DEVICE_EVICTIONS of the settings; `csrc/slot_table.h` says what each is
        """
        self._every = every
        order = getattr(_native.SlotTable.Order, eviction)
        self._native = _native.SlotTable(shares=shares, every=every, order=order, layer_shift=LAYER_SHIFT)

    def take(self, pages: NDArray[np.int64], wanted: NDArray[np.bool_]) -> Taken:
        """Give slots to the pages that have none, and pin each once for each time that it is named.

        A part that does not fit beside what is pinned loses and gets nothing, nor does one that is not wanted.

        pages    [parts, pages]   numbers of pages of one layer; behind the last of a part NO_PAGE
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
        """Undo one pin of each page; it keeps its slot until another page needs it. ValueError where one has none."""
        listed = np.ascontiguousarray(pages)
        self._native.unpin(_address(listed), listed.size)

    def drop(self, pages: NDArray[np.int64]) -> int:
        """Free the slots of pages, pins with them: what lies there is not the page. How many of them had one."""
        listed = np.ascontiguousarray(pages)
        return self._native.drop(_address(listed), listed.size)

    def slots_of(self, pages: NDArray[np.int64]) -> NDArray[np.int32]:
        """Slots of pages, of their shape, NO_SLOT where a page has none; the order of eviction stays as it was."""
        listed, slots = np.ascontiguousarray(pages), np.empty(pages.shape, np.int32)
        self._native.slots_of(_address(listed), listed.size, _address(slots))
        return slots

    def set_aside(self, firsts: NDArray[np.int32], length: int) -> NDArray[np.bool_]:
        """Take runs of slots out of use, which evicts what lies there, until they are given back.

        firsts    [runs]   the first slot of each run of `length`; IndexError where there are no such slots
        returns   [runs]   whether it was taken; where a slot of it is pinned or out of use, it stays as it was
        """
        listed, taken = np.ascontiguousarray(firsts), np.empty(len(firsts), np.bool_)
        self._native.set_aside(_address(listed), len(listed), length, _address(taken))
        return taken

    def give_back(self, firsts: NDArray[np.int32], length: int) -> None:
        """Have runs of slots in use again that were set aside. ValueError where one was not."""
        listed = np.ascontiguousarray(firsts)
        self._native.give_back(_address(listed), len(listed), length)

    def pages(self) -> NDArray[np.int64]:
        """The pages that have a slot, in no order."""
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
        """AssertionError where a slot is lost or held twice, or pins or the order name a page without one."""
        contradiction = self._native.contradiction()
        assert not contradiction, contradiction


def _address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])
