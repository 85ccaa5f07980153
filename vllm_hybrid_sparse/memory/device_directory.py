"""The pool's pages as the device itself keeps them: begun once a step by the host, which never learns what lies where.

Everything runs on the queue that the calling thread launches to, in order, and nothing waits for the device. A step is

1. `begin_step`, when the last step's attention has been launched;
2. `set_aside`, `give_back` and `forget_blocks`, where there is reason;
3. layer by layer `look_up`, as often as there are lists, then the attention over what was listed, which puts pages into
   the slots that they were given. A page must have its content in the host store when it is read, in the queue's order.

A page is found from the step on that follows the one in which it was given a slot. So what was listed must be read, or
the directory made anew: a step that fails between the two leaves slots without the page that they are said to hold.
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
"""Pages that are given slots in a step at most. Reckoned, not measured: 4096 pages of head_dim 128 in bf16 are 32 MiB,
which a link of 50 GB/s brings in 0.7 ms; a step that reads more of the host is slow whatever is kept of it, and the
steps that follow keep the rest."""

_ROOM_SHARE = 8
"""A reserve is at most this part of the pool, since what stands in it holds no page."""

_WINDOW_ROOMS = 4
"""Slots looked at for a reserve, in reserves. Reckoned, not measured: the oldest quarter of a sample is taken, so a
page read more often than most stays. The hand goes round n slots in n / window steps: two where an eighth is the
reserve, hundreds in a pool of millions."""


class DirectoryKernels(Protocol):
    """What a directory is made of: `kernels/page_directory/gpu.py`, or its reference.py over CPU memory."""

    def turn_over(self, directory: PageDirectory, *, step: int, hand: int, window: int) -> None:
        """Publish what arrived, and fill the reserve."""

    def forget(self, directory: PageDirectory, pages: Tensor, *, store_pages: int, heads: int) -> None:
        """Have pages lie nowhere."""

    def set_aside(self, directory: PageDirectory, firsts: Tensor, length: int) -> None:
        """Have runs of slots serve something else."""

    def give_back(self, directory: PageDirectory, firsts: Tensor, length: int) -> None:
        """Have runs of slots in use again."""

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
        admit: bool = True,
    ) -> Listed:
        """List pages and say where they lie."""


class DeviceDirectory:
    """Which page of the host store lies in which slot of a pool, all layers and KV heads. For the thread of steps."""

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
        """All slots free.

        store_pages       pages of the host store of one layer and KV head
        pages_per_block   of one layer and KV head
        capacity          slots, 1 or more
        room              slots kept empty for a step's arrivals, 1 or more; None: an eighth of the slots, 1 to 4096
        window            slots that are looked at for them in a step, 1 to `capacity`; None: four times `room`
        kernels           None: those in Triton
        """
        if kernels is None:
            from vllm_hybrid_sparse.kernels.page_directory import gpu  # noqa: PLC0415  (Triton, which others lack)

            kernels = gpu
        self._kernels = kernels
        if room is None:
            room = min(_MOST_ROOM, max(1, capacity // _ROOM_SHARE))
        self.state = PageDirectory.empty(layers * kv_heads * store_pages, capacity, room, device)
        self.step = 0  # the one under way, of those with look-ups; 0: none has begun
        self._heads = layers * kv_heads
        self._kv_heads = kv_heads
        self._store_pages = store_pages
        self._pages_per_block = pages_per_block
        self._device = device
        self._window = min(capacity, _WINDOW_ROOMS * room) if window is None else window
        self._hand = 0  # where the window begins
        self._is_aside = np.zeros(capacity, dtype=np.bool_)  # by slot
        self._has_looked = False  # whether pages may be arriving

    def begin_step(self, written_pages: Sequence[int], *, arrived: bool = True) -> None:
        """Let what arrived in the last step be found, and have room for what arrives in this one.

        written_pages   of the host store, whose content the step changes in whichever layer and KV head: they are found
                        no more, and may be given slots again from this step on
        arrived         whether anything was looked up since the last step began; if not, only that is done
        """
        self._has_looked = False
        if arrived or self.step == 0:
            self.step += 1
            hand = self._next_in_use(self._hand)
            self._kernels.turn_over(self.state, step=self.step, hand=hand, window=self._window)
            self._hand = (hand + self._window) % self.state.capacity
        self._forget(written_pages)

    def _next_in_use(self, slot: int) -> int:
        """The slot or the next that is not set aside, as runs of thousands are: a window of them would give nothing."""
        found = slot + int(self._is_aside[slot:].argmin())
        return int(self._is_aside.argmin()) if self._is_aside[found] else found

    def forget_blocks(self, blocks: Sequence[int]) -> None:
        """Have no page of blocks found any more: their content changed. Before the first `look_up` of a step."""
        assert not self._has_looked, "pages may be arriving, which would be found nevertheless"
        first_pages = np.asarray(blocks, dtype=np.int64) * self._pages_per_block
        self._forget((first_pages[:, None] + np.arange(self._pages_per_block)).ravel())

    def _forget(self, pages: ArrayLike) -> None:
        listed = torch.from_numpy(np.asarray(pages, dtype=np.int64))
        if len(listed):
            self._kernels.forget(
                self.state, upload(listed, self._device), store_pages=self._store_pages, heads=self._heads
            )

    def set_aside(self, firsts: NDArray[np.int32], length: int) -> NDArray[np.bool_]:
        """Take runs of slots out of use, which evicts what lies there, until they are given back.

        Not between a `look_up` and the attention over what it listed.

        firsts    [runs]   the first slot of each run of `length`; IndexError where there are no such slots
        returns   [runs]   whether it was taken: all are
        """
        slots = self._slots(firsts, length)
        self._is_aside[slots] = True
        self._kernels.set_aside(self.state, self._uploaded(firsts), length)
        return np.ones(len(firsts), dtype=np.bool_)

    def give_back(self, firsts: NDArray[np.int32], length: int) -> None:
        """Have runs of slots in use again that were set aside. ValueError where one was not."""
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
        """The first entry of a layer, and how many there are of each of its KV heads."""
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
        admit: bool = True,
    ) -> Listed:
        """Say where the pages lie that decode rows are to read in a layer: `look_up` of kernels/page_directory/gpu.py.

        layer   the others are what they are there
        """
        self._has_looked = True
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
            store_pages=self._store_pages,
            first_entry=layer * self._kv_heads * self._store_pages,
            kv_heads=self._kv_heads,
            admit=admit,
        )
