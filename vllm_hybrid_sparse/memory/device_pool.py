"""Device memory as a cache of the host store: one tensor of page slots for all layers (PSA, section 3.4)."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_hybrid_sparse.errors import ConfigError
from vllm_hybrid_sparse.memory.host_pages import HostPages
from vllm_hybrid_sparse.memory.queues import Mark
from vllm_hybrid_sparse.memory.slot_table import NO_SLOT, SlotTable, Taken
from vllm_hybrid_sparse.settings import DEVICE_EVICTIONS
from vllm_hybrid_sparse.values import PAGE_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolShape:
    """How many pages the device holds, and for whom. Raises ConfigError."""

    capacity_pages: int  # slots, all layers together
    layers: int
    head_dim: int
    dtype: torch.dtype
    eviction: str = "cyclic"  # cyclic | lru | fifo
    unified: bool = True  # False: every layer has its own equal share of the slots, as a baseline

    def __post_init__(self) -> None:
        if self.layers < 1:
            raise ConfigError(f"layers={self.layers}: must be at least 1")
        if self.eviction not in DEVICE_EVICTIONS:
            raise ConfigError(f"device_eviction={self.eviction!r}: must be one of {', '.join(DEVICE_EVICTIONS)}")
        if self.layer_capacity_pages < 1:
            raise ConfigError(
                f"device_pool_pages={self.capacity_pages}: must be at least {1 if self.unified else self.layers}"
            )

    @property
    def layer_capacity_pages(self) -> int:
        """The most slots that one layer can hold."""
        return self.capacity_pages if self.unified else self.capacity_pages // self.layers


def free_device_bytes(device: torch.device) -> int:
    """Memory of a GPU that may still be taken: what the driver has left, and what torch holds without using it."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


class DevicePool:
    """The slots, and which pages they hold. Only the loader's thread calls methods that change it
    (`memory/transfers.py`).

    Kernels also write slots: those of frames, and under device ranking those that the device's own directory gives out.

    Pages are given as numbers (`memory/page_keys.py`), int64.
    """

    def __init__(self, shape: PoolShape, device: torch.device | None = None) -> None:
        """An empty pool.

        device   where the slots lie; None: in CPU memory
        """
        shares = 1 if shape.unified else shape.layers
        size = (shape.layer_capacity_pages * shares, PAGE_TOKENS, shape.head_dim)
        self.shape = shape
        self.key = torch.empty(size, dtype=shape.dtype, device=device)  # [slots, 16, head_dim], rows of tokens
        self.value = torch.empty(size, dtype=shape.dtype, device=device)
        self._aside = 0  # slots that are set aside
        self._table = SlotTable(shares=shares, every=shape.layer_capacity_pages, eviction=shape.eviction)

    def take(self, pages: NDArray[np.int64], wanted: NDArray[np.bool_]) -> Taken:
        """Give slots to pages of one layer, in parts, and pin each page once for every time it is named.

        The caller must fill the fresh slots or drop their pages. A part that does not fit next to the pinned pages is
        refused as a whole.

        pages    [parts, pages]   padded with NO_PAGE
        wanted   [parts]          a part that is not wanted takes nothing
        """
        return self._table.take(pages, wanted)

    def release(self, pages: NDArray[np.int64]) -> None:
        """Undo one pin of each page. A page stays until its slot is needed."""
        self._table.unpin(pages)

    def drop(self, pages: NDArray[np.int64]) -> int:
        """Forget pages whose slots do not match the host store. Returns how many of them had a slot."""
        return self._table.drop(pages)

    def slots_of(self, pages: NDArray[np.int64]) -> NDArray[np.int32]:
        """Slots of pages, in the same shape, NO_SLOT if a page has none. Does not change recency."""
        return self._table.slots_of(pages)

    def missing(self, pages: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which pages have no slot; NO_PAGE is not missing."""
        lacking: NDArray[np.bool_] = (self.slots_of(pages) == NO_SLOT) & (pages >= 0)
        return lacking

    def fill(self, slots: NDArray[np.int32], source: HostPages, pages: NDArray[np.int64]) -> None:
        """Copy pages of a layer's host store into slots. A call that fails has filled none, or may be repeated."""
        self.put(slots, *source.read(pages))

    def set_aside(self, firsts: NDArray[np.int32], length: int) -> NDArray[np.bool_]:
        """Take runs of slots of a unified pool out of use until they are given back: see `SlotTable.set_aside`."""
        taken = self._table.set_aside(firsts, length)
        self._aside += int(taken.sum()) * length
        return taken

    def give_back(self, firsts: NDArray[np.int32], length: int) -> None:
        """Put runs of slots that were set aside back into use."""
        self._table.give_back(firsts, length)
        self._aside -= len(firsts) * length

    @property
    def layer_slots(self) -> int:
        """The most slots that single pages of one layer can have now."""
        return self.shape.layer_capacity_pages - self._aside

    def follow(self, mark: Mark) -> None:
        """Put later content into slots only after a mark; here every mark has passed."""

    def mark(self) -> Mark | None:
        """A mark behind everything put into slots so far; None: it is there already."""
        return None

    def put(self, slots: NDArray[np.int32], key: Tensor, value: Tensor) -> None:
        """Fill slots; key and value [slots, 16, head_dim] of the pool's dtype."""
        index = torch.from_numpy(slots).long()
        self.key[index] = key
        self.value[index] = value

    def put_tokens(self, slots: NDArray[np.int32], offsets: NDArray[np.int64], key: Tensor, value: Tensor) -> None:
        """Write one token into each of some slots.

        offsets      the token's place in the page, 0 to 15
        key, value   [slots, head_dim]
        """
        index = torch.from_numpy(slots).long(), torch.from_numpy(offsets)
        self.key[index] = key
        self.value[index] = value

    @property
    def resident_pages(self) -> int:
        """Pages that have a slot."""
        return len(self._table)

    @property
    def pinned_pages(self) -> int:
        """Pages whose slots a step is using."""
        return self._table.pinned

    @property
    def evictions(self) -> int:
        """Pages that made room for others since the pool was made."""
        return self._table.evictions

    def check_integrity(self) -> None:
        """AssertionError if the table contradicts itself or holds a page in another layer's share."""
        self._table.check_integrity()
