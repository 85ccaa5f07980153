"""Pages by name, as the numbers that the pool and its loader take."""

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from vllm_hybrid_sparse.memory.device_pool import DevicePool
from vllm_hybrid_sparse.memory.page_keys import NO_PAGE, PageKey
from vllm_hybrid_sparse.memory.slot_table import SlotTable


def numbered(keys: Collection[PageKey]) -> NDArray[np.int64]:
    """The numbers of pages, [keys]."""
    return np.array([key.number for key in keys], dtype=np.int64)


def side_by_side(parts: Sequence[Sequence[PageKey]]) -> NDArray[np.int64]:
    """The numbers of pages, [parts, pages of the longest], with NO_PAGE at the end of shorter parts."""
    pages = np.full((len(parts), max(map(len, parts), default=0)), NO_PAGE, dtype=np.int64)
    for row, part in zip(pages, parts, strict=True):
        row[: len(part)] = numbered(part)
    return pages


def named(numbers: NDArray[np.int64]) -> list[PageKey]:
    """The pages that numbers stand for."""
    return [PageKey.of(number) for number in numbers.tolist()]


def all_of(pages: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Every part is wanted."""
    return np.ones(len(pages), dtype=np.bool_)


def none_of(pages: NDArray[np.int64]) -> NDArray[np.bool_]:
    """No part is wanted."""
    return np.zeros(len(pages), dtype=np.bool_)


def take_part(owner: DevicePool | SlotTable, pages: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """Slots of the pages of one part, and which of them are fresh; CapacityError if it is refused."""
    taken = owner.take(pages[None], all_of(pages[None]))
    for error in taken.refused.values():
        raise error
    return taken.slots[0], taken.fresh[0]
