"""The device's own directory of the pool's pages: the host launches its updates and never learns what lies where.

Everything is launched in order on the calling thread's current queue, and nothing waits for the device. A step is

1. `begin_step`, after the last step's attention has been launched;
2. `set_aside` and `give_back`, if needed;
3. for each layer one `look_up` per list, followed by the attention over the listed pages, which also writes pages into
   the slots that they were given. In the queue's order, the host store must hold a page before the page is read.

If a page is given a slot in one step, it is found from the next step on. So listed pages must be read. If a step fails
between look-up and attention, some slots do not hold the page that the directory names for them, and it must be
rebuilt.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from vllm_hybrid_sparse.kernels.page_directory.state import Listed, PageDirectory
from vllm_hybrid_sparse.memory.queues import upload

_MOST_ROOM = 4096
"""The most pages that get slots in one step. Calculated, not measured: 4096 pages of head_dim 128 in bf16 are 32
MiB, which a link of 50 GB/s brings in 0.7 ms. A step that reads more from the host is slow whatever it keeps, and
the following steps keep the rest."""

_ROOM_SHARE = 8
"""The reserve is at most one part in this many of the pool, because its slots hold no page."""

_WINDOW_ROOMS = 4
"""Slots searched in a step to fill the reserve, as a multiple of the reserve. Calculated, not measured: the oldest
quarter of these slots is taken, so a page that is read more often than most stays. The hand goes round n slots in n
/ window steps: two if the reserve is an eighth of the pool, hundreds in a pool of millions."""


class DirectoryKernels(Protocol):
    """The kernels of a directory: `kernels/page_directory/gpu.py`, or its reference.py over CPU memory."""

    def turn_over(self, directory: PageDirectory, *, step: int, hand: int, window: int) -> None:
        """Make the pages that arrived findable, and fill the reserve."""

    def forget(self, directory: PageDirectory, pages: Tensor, *, store_pages: int, heads: int) -> None:
        """Record that pages lie in no slot."""

    def set_aside(self, directory: PageDirectory, firsts: Tensor, length: int) -> None:
        """Take runs of slots out of use, for another purpose."""

    def give_back(self, directory: PageDirectory, firsts: Tensor, length: int) -> None:
        """Put runs of slots back into use."""

    def look_up(
        self,
        directory: PageDirectory,
        blocks: Tensor,
        seq_lens: Tensor,
        candidates: Tensor,
        counts: Tensor,
        order: Tensor | None,
        *,
        first_page: int,
        most: int,
        pages_per_block: int,
        store_pages: int,
        first_entry: int,
        kv_heads: int,
    ) -> Listed:
        """List pages, and where they lie."""


class DeviceDirectory:
    """Which page of the host store lies in which slot, for all layers and KV heads. Only for the step's thread."""

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        store_pages: int,
        pages_per_block: int,
        capacity: int,
        device: torch.device,
        *,
        room: int | None = None,
        window: int | None = None,
        kernels: DirectoryKernels | None = None,
    ) -> None:
        """All slots are free.

        store_pages       pages of the host store for one layer and KV head
        pages_per_block   likewise
        capacity          slots, 1 or more
        room              slots kept empty for a step's arrivals, 1 or more; None: an eighth of the slots, 1 to 4096
        window            slots searched in a step to fill the reserve, 1 to `capacity`; None: four times `room`
        kernels           None: the Triton kernels
        """
        if kernels is None:
            from vllm_hybrid_sparse.kernels.page_directory import gpu  # noqa: PLC0415  (Triton, which others lack)

            kernels = gpu
        self._kernels = kernels
        if room is None:
            room = min(_MOST_ROOM, max(1, capacity // _ROOM_SHARE))
        self.state = PageDirectory.empty(layers * kv_heads * store_pages, capacity, room, device)
        self.step = 0  # the current step; steps without look-ups do not count; 0: none has begun
        self._heads = layers * kv_heads
        self._kv_heads = kv_heads
        self._store_pages = store_pages
        self._pages_per_block = pages_per_block
        self._device = device
        self._window = min(capacity, _WINDOW_ROOMS * room) if window is None else window
        self._hand = 0  # where the window begins
        self._is_aside = np.zeros(capacity, dtype=np.bool_)  # by slot

    def begin_step(self, written_pages: Sequence[int], *, arrived: bool = True) -> None:
        """Make the last step's arrivals findable, and make room for this step's.

        written_pages   of the host store, whose content this step changes in any layer and KV head. They are no longer
                        found, and may be given slots again from this step on
        arrived         whether anything was looked up since the last step began; if not, this only forgets those pages
        """
        if arrived or self.step == 0:
            self.step += 1
            hand = self._next_in_use(self._hand)
            self._kernels.turn_over(self.state, step=self.step, hand=hand, window=self._window)
            self._hand = (hand + self._window) % self.state.capacity
        self._forget(written_pages)

    def _next_in_use(self, slot: int) -> int:
        """The first slot from here on that is not set aside.

        Runs of thousands are, and a window inside one would yield no slot.
        """
        found = slot + int(self._is_aside[slot:].argmin())
        return int(self._is_aside.argmin()) if self._is_aside[found] else found

    def _forget(self, pages: ArrayLike) -> None:
        listed = torch.from_numpy(np.asarray(pages, dtype=np.int64))
        if len(listed):
            self._kernels.forget(
                self.state, upload(listed, self._device), store_pages=self._store_pages, heads=self._heads
            )

    def set_aside(self, firsts: NDArray[np.int32], length: int) -> NDArray[np.bool_]:
        """Take runs of slots out of use until they are given back. The pages that lie there are evicted.

        Do not call it between a `look_up` and the attention over what was listed.

        firsts    [runs]   the first slot of each run of `length`; IndexError if there are no such slots
        returns   [runs]   whether the run was taken: all are
        """
        slots = self._slots(firsts, length)
        self._is_aside[slots] = True
        self._kernels.set_aside(self.state, self._uploaded(firsts), length)
        return np.ones(len(firsts), dtype=np.bool_)

    def give_back(self, firsts: NDArray[np.int32], length: int) -> None:
        """Put runs of slots that were set aside back into use. ValueError if a slot was not set aside."""
        slots = self._slots(firsts, length)
        if not self._is_aside[slots].all():
            raise ValueError(f"slot={slots[~self._is_aside[slots]][0]}: is in use, it was not set aside")
        self._is_aside[slots] = False
        self._kernels.give_back(self.state, self._uploaded(firsts), length)

    def _slots(self, firsts: NDArray[np.int32], length: int) -> NDArray[np.int64]:
        last = self.state.capacity - length
        outside = firsts[(firsts < 0) | (firsts > last)]
        if len(outside):
            raise IndexError(f"first={outside[0]}: must be 0 to {last}, {length} slots before the end")
        return (firsts[:, None] + np.arange(length)).ravel()

    def _uploaded(self, firsts: NDArray[np.int32]) -> Tensor:
        return upload(torch.from_numpy(np.ascontiguousarray(firsts)), self._device)

    def entries_of(self, layer: int) -> tuple[int, int]:
        """The first entry of a layer, and the number of entries per KV head."""
        return layer * self._kv_heads * self._store_pages, self._store_pages

    def look_up(
        self,
        layer: int,
        blocks: Tensor,
        seq_lens: Tensor,
        candidates: Tensor,
        counts: Tensor,
        order: Tensor | None,
        *,
        first_page: int,
        most: int,
    ) -> Listed:
        """Find the pages that decode rows are to read in a layer: `look_up` of kernels/page_directory/gpu.py.

        The other arguments are as described there.
        """
        first_entry, store_pages = self.entries_of(layer)
        return self._kernels.look_up(
            self.state,
            blocks,
            seq_lens,
            candidates,
            counts,
            order,
            first_page=first_page,
            most=most,
            pages_per_block=self._pages_per_block,
            store_pages=store_pages,
            first_entry=first_entry,
            kv_heads=self._kv_heads,
        )
