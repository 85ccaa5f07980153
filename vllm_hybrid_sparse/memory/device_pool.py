"""Device memory as a cache of the host store: one tensor of page slots for all layers (PSA, section 3.4)."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_hybrid_sparse.errors import ConfigError
from vllm_hybrid_sparse.memory.host_pages import HostPages
from vllm_hybrid_sparse.memory.queues import Mark
from vllm_hybrid_sparse.policy.eviction import EVICTIONS, Turns
from vllm_hybrid_sparse.policy.slot_table import SlotTable, Taken
from vllm_hybrid_sparse.values import PAGE_TOKENS, PageKey


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolShape:
    """How many pages the device holds, and for whom. Raises ConfigError."""

    capacity_pages: int  # slots, all layers together
    layers: int
    head_dim: int
    dtype: torch.dtype
    eviction: str = "cyclic"  # cyclic | lru | fifo
    unified: bool = True  # False: every layer has an equal share of the slots to itself, as a baseline

    def __post_init__(self) -> None:
        if self.layers < 1:
            raise ConfigError(f"layers={self.layers}: must be at least 1")
        if self.eviction not in EVICTIONS:
            raise ConfigError(f"device_eviction={self.eviction!r}: must be one of {', '.join(EVICTIONS)}")
        if self.layer_capacity_pages < 1:
            raise ConfigError(
                f"device_pool_pages={self.capacity_pages}: must be at least {1 if self.unified else self.layers}"
            )

    @property
    def layer_capacity_pages(self) -> int:
        """The most slots that one layer can hold."""
        return self.capacity_pages if self.unified else self.capacity_pages // self.layers


class DevicePool:
    """The slots and which pages they hold. Its one writer is the loader's thread (`memory/transfers.py`)."""

    def __init__(self, shape: PoolShape, device: torch.device | None = None) -> None:
        """An empty pool.

        device   where the slots lie; None: in CPU memory
        """
        slots = shape.layer_capacity_pages * (1 if shape.unified else shape.layers)
        size = (slots, PAGE_TOKENS, shape.head_dim)
        self.shape = shape
        self.key = torch.empty(size, dtype=shape.dtype, device=device)  # [slots, 16, head_dim], rows of tokens
        self.value = torch.empty(size, dtype=shape.dtype, device=device)
        every, turns = shape.layer_capacity_pages, Turns()
        self._tables = [
            SlotTable(range(first, first + every), EVICTIONS[shape.eviction](turns)) for first in range(0, slots, every)
        ]

    def _table(self, layer: int) -> SlotTable:
        return self._tables[0 if self.shape.unified else layer]

    def take(self, keys: Sequence[PageKey]) -> Taken:
        """Give slots to pages of one layer and pin each, once for each time that it is asked for.

        The caller fills the slots of those that are missing, or drops these pages. CapacityError, with nothing changed,
        where not all fit beside what is pinned.
        """
        return self._table(keys[0].layer).take(keys) if keys else Taken([], [])

    def release(self, keys: Iterable[PageKey]) -> None:
        """Undo the pins of one `take`; the pages stay until their slots are needed."""
        for key in keys:
            self._table(key.layer).unpin(key)

    def drop(self, keys: Iterable[PageKey]) -> int:
        """Forget pages whose slots do not hold what the host store does; how many of them had one."""
        return sum(self._table(key.layer).drop(key) for key in keys)

    def slots_of(self, keys: Sequence[PageKey]) -> list[int]:
        """Slots of pages, -1 where a page has none; recency stays as it was."""
        found = [self._table(key.layer).slot_of(key) for key in keys]
        return [-1 if slot is None else slot for slot in found]

    def fill(self, slots: Sequence[int], source: HostPages, keys: Sequence[PageKey]) -> None:
        """Copy pages of a layer's host store into slots; what fails has filled none, or may be tried again."""
        self.put(slots, *source.read(keys))

    def mark(self) -> Mark | None:
        """Behind which all is in its slots that was put there; None: it is there already."""
        return None

    def put(self, slots: Sequence[int], key: Tensor, value: Tensor) -> None:
        """Fill slots; key and value [slots, 16, head_dim] of the pool's dtype."""
        index = torch.tensor(slots, dtype=torch.int64)
        self.key[index] = key
        self.value[index] = value

    def put_tokens(self, slots: Sequence[int], offsets: Sequence[int], key: Tensor, value: Tensor) -> None:
        """Write one token into each of some slots.

        offsets      its place in the page, 0 to 15
        key, value   [slots, head_dim]
        """
        index = torch.tensor(slots, dtype=torch.int64), torch.tensor(offsets, dtype=torch.int64)
        self.key[index] = key
        self.value[index] = value

    @property
    def resident_pages(self) -> int:
        """Pages that have a slot."""
        return sum(len(table) for table in self._tables)

    @property
    def pinned_pages(self) -> int:
        """Pages whose slots a step is using."""
        return sum(table.pinned for table in self._tables)

    @property
    def evictions(self) -> int:
        """Pages that made room for others since the pool was made."""
        return sum(table.evictions for table in self._tables)

    def resident_by_layer(self) -> Counter[int]:
        """How many slots each layer holds."""
        return Counter(key.layer for table in self._tables for key in table)

    def check_integrity(self) -> None:
        """AssertionError where the tables contradict themselves or hold a page of another layer's share."""
        for index, table in enumerate(self._tables):
            table.check_integrity()
            assert self.shape.unified or {key.layer for key in table} <= {index}, "a page lies in another layer's share"
